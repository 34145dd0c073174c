"""The settings of a run that starts a user's script: `python -m ray_on_ecs.run`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Self

from ray_on_ecs.config import (
    JOB_VARIABLE,
    LOCAL_VARIABLE,
    RunConfig,
    check_range,
    environment_variable,
    fault_tolerance,
    flag,
    repeated,
    resources,
    setting,
    worker_range,
)
from ray_on_ecs.errors import UsageError

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# Settings of the number of workers, and those that a Ray program has no use for, with the reason.
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

_script = partial(setting, group="Script")
_files = partial(setting, group="Files")
_many_files = partial(repeated, group="Files")


@dataclass(frozen=True, kw_only=True)
class ScriptConfig(RunConfig):
    """The settings of `python -m ray_on_ecs.run`.

    Attributes:
        command: The script or module and its own flags, as typed.
    """

    PROGRAM = "python -m ray_on_ecs.run"
    ABOUT = (
        "Start a script that torchrun could start, unmodified, on every worker of a Ray cluster, or on this machine; "
        "restart it after failures, and keep the files that it writes."
    )
    EXAMPLES = """\
        examples:
          python -m ray_on_ecs.run --num-workers 2 train.py --epochs 3
          python -m ray_on_ecs.run --storage-path s3://my-bucket/runs --run-name baseline -m my.package
          python -m ray_on_ecs.run --input data=s3://my-bucket/images --metric 'loss=loss: ([0-9.]+)' train.py

        """
    POSITIONAL = "SCRIPT"

    command: tuple[str, ...] = ()
    module: bool = _script(False, "SCRIPT is a module, as in python -m", flags=("-m", "--module"))
    no_python: bool = _script(False, "SCRIPT is a program, not a file for Python")
    mpi: bool = _script(False, "SCRIPT is a program of MPI: mpirun starts it, with a process for each worker")
    driver: bool = _script(
        False,
        "SCRIPT is a Ray program (ray.init, TorchTrainer, Tuner): run it once, on the head. So is a script that calls "
        "one of Ray's trainers or Tuner, without this flag",
    )
    no_driver: bool = _script(False, "start SCRIPT on every worker although it calls one of these")
    max_restarts: int = fault_tolerance(
        3,
        "how often in a row the script is started again after a failure without progress in between: a greater step, "
        "or a file that was new after a minute",
        type=int,
        at_least=0,
    )
    hang_timeout: float | None = fault_tolerance(  # ty: ignore[incompatible-attribute-override]
        None,
        "seconds of silence after which a script counts as hung: it is ended and started again, and its stacks are "
        "saved. Without this flag 600, for a script that has reported steps alone",
        type=float,
        above=0.0,
    )
    nnodes: str | None = resources(
        None, "torchrun's: with --nproc-per-node another way to give --num-workers", metavar="N|MIN:MAX", hidden=True
    )
    nproc_per_node: str | None = resources(
        None,
        "torchrun's; gpu, cpu and auto: as many as the cluster has",
        metavar="N",
        flags=("--nproc-per-node", "--nproc_per_node"),
        hidden=True,
    )
    working_dir: str = _files(
        ".", "folder with the code; the script starts in a copy of it, which is the run's own", metavar="DIR"
    )
    include: tuple[str, ...] = _many_files(
        "files of that folder that the script needs although .gitignore or .rayignore names them", metavar="PATTERN"
    )
    exclude: tuple[str, ...] = _many_files(
        "files that are neither taken from that folder nor kept, such as a data set that the script downloads",
        metavar="PATTERN",
    )
    keep_gib: float = _files(
        20.0,
        "GiB of files that are kept of a node; of more, the largest files and folders of the top level are left out",
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
        None, "the code's commit in git, with -dirty if files have changed since", metavar="COMMIT", hidden=True
    )
    requirements: str | None = _files(
        None, "file of packages for pip, in the folder with the code, to add to those of the image", metavar="FILE"
    )
    env: tuple[str, ...] = _many_files("environment variable of the script", metavar="NAME=VALUE")
    input: tuple[str, ...] = _many_files(
        "folder, s3://bucket/prefix or run:OTHER whose files the script finds in $INPUT_NAME, or stream:s3://… to read",
        metavar="NAME=URI",
    )
    metric: tuple[str, ...] = repeated(
        "number to take from rank 0's output (with --mpi that of all ranks), such as 'loss=loss: ([0-9.]+)'; step is "
        "the number of the step",
        metavar="NAME=REGEX",
        group="Metrics",
    )

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.module and self.no_python:
            raise UsageError("--no-python: can't be given with -m; a module is run by Python")
        self._check_driver()
        self._check_torchrun_flags()
        for name, given in (("--env", self.env), ("--input", self.input), ("--metric", self.metric)):
            _check_pairs(name, given)
        for name, pattern in self.metrics.items():
            _check_metric(name, pattern)
        if not (self.module or self.no_python) and self.command:
            object.__setattr__(self, "command", (_relative(self.command[0], self.folder), *self.command[1:]))

    @property
    def workers(self) -> tuple[int, int] | None:
        """The minimum and maximum number of workers, or None if the cluster decides."""
        if self.nnodes is None and self.nproc_per_node is None:
            return super().workers
        if self.nproc_per_node in EVERY_DEVICE:
            return None
        minimum, maximum = worker_range(self.nnodes or 1)
        per_node = int(self.nproc_per_node or 1)
        return minimum * per_node, maximum * per_node

    @property
    def label(self) -> str:
        """The script's name."""
        return PurePath(self.command[0]).stem if self.command else "run"

    def argv(self, python: str, runner: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the command line of a worker, with this Python interpreter.

        Args:
            python: The interpreter.
            runner: Its flags for a module that runs the script, such as `-m mpi4py`.
        """
        if self.no_python:
            return self.command
        return (python, "-u", *runner, *(("-m",) if self.module else ()), *self.command)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of `--env`."""
        return _pairs(self.env)

    @property
    def git(self) -> dict[str, str]:
        """The environment variables that tell the code's commit; none if it has none."""
        if self.revision is None:
            return {}
        commit, _, dirty = self.revision.partition("-")
        return {"GIT_COMMIT": commit, "GIT_DIRTY": str(int(bool(dirty)))}

    @property
    def inputs(self) -> dict[str, str]:
        """The sources of `--input` by name."""
        return _pairs(self.input)

    @property
    def metrics(self) -> dict[str, str]:
        """The regular expressions of `--metric` by name."""
        return _pairs(self.metric)

    def check_files(self) -> None:
        """Check that the folder, the script and the requirements file are there.

        Raises:
            UsageError: One is not.
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
        """The path of the requirements file in the folder with the code, which lies elsewhere on another machine."""
        return None if self.requirements is None else os.path.relpath(self.folder / self.requirements, self.folder)

    def _check_requirements(self) -> None:
        if (name := self.requirements_in_folder) is None:
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
        """The folder with the code."""
        return Path(os.path.normpath(Path(self.working_dir).expanduser().absolute()))

    def command_line(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Return the command that continues the run."""
        return [*super().command_line(environment), *self.command]

    def next_command(self) -> list[str]:
        """Return the command for a user to continue the run: of a job, `ray-on-ecs run` in the folder with the code."""
        typed = self.without_code()
        if JOB_VARIABLE not in os.environ:
            return typed.command_line()
        flags = replace(typed, working_dir=".").command_line()[len(self.PROGRAM.split()) :]
        return ["ray-on-ecs", "run", *(["--local"] if LOCAL_VARIABLE in os.environ else []), *flags]

    def without_code(self) -> Self:
        """Return these settings without those that name the stored code."""
        return replace(self, code=None, link=(), revision=None, left_out=())

    def job_command(self) -> str:
        """Return the driver's shell command as a job; -P keeps the folder that it starts in off its import path."""
        python, *rest = self.command_line({})
        return shlex.join([python, "-P", *rest])

    def with_workers(self, number: int) -> Self:
        """Return this config with a number of workers in place of torchrun's flags, unless it is a range."""
        if self.workers and self.workers[0] < self.workers[1]:
            return self
        return replace(self, num_workers=number, nnodes=None, nproc_per_node=None)

    def _check_driver(self) -> None:
        """Refuse what a Ray program has no use for, and forget what the environment says of workers."""
        if not self.driver:
            return
        for name, why in WITHOUT_DRIVER.items():
            if getattr(self, name) in (None, False, "auto"):
                continue
            if name in WORKERS and str(getattr(self, name)) == os.environ.get(environment_variable(name)):
                object.__setattr__(self, name, None)
            else:
                raise UsageError(f"{flag(name)}: leave it out; a Ray program {why}")

    def _check_torchrun_flags(self) -> None:
        if self.nnodes is None and self.nproc_per_node is None:
            return
        if self.num_workers is not None:
            raise UsageError("--num-workers: can't be given with --nnodes or --nproc-per-node; use one or the other")
        check_range("--nnodes", self.nnodes)
        per_node = self.nproc_per_node
        if per_node not in (None, *EVERY_DEVICE) and not re.fullmatch(r"[1-9]\d*", per_node or ""):
            raise UsageError(
                f"--nproc-per-node: {per_node!r} is not allowed; it must be a number from 1, or one of "
                f"{', '.join(EVERY_DEVICE)}"
            )


def _relative(script: str, folder: Path) -> str:
    """Return the path of a script in the folder with the code, if it was typed as an absolute one."""
    return os.path.relpath(script, folder) if Path(script).is_relative_to(folder) else script


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, _, value in (each.partition("=") for each in given)}


def _check_pairs(flag: str, given: tuple[str, ...]) -> None:
    form = {"--input": "NAME=URI", "--metric": "NAME=REGEX"}.get(flag, "NAME=VALUE")
    seen = set()
    for each in given:
        name, found, value = each.partition("=")
        if not found or not re.fullmatch(NAME, name) or (not value and flag != "--env"):
            raise UsageError(f"{flag}: {each!r} is not allowed; it must be {form}, NAME of letters, digits and '_'")
        if name in seen:
            raise UsageError(f"{flag}: {name!r} is given twice")
        seen.add(name)


def _check_metric(name: str, pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as cause:
        raise UsageError(f"--metric: {name}={pattern!r} is not a regular expression ({cause})") from cause
    if groups != 1:
        raise UsageError(
            f"--metric: {name}={pattern!r} must have one group in parentheses, for the number; it has {groups}"
        )
