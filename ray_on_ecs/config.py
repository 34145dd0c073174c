"""Settings of a run: one dataclass for flags, help and saved JSON.

An environment variable can set a flag's default, `RAY_ON_ECS_STORAGE_PATH` for `--storage-path`; that is how the
cluster's task definition passes the bucket.
"""

from __future__ import annotations

import getpass
import os
import random
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Self

from ray_on_ecs import secrets
from ray_on_ecs.addresses import check_address
from ray_on_ecs.errors import UsageError
from ray_on_ecs.flags import check, environment_variable, flag, flags_of, setting

DRIVER = ("python", "-m", "ray_on_ecs.run")
# Ray sets the first for the driver of a job, and `ray-on-ecs run --local` the second.
JOB_VARIABLE, LOCAL_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ON_ECS_LOCAL"
# Keys of a job's metadata: the user who submitted it, and the time (Unix time).
OWNER, SUBMITTED = "owner", "submitted"
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
METRIC_NAME = r"[A-Za-z_][\w/.-]*"
# A complete number in a metric's text: not followed by a digit, fraction or exponent.
PLACEHOLDER = "{number}"
NUMBER = r"([+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|(?i:inf(?:inity)?|nan)\b))(?!\d|[.,]\d|[eE][+-]?\d)"
LONGEST_LABEL = 20
# The ends of names of variables that hold secrets.
OF_SECRETS = re.compile(r"(?i)(?:^|_|API)(?:TOKEN|KEY|SECRET|PASSWORD)$")
# Settings of the number of workers, and those that a Ray program can't use, with the reason.
WORKERS = ("num_workers", "nnodes", "nproc_per_node")
WITHOUT_DRIVER = {
    **dict.fromkeys(WORKERS, "sets its number of workers itself, as in ScalingConfig(num_workers=...)"),
    "device": "says itself whether its workers have GPUs",
    "mpi": "is not started by mpirun",
    "no_python": "is run by Python",
    "no_driver": "is what --driver is for",
}
# torchrun's words for "as many as there are devices".
EVERY_DEVICE = ("auto", "gpu", "cpu")

_script = partial(setting, section="Script")
_resources = partial(setting, section="Resources")
_files = partial(setting, section="Files")
_many_files = partial(_files, (), repeated=True)
_fault_tolerance = partial(setting, section="Fault tolerance")
_run = partial(setting, section="Run")


def _number_or_text(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run, in the order of `--help`. Values are checked on construction.

    Attributes:
        command: The script or module and its flags, as typed.

    Raises:
        UsageError: A value breaks its rule. The message has the flag, the value and the rule.
    """

    command: tuple[str, ...] = ()
    module: bool = _script(False, "SCRIPT is a module, as for python -m", flags=("-m", "--module"))
    no_python: bool = _script(False, "SCRIPT is a program, not a Python file")
    mpi: bool = _script(False, "SCRIPT is an MPI program: mpirun starts it, with one process per worker")
    driver: bool = _script(
        False,
        "SCRIPT is a Ray program, which starts its workers itself: run it once, on the head. This is the default for "
        "a script that calls a trainer of Ray Train or a Tuner",
    )
    no_driver: bool = _script(False, "start SCRIPT on every worker even if it calls one of these")
    num_workers: int | str | None = _resources(
        None,
        "number of worker processes, one per GPU; 1:4 takes what is available, from 1 to 4 "
        "(default: the cluster's GPUs, or 2 on CPUs)",
        type=_number_or_text,
        metavar="N|MIN:MAX",
    )
    device: str = _resources(
        "auto",
        "device of the workers; auto is cuda if the cluster has GPUs, else cpu",
        choices=("auto", "cuda", "cpu"),
    )
    worker_timeout: float = _resources(
        600.0, "seconds to wait for nodes to join the cluster", type=float, at_least=0.0, metavar="SECONDS"
    )
    nnodes: str | None = _resources(
        None, "torchrun's: with --nproc-per-node another way to give --num-workers", metavar="N|MIN:MAX", hidden=True
    )
    nproc_per_node: str | None = _resources(
        None,
        "torchrun's; gpu, cpu and auto: as many as the cluster has",
        metavar="N",
        flags=("--nproc-per-node", "--nproc_per_node"),
        hidden=True,
    )
    working_dir: str = _files(".", "folder with the code; the script starts in the run's own copy of it", metavar="DIR")
    include: tuple[str, ...] = _many_files(
        "files of that folder to upload although .gitignore or .rayignore lists them", metavar="PATTERN"
    )
    exclude: tuple[str, ...] = _many_files(
        "files neither to upload from that folder nor to keep, such as a data set that the script downloads",
        metavar="PATTERN",
    )
    keep_gib: float = _files(
        20.0,
        "GiB of files to keep per node; above that, the largest files and top-level folders are left out",
        type=float,
        above=0.0,
        metavar="GIB",
    )
    code: str | None = _files(None, "archive of that folder's files, and its name", metavar="URI=NAME", hidden=True)
    link: tuple[str, ...] = _many_files("file of that folder that is linked, not archived", metavar="NAME", hidden=True)
    left_out: tuple[str, ...] = _many_files(
        "file of that folder that is not in the archive", metavar="NAME", hidden=True
    )
    revision: str | None = _files(
        None,
        "the code's commit in git, with -dirty if files have changed since, or -unknown",
        metavar="COMMIT",
        hidden=True,
    )
    requirements: str | None = _files(
        None, "requirements file for pip, in that folder; its packages are added to those of the image", metavar="FILE"
    )
    env: tuple[str, ...] = _many_files("environment variable of the script, not for secrets", metavar="NAME=VALUE")
    secret: tuple[str, ...] = _many_files(
        "environment variable of the script whose value is never shown; the value is that of the variable in this "
        "shell, or of a secret in AWS Secrets Manager",
        metavar="NAME[=ARN]",
    )
    input: tuple[str, ...] = _many_files(
        "data for the script, which finds its path in $INPUT_NAME: a folder, s3://bucket/prefix, the files of another "
        "run (run:OTHER), or stream:s3://… to read without a download",
        metavar="NAME=URI",
    )
    metric: tuple[str, ...] = setting(
        (),
        "number to read from the output of rank 0 (with --mpi, of all ranks), such as 'loss=loss: {number}', or a "
        "regular expression with one group; the metric named step is the number of the step",
        metavar="NAME=TEXT",
        section="Metrics",
        repeated=True,
    )
    max_restarts: int = _fault_tolerance(
        3,
        "maximum number of restarts in a row without progress in between: a higher step or, after the first minute, "
        "a new file",
        type=int,
        at_least=0,
        metavar="N",
    )
    hang_timeout: float | None = _fault_tolerance(
        None,
        "seconds without output or progress after which the script counts as hung: its stacks are saved, and it is "
        "restarted (default: 600 if the script reports its steps, else no limit)",
        type=float,
        above=0.0,
        metavar="SECONDS",
    )
    run_name: str | None = _run(
        None,
        "name of the run and of its folder under the storage path; an unfinished run of that name is resumed",
        metavar="NAME",
    )
    storage_path: str = _run("results", "folder or s3://bucket/prefix with the folders of the runs", metavar="PATH")
    cloudwatch_namespace: str | None = _run(
        None, "CloudWatch namespace to publish the run's metrics to (default: none)", metavar="NAMESPACE"
    )

    def __post_init__(self) -> None:
        """Check the values."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.metadata and value is not None:
                check(spec, value)
        _check_range("--num-workers", self.num_workers)
        _check_run_name(self.run_name)
        _check_namespace(self.cloudwatch_namespace)
        if self.module and self.no_python:
            raise UsageError("--no-python: can't be given with -m; a module is run by Python")
        self._check_driver()
        self._check_torchrun_flags()
        check_address("--storage-path", self.storage_path)
        for item in self.input:
            check_address("--input", item)
        _check_pairs("--env", self.env)
        _check_pairs("--input", self.input)
        _check_pairs("--metric", self.metric)
        for name, pattern in _pairs(self.metric).items():
            _check_metric(name, pattern)
        both = self.variables.keys() & secrets.parse(self.secret).keys()
        if both:
            raise UsageError(f"--secret: {min(both)} is also given by --env, which shows its value; leave that out")
        if self.command and not (self.module or self.no_python) and Path(self.command[0]).is_relative_to(self.folder):
            script = os.path.relpath(self.command[0], self.folder)
            object.__setattr__(self, "command", (script, *self.command[1:]))

    @property
    def workers(self) -> tuple[int, int] | None:
        """Minimum and maximum number of workers, or None if the cluster decides."""
        if self.nnodes is None and self.nproc_per_node is None:
            return None if self.num_workers is None else _worker_range(self.num_workers)
        if self.nproc_per_node in EVERY_DEVICE:
            return None
        minimum, maximum = _worker_range(self.nnodes or 1)
        per_node = int(self.nproc_per_node or 1)
        return minimum * per_node, maximum * per_node

    def resolve_defaults(self) -> Self:
        """Return this config with a run name, by default from the script's name and the time."""
        script = PurePath(self.command[0]).stem if self.command else ""
        label = re.sub(r"[^A-Za-z0-9]+", "-", script)[:LONGEST_LABEL].strip("-") or "run"
        # Two commands of one minute, perhaps on two laptops, must not share a run.
        unique = "".join(random.SystemRandom().choice(string.ascii_lowercase + string.digits) for _ in range(3))
        return replace(self, run_name=self.run_name or f"{label}-{datetime.now(UTC):%m%d-%H%M}-{unique}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for config.json and result.json."""
        return asdict(self)

    def argv(self, python: str, runner: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the command line of a worker, with this Python interpreter.

        Args:
            python: The interpreter.
            runner: Flags for a module that runs the script, such as `-m mpi4py`.
        """
        if self.no_python:
            return self.command
        module_flag = ("-m",) if self.module else ()
        return (python, "-u", *runner, *module_flag, *self.command)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of `--env`."""
        return _pairs(self.env)

    @property
    def git(self) -> dict[str, str]:
        """Environment variables with the code's commit; empty without a commit."""
        if self.revision is None:
            return {}
        commit, _, state = self.revision.partition("-")
        dirty = {} if state == "unknown" else {"GIT_DIRTY": "1" if state else "0"}
        return {"GIT_COMMIT": commit} | dirty

    @property
    def inputs(self) -> dict[str, str]:
        """Sources of `--input` by name."""
        return _pairs(self.input)

    @property
    def metrics(self) -> dict[str, str]:
        """Regular expressions of `--metric` by name."""
        return {name: _metric_pattern(text) for name, text in _pairs(self.metric).items()}

    def check_files(self) -> None:
        """Check that the folder, the script and the requirements file exist.

        Raises:
            UsageError: One of them does not.
        """
        folder = self.folder
        if not folder.is_dir():
            raise UsageError(f"--working-dir: {self.working_dir!r} is not a folder")
        script = Path(os.path.normpath(folder / self.command[0]))
        if not (self.module or self.no_python or (script.is_file() and script.is_relative_to(folder))):
            raise UsageError(
                f"SCRIPT: there is no file {self.command[0]!r} in {folder}; correct it, or give --working-dir"
            )
        self._check_requirements()

    @property
    def requirements_in_folder(self) -> str | None:
        """Path of the requirements file relative to the folder with the code, which is elsewhere on the nodes."""
        return None if self.requirements is None else os.path.relpath(self.folder / self.requirements, self.folder)

    def _check_requirements(self) -> None:
        name = self.requirements_in_folder
        if name is None:
            return
        if PurePath(name).parts[:1] == ("..",):
            raise UsageError(
                f"--requirements: {self.requirements!r} is not in {self.folder}, so the nodes don't have it; move it "
                "there, or give a --working-dir above both"
            )
        try:
            (self.folder / name).read_bytes()
        except OSError as cause:
            raise UsageError(f"--requirements: {self.requirements!r} can't be read ({cause})") from cause

    @property
    def folder(self) -> Path:
        """Folder with the code."""
        return Path(os.path.normpath(Path(self.working_dir).expanduser().absolute()))

    def command_line(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Return the command that continues the run, with the flags that differ from this environment's defaults."""
        flags: list[str] = []
        for spec in fields(self):
            value = getattr(self, spec.name)
            default = environment.get(environment_variable(spec.name)) or spec.default
            if not spec.metadata or value == default:
                continue
            name = flags_of(spec)[-1]
            if value is True:
                flags.append(name)
                continue
            for item in value if isinstance(value, tuple) else (value,):
                flags += [name, str(item)]
        return [*DRIVER, *flags, *self.command]

    def next_command(self) -> list[str]:
        """Return the user's command to continue the run; for a job, `ray-on-ecs run` in the folder with the code."""
        typed = self.without_code()
        if JOB_VARIABLE not in os.environ:
            return typed.command_line()
        cluster_flag = ["--local"] if LOCAL_VARIABLE in os.environ else []
        flags = replace(typed, working_dir=".").command_line()[len(DRIVER) :]
        return ["ray-on-ecs", "run", *cluster_flag, *flags]

    def without_code(self) -> Self:
        """Return these settings without the stored code."""
        return replace(self, code=None, link=(), revision=None, left_out=())

    def job_command(self) -> str:
        """Return the shell command of the driver's job; -P keeps its working directory off sys.path."""
        python, *rest = self.command_line({})
        return shlex.join([python, "-P", *rest])

    def with_workers(self, number: int) -> Self:
        """Return this config with a number of workers instead of torchrun's flags, unless it has a range."""
        if self.workers and self.workers[0] < self.workers[1]:
            return self
        return replace(self, num_workers=number, nnodes=None, nproc_per_node=None)

    def _check_driver(self) -> None:
        """Refuse settings that a Ray program can't use, and ignore the environment's number of workers."""
        if not self.driver:
            return
        for name, reason in WITHOUT_DRIVER.items():
            value = getattr(self, name)
            if value in (None, False, "auto"):
                continue
            if name in WORKERS and str(value) == os.environ.get(environment_variable(name)):
                object.__setattr__(self, name, None)
            else:
                raise UsageError(f"{flag(name)}: leave it out; a Ray program {reason}")

    def _check_torchrun_flags(self) -> None:
        if self.nnodes is None and self.nproc_per_node is None:
            return
        if self.num_workers is not None:
            raise UsageError("--num-workers: can't be given with --nnodes or --nproc-per-node; use one or the other")
        _check_range("--nnodes", self.nnodes)
        per_node = self.nproc_per_node
        if per_node not in (None, *EVERY_DEVICE) and not re.fullmatch(r"[1-9]\d*", per_node or ""):
            raise UsageError(
                f"--nproc-per-node: {per_node!r} is not allowed; it must be a number from 1, or one of "
                f"{', '.join(EVERY_DEVICE)}"
            )


def _worker_range(num_workers: int | str) -> tuple[int, int]:
    """Parse `4` or `1:4` into the minimum and maximum number of workers."""
    minimum, _, maximum = str(num_workers).partition(":")
    return int(minimum), int(maximum or minimum)


def _pairs(items: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, _, value = item.partition("=")
        pairs[name] = value
    return pairs


def _check_pairs(flag: str, items: tuple[str, ...]) -> None:
    form = {"--input": "NAME=URI", "--metric": "NAME=TEXT"}.get(flag, "NAME=VALUE")
    allowed, characters = (METRIC_NAME, "'_', '/', '.' and '-'") if flag == "--metric" else (NAME, "and '_'")
    names: set[str] = set()
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not re.fullmatch(allowed, name) or (not value and flag != "--env"):
            raise UsageError(
                f"{flag}: {item!r} is not allowed; it must be {form}, NAME of letters, digits {characters}"
            )
        if name in names:
            raise UsageError(f"{flag}: {name!r} is given twice")
        names.add(name)


def _metric_pattern(text: str) -> str:
    """Return the regular expression of a metric's text, which is one itself or contains `{number}`."""
    if PLACEHOLDER not in text:
        return text
    before, _, after = text.partition(PLACEHOLDER)
    start = r"(?<!\w)" if re.match(r"\w", text) else ""  # 'loss: ' must not match in 'val_loss: '
    return f"{start}{_escape(before)}{NUMBER}{_escape(after)}"


def _escape(text: str) -> str:
    """Return a regular expression for a text, in which any white space stands for any other."""
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))


def _check_metric(name: str, text: str) -> None:
    if text.count(PLACEHOLDER) > 1:
        raise UsageError(f"--metric: {name}={text!r} must have one {PLACEHOLDER}; repeat the flag for more metrics")
    try:
        groups = re.compile(_metric_pattern(text)).groups
    except re.error as cause:
        raise UsageError(f"--metric: {name}={text!r} is not a regular expression ({cause})") from cause
    if groups != 1:
        raise UsageError(
            f"--metric: {name}={text!r} must have one {PLACEHOLDER}, or one group in parentheses, for the number; it "
            f"has {groups or 'none'}"
        )


def metric_hints(items: Sequence[str]) -> list[str]:
    """Return a line for each regular expression of `--metric` that would truncate a number such as 7e-06."""
    hints = []
    for name, text in _pairs(tuple(items)).items():
        group = None if PLACEHOLDER in text else re.search(r"(?<!\\)\((?!\?)([^()]*)\)", text)
        with suppress(re.error):  # the group's content may not be a complete expression
            if group and re.fullmatch(group[1], "0.5") and not re.fullmatch(group[1], "7e-06"):
                better = f"{name}={text[: group.start()]}{PLACEHOLDER}{text[group.end() :]}"
                hints.append(f"--metric: {name}={text!r} reads 7e-06 as 7; better --metric {shlex.quote(better)}")
    return hints


def secret_hints(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of `--env` whose name is that of a secret."""
    names = [name for name, value in variables.items() if value and OF_SECRETS.search(name)]
    shown = "shows its value in the results and in Ray's dashboard"
    return [f"--env: {name} {shown}; --secret {name} takes it from your shell and shows it nowhere" for name in names]


def _check_range(flag: str, value: int | str | None) -> None:
    """Raise UsageError unless a flag's value is a positive number, a range such as `1:4`, or None."""
    if value is None:
        return
    if re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", str(value)):
        minimum, maximum = _worker_range(value)
        if minimum <= maximum:
            return
    raise UsageError(
        f"{flag}: {value!r} is not allowed; it must be a number from 1, or a minimum and a maximum such as 1:4"
    )


def is_run_name(name: str) -> bool:
    """Return whether a run can have this name. A folder with another one is not a run."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None


def _check_run_name(name: str | None) -> None:
    if name is not None and not is_run_name(name):
        raise UsageError(
            f"--run-name: {name!r} is not allowed; it becomes a folder, so use letters, digits, '.', '_' and '-', "
            "up to 128, starting with a letter or digit"
        )


def _check_namespace(name: str | None) -> None:
    """Apply CloudWatch's rules.

    https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html
    """
    if name is not None and not re.fullmatch(r"(?!AWS/|:| *$)[A-Za-z0-9._/#: -]{1,255}", name):
        raise UsageError(
            f"--cloudwatch-namespace: {name!r} is not allowed; use 1 to 255 letters, digits, '.', '-', '_', '/', '#', "
            "':' and spaces, not beginning with 'AWS/' or ':'"
        )


def user_name() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user ID may be missing in /etc/passwd
        return f"user {os.getuid()}"
