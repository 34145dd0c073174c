"""Settings of a run: one dataclass for the flags of `ray-on-ecs run`, their help, and the run's document.

An environment variable can set a flag's default, `RAY_ON_ECS_WORKER_TIMEOUT` for `--worker-timeout`; the task
definition of a stack's head sets some.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Self

from ray_on_ecs import arguments, secrets
from ray_on_ecs.addresses import check_address
from ray_on_ecs.errors import UsageError
from ray_on_ecs.flags import check, environment_variable, flag, flags_of, has_value, parse, setting
from ray_on_ecs.rules import (
    check_metric,
    check_names,
    check_pairs,
    check_range,
    check_requirements,
    check_run_name,
    metric_pattern,
    names_of,
    pairs_of,
    worker_range,
)

# Ray sets the first for the driver of a job, and `ray-on-ecs run --local` the second.
JOB_VARIABLE, LOCAL_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ON_ECS_LOCAL_RUN"
# Keys of a job's metadata: the user who submitted it, the time (Unix time), and the cluster flag that was typed.
OWNER, SUBMITTED, CLUSTER_FLAG = "owner", "submitted", "cluster_flag"
LONGEST_LABEL = 20
# Settings that a Ray program can't use, with the reason.
REFUSED_WITH_DRIVER = {
    "num_workers": "sets its number of workers itself, as in ScalingConfig(num_workers=...), or by its option",
    "device": "says itself whether its workers have GPUs",  # but for cpu
    "gpu": "chooses its nodes itself, by accelerator_type or by a label selector on ray.io/accelerator-type",
    "pool": "chooses its nodes itself, by a label selector on ray.io/node-group",
    "mpi": "is not started by mpirun",
    "per_node": "starts its workers itself",
    "require_efa": "starts its workers itself, whose network is not measured",
    "no_python": "is run by Python",
    "no_driver": "is what --driver is for",
}
# Settings that choose among the stack's pools.
POOLS = frozenset({"gpu", "pool"})
# Settings that a Ray program can't use and whose default in the environment does not hold for it.
FOR_ALL = {"device", "num_workers", *POOLS}
NOTHING: Mapping[str, Any] = MappingProxyType({})

_script = partial(setting, section="Script")
_resources = partial(setting, section="Resources")
_files = partial(setting, section="Files")
_many_files = partial(_files, (), repeated=True)
_fault_tolerance = partial(setting, section="Fault tolerance")
_run = partial(setting, section="Run")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run, in the order of `--help`; UsageError with flag, value and rule if a value breaks its rule."""

    # The script or module and its flags, as typed.
    command: tuple[str, ...] = ()
    module: bool = _script(False, "SCRIPT is a module, as for python -m", flags=("-m", "--module"))
    no_python: bool = _script(False, "SCRIPT is a program, not a Python file")
    mpi: bool = _script(False, "SCRIPT is an MPI program: mpirun starts it, with one process per worker")
    per_node: bool = _script(
        False,
        "SCRIPT starts the processes of a node itself, as torchrun, accelerate launch and deepspeed do: run it once on "
        "each node, with the node's GPUs and NNODES, NODE_RANK and NPROC_PER_NODE",
    )
    driver: bool = _script(
        False,
        "SCRIPT is a Ray program, which starts its workers itself: run it once, on the head. This is the default for "
        "a script that calls a trainer of Ray Train or a Tuner, or without a process group Ray Data or Ray's tasks",
    )
    no_driver: bool = _script(False, "start SCRIPT on every worker even if it calls one of these")
    num_workers: int | str | None = _resources(
        None,
        "number of worker processes, one per GPU; 1:4 takes what is available, from 1 to 4 "
        "(default: the GPUs of the initial instances of the pool, or of its maximum if that is 0; 2 on CPUs)",
        type=lambda text: int(text) if text.isdecimal() else text,
        metavar="N|MIN:MAX",
    )
    device: str = _resources(
        "auto",
        "device of the workers; auto is cuda if the cluster has GPUs, else cpu",
        choices=("auto", "cuda", "cpu"),
    )
    gpu: str | None = _resources(
        None,
        "GPUs to train on, such as H100, in order of preference: the next one if EC2 has none of the first, or if they "
        "don't join within --worker-timeout (default: the pool named default, then the others, the cheapest first)",
        metavar="NAME[,NAME...]",
    )
    pool: str | None = _resources(
        None,
        "names of the pools to train on, in order of preference",
        metavar="NAME[,NAME...]",
    )
    network_check: str = _resources(
        "on",
        "measure the network between nodes before the script starts on them, which takes some seconds",
        choices=("on", "off"),
    )
    require_efa: bool = _resources(False, "train on pools with EFA only, and end the run if NCCL does not use it")
    worker_timeout: float = _resources(
        600.0,
        "seconds to wait for nodes to join the cluster; on a stack the default is 1800",
        type=float,
        at_least=0.0,
        metavar="SECONDS",
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
    requirements: str | None = _files(
        None,
        "requirements file for pip, in that folder; its packages are added to those of the image (default: SCRIPT, if "
        "it has inline metadata)",
        metavar="FILE",
    )
    env: tuple[str, ...] = _many_files("environment variable of the script, not for secrets", metavar="NAME=VALUE")
    secret: tuple[str, ...] = _many_files(
        "environment variable of the script whose value is never shown; the value is that of the variable in this "
        "shell, or of a secret in AWS Secrets Manager",
        metavar="NAME[=ARN]",
    )
    input: tuple[str, ...] = _many_files(
        "data for the script, which finds its path in $INPUT_NAME, also in its arguments: a folder, "
        "s3://bucket/prefix, the files of another run (run:OTHER), or stream:s3://… to read without a download",
        metavar="NAME=URI",
    )
    metric: tuple[str, ...] = setting(
        (),
        "number to read from the output of rank 0 (with --mpi, of all ranks), such as 'loss=loss: {number}', or a "
        "regular expression with one group; those named step and total_steps are the numbers of the step and of all "
        "steps",
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
    resume_args: str | None = _fault_tolerance(
        None,
        "arguments added to the script's when it starts with kept files of the run, after a failure or in a resumed "
        "run, and not at its first start, such as '--resume out/last.ckpt'",
        metavar="ARGS",
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
    max_hours: float = _run(
        0.0,
        "hours of running time, over all commands of the run, after which it saves and ends; waiting for workers does "
        "not count, and 0 means unlimited",
        type=float,
        at_least=0.0,
        metavar="HOURS",
    )
    max_usd: float = _run(
        0.0,
        "dollars for the run's instances, over all its commands, at which it saves and ends; without the head, disks, "
        "traffic and idle instances, and 0 means unlimited",
        type=float,
        at_least=0.0,
        metavar="USD",
    )
    then_stop: bool = _run(
        False,
        "when the run has ended, stop the workers that it used and no other run uses, instead of after the idle time",
    )
    cloudwatch_namespace: str | None = _run(
        None, "CloudWatch namespace to publish the run's metrics to (default: none)", metavar="NAMESPACE"
    )

    def __post_init__(self) -> None:
        """Check the values."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.metadata and value is not None:
                check(spec, value)
        check_range("--num-workers", self.num_workers)
        self._check_pools()
        check_run_name(self.run_name)
        if self.module and self.no_python:
            raise UsageError("--no-python: can't be given with -m; a module is run by Python")
        if self.mpi and self.per_node:
            raise UsageError("--per-node: can't be given with --mpi, which starts the processes itself; leave one out")
        self._check_driver()
        self._check_efa()
        check_address("--storage-path", self.storage_path)
        for item in self.input:
            check_address("--input", item)
        check_pairs("--env", self.env)
        check_pairs("--input", self.input)
        check_pairs("--metric", self.metric)
        arguments.check(self.command, self.path_names)
        for name, pattern in pairs_of(self.metric).items():
            check_metric(name, pattern)
        self.resumed()
        both = self.variables.keys() & secrets.parse(self.secret).keys()
        if both:
            raise UsageError(f"--secret: {min(both)} is also given by --env, which shows its value; leave that out")
        if self.command and not (self.module or self.no_python) and Path(self.command[0]).is_relative_to(self.folder):
            script = os.path.relpath(self.command[0], self.folder)
            object.__setattr__(self, "command", (script, *self.command[1:]))

    @property
    def workers(self) -> tuple[int, int] | None:
        """Minimum and maximum number of workers, or None if the cluster decides."""
        return None if self.num_workers is None else worker_range(self.num_workers)

    @property
    def fewest_workers(self) -> int:
        """Number of workers with which a run can begin; one if the cluster decides."""
        return self.workers[0] if self.workers else 1

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """Names of `--gpu`, in order of preference."""
        return names_of(self.gpu)

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Names of `--pool`, in order of preference."""
        return names_of(self.pool)

    def named(self) -> Self:
        """Return this config with a run name, by default from the script's name and the time."""
        script = PurePath(self.command[0]).stem if self.command and not self.module else "".join(self.command[:1])
        label = re.sub(r"[^A-Za-z0-9]+", "-", script).strip("-")
        # The end of a module's name distinguishes it from others of its package.
        label = (label[-LONGEST_LABEL:] if self.module else label[:LONGEST_LABEL]).strip("-") or "run"
        # Two commands of one minute, perhaps on two laptops, must not share a run.
        unique = "".join(random.SystemRandom().choice(string.ascii_lowercase + string.digits) for _ in range(3))
        return replace(self, run_name=self.run_name or f"{label}-{datetime.now(UTC):%m%d-%H%M}-{unique}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings of a run's document; TypeError for one that this version does not know."""
        settings: dict[str, Any] = {}
        for name, value in values.items():
            settings[name] = tuple(value) if isinstance(value, list) else value
        return cls(**settings)

    def resumed(self) -> Self:
        """Return this config with the command of a script that finds kept files; UsageError for an open quote."""
        try:
            arguments = shlex.split(self.resume_args or "")
        except ValueError as cause:
            raise UsageError(
                f"--resume-args: {self.resume_args!r} is not a list of arguments ({cause}); quote them as in a shell"
            ) from cause
        return replace(self, command=(*self.command, *arguments), resume_args=None) if arguments else self

    def argv(self, python: str, variables: Mapping[str, str], runner: Sequence[str] = ()) -> tuple[str, ...]:
        """Return a worker's command line, with the paths in its arguments from the script's variables.

        `runner` is flags for a module that runs the script, as `-m mpi4py`.
        """
        known = {name: variables[name] for name in self.path_names if name in variables}
        command = arguments.expand(self.command, known)
        if self.no_python:
            return command
        module_flag = ("-m",) if self.module else ()
        return (python, "-u", *runner, *module_flag, *command)

    @property
    def path_names(self) -> tuple[str, ...]:
        """Variables of the runner that the script's arguments may name."""
        return (*arguments.OF_RUN, *(f"{arguments.INPUT}{name}" for name in self.inputs))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of `--env`."""
        return pairs_of(self.env)

    @property
    def inputs(self) -> dict[str, str]:
        """Sources of `--input` by name."""
        return pairs_of(self.input)

    @property
    def metrics(self) -> dict[str, str]:
        """Regular expressions of `--metric` by name."""
        return {name: metric_pattern(text) for name, text in pairs_of(self.metric).items()}

    def check_files(self) -> None:
        """Check that the folder and the requirements file exist; UsageError if one of them does not."""
        if not self.folder.is_dir():
            raise UsageError(f"--working-dir: {self.working_dir!r} is not a folder")
        name = self.requirements_in_folder
        if name is None:
            return
        if PurePath(name).parts[:1] == ("..",):
            raise UsageError(
                f"--requirements: {self.requirements!r} is not in {self.folder}, so the nodes don't have it; move it "
                "there, or give a --working-dir above both"
            )
        check_requirements(str(self.requirements))
        try:
            (self.folder / name).read_bytes()
        except OSError as cause:
            raise UsageError(f"--requirements: {self.requirements!r} can't be read ({cause})") from cause

    @property
    def requirements_in_folder(self) -> str | None:
        """Path of the requirements file relative to the folder with the code, which is elsewhere on the nodes."""
        return None if self.requirements is None else os.path.relpath(self.folder / self.requirements, self.folder)

    @property
    def folder(self) -> Path:
        """Folder with the code."""
        return Path(os.path.normpath(Path(self.working_dir).expanduser().absolute()))

    def command_line(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Return the arguments of `ray-on-ecs run` that continue the run, in the folder with the code."""
        defaults = defaults_in(environment)
        flags: list[str] = []
        for spec in SETTINGS:
            value = getattr(self, spec.name)
            if value in (None, defaults.get(spec.name, spec.default)) or spec.name == "working_dir":
                continue
            name = flags_of(spec)[-1]
            if value is True:
                flags.append(name)
                continue
            for item in value if isinstance(value, tuple) else (value,):
                flags += [name, str(item)]
        return [*flags, *self.command]

    def next_command(self) -> list[str]:
        """Return the user's command to continue the run."""
        environment = dict(os.environ)
        if LOCAL_VARIABLE in environment:
            environment.pop(environment_variable("storage_path"), None)  # another terminal may not have it
            return ["ray-on-ecs", "run", "--local", *self.command_line(environment)]
        metadata = json.loads(environment.get(JOB_VARIABLE) or "{}").get("metadata") or {}
        return ["ray-on-ecs", "run", *shlex.split(metadata.get(CLUSTER_FLAG, "")), *self.command_line()]

    def with_workers(self, number: int) -> Self:
        """Return this config with a number of workers, unless it has a range."""
        if self.workers and self.workers[0] < self.workers[1]:
            return self
        return replace(self, num_workers=number)

    def _check_pools(self) -> None:
        """Refuse lists of GPUs and pools that can't be meant."""
        if self.gpu is not None and self.pool is not None:
            raise UsageError("--pool: can't be given with --gpu; a pool has one kind of GPU, so leave one of them out")
        if self.gpu is not None and self.device == "cpu":
            raise UsageError("--gpu: can't be given with --device cpu; leave one of them out")
        check_names("--gpu", self.gpu)
        check_names("--pool", self.pool)

    def _check_efa(self) -> None:
        """Refuse settings with which the choice of the script's NCCL is not known."""
        others = {
            "--mpi": self.mpi,
            "--per-node": self.per_node,
            "--network-check off": self.network_check == "off",
            "--device cpu": self.device == "cpu",
            "--no-python": self.no_python,
        }
        for name in (name for name, is_given in others.items() if is_given and self.require_efa):
            raise UsageError(
                f"--require-efa: can't be given with {name}, as the script's NCCL is not tried then; leave one out"
            )

    def _check_driver(self) -> None:
        """Refuse settings that a Ray program can't use, and ignore the environment's ones."""
        if not self.driver:
            return
        for name, reason in REFUSED_WITH_DRIVER.items():
            value = getattr(self, name)
            if value in (None, False, "auto") or (name, value) == ("device", "cpu"):  # see `stack_gpus`
                continue
            if name in FOR_ALL and str(value) == os.environ.get(environment_variable(name)):
                object.__setattr__(self, name, self.__dataclass_fields__[name].default)
            else:
                raise UsageError(f"{flag(name)}: leave it out; a Ray program {reason}")


# The settings that are flags, in the order of the help.
SETTINGS = tuple(spec for spec in fields(RunConfig) if spec.metadata)


def defaults_in(environment: Mapping[str, str], given: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return the settings with one value that an environment has defaults for; UsageError for a bad number.

    Its GPUs and pools do not hold on this machine, and neither beside other `given` ones nor for a run on CPUs.
    """
    found = {spec: environment.get(environment_variable(spec.name)) for spec in SETTINGS}
    defaults = {spec.name: parse(spec, text) for spec, text in found.items() if text and has_value(spec)}
    device = given.get("device", defaults.get("device"))
    if LOCAL_VARIABLE in environment or device == "cpu" or given.get("driver") or not POOLS.isdisjoint(given):
        return {name: value for name, value in defaults.items() if name not in POOLS}
    return defaults


def python_path(variables: Mapping[str, str]) -> list[str]:
    """Return the folders in PYTHONPATH."""
    return [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]


def user_name() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user ID may be missing in /etc/passwd
        return f"user {os.getuid()}"
