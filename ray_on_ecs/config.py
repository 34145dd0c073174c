"""The settings that every run has, and the command line: flags, help and saved JSON all come from one dataclass.

A recipe adds settings of its own in a subclass of `RunConfig`. A flag's default can be set by an environment variable,
`--storage-path` by `RAY_ON_ECS_STORAGE_PATH`; that is how the cluster's task definition passes the bucket.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from ray_on_ecs.errors import UsageError

ENVIRONMENT_PREFIX = "RAY_ON_ECS_"
# Ray sets the first for the driver of a job, and `ray-on-ecs run --local` the second.
JOB_VARIABLE, LOCAL_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ON_ECS_LOCAL"
DEVICES = ("auto", "cuda", "cpu")

# The sections of `--help`, in order.
GROUPS = (
    "Script",
    "what to train",
    "how",
    "how fast",
    "Resources",
    "Files",
    "Metrics",
    "Fault tolerance",
    "Run",
)

EPILOG = """\
To resume a run that was interrupted, repeat the command with the same --run-name and the same other flags.
Every flag has an environment variable that sets its default: --run-name reads RAY_ON_ECS_RUN_NAME.

exit status: 0 finished, 1 training failed, 2 a setting or a data set can't be used (nothing was trained),
3 the cluster had too few free workers within the time given, 130 interrupted.
"""

# Flags of torchrun that are accepted, by the number of their values: the cluster knows what they say.
NEEDLESS_FLAGS = {
    "--standalone": 0,
    "--rdzv-backend": 1,
    "--rdzv-endpoint": 1,
    "--rdzv-id": 1,
    "--rdzv-conf": 1,
    "--master-addr": 1,
    "--master-port": 1,
    "--node-rank": 1,
}
NEEDLESS = "needless"
# The words after the positional argument.
REST = "rest"

C = TypeVar("C", bound="RunConfig")


def setting(
    default: Any,
    description: str,
    *,
    group: str,
    type: Callable[[str], Any] = str,
    may_change: bool = False,
    **rules: Any,
) -> Any:
    """Declare a dataclass field that is also a flag.

    Args:
        default: The value if neither a flag nor an environment variable gives one. None prints no default.
        description: The flag's line in `--help`.
        group: The section of `--help`, one of `GROUPS`.
        type: Converts the text of a flag or an environment variable.
        may_change: Whether the setting may differ when a run is resumed, because it decides where or how fast the run
            trains, not what it computes.
        **rules: `at_least` and `at_most` (inclusive), `above` (exclusive), `choices`, `metavar`; `flags`, if they are
            not the field's name with dashes; `hidden`, if `--help` does not show it.
    """
    metadata = {"description": description, "group": group, "type": type, "may_change": may_change, **rules}
    return field(default=default, metadata=metadata)


def repeated(description: str, *, metavar: str, group: str, **rules: Any) -> Any:
    """Declare a setting whose flag may be given several times; its value is a tuple of their texts."""
    return setting((), description, group=group, metavar=metavar, repeated=True, **rules)


resources = partial(setting, group="Resources")
fault_tolerance = partial(setting, group="Fault tolerance", may_change=True)
run = partial(setting, group="Run", may_change=True)


def _number_or_text(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of any run: where it trains, and what happens when something fails.

    Values are checked on construction.

    Attributes:
        PROGRAM: The command whose settings these are.
        ABOUT: What it does, for its help.
        EXAMPLES: Commands, for its help.
        POSITIONAL: The name of its positional argument, if it has one; its value and what follows are `command`.

    Raises:
        UsageError: A value breaks its rule. The message names the flag, the value and the rule.
    """

    PROGRAM: ClassVar[str] = "python -m training"
    ABOUT: ClassVar[str] = ""
    EXAMPLES: ClassVar[str] = ""
    POSITIONAL: ClassVar[str] = ""

    num_workers: int | str | None = resources(
        None,
        "worker processes, one per GPU; 1:4 takes what is available, from 1 to 4 workers "
        "(default: the cluster's GPUs, or 2 on CPUs)",
        type=_number_or_text,
        metavar="N|MIN:MAX",
    )
    device: str = resources(
        "auto",
        "auto: that of the run that is resumed; for a new one cuda if the cluster has GPUs, else cpu",
        choices=DEVICES,
    )
    worker_timeout: float = resources(
        600.0, "seconds to wait for the workers to join the cluster", type=float, at_least=0.0, may_change=True
    )
    run_name: str | None = run(
        None,
        "folder of this run under the storage path; an unfinished run of this name is resumed",
        metavar="NAME",
        may_change=False,
    )
    storage_path: str = run("results", "folder or s3://bucket/prefix that holds the runs' folders", metavar="PATH")
    max_restarts: int = fault_tolerance(
        3,
        "failures of any kind in a row, without a new checkpoint in between, that a run survives; one more ends it",
        type=int,
        at_least=0,
    )
    hang_timeout: float = fault_tolerance(
        600.0,
        "seconds without progress after which the workers' stacks are saved and training is restarted; loading the "
        "data may take six times as long",
        type=float,
        above=0.0,
    )
    cloudwatch_namespace: str | None = run(
        None, "CloudWatch namespace that the run's metrics are published to (default: none)", metavar="NAMESPACE"
    )

    def __post_init__(self) -> None:
        """Check every value against the rules of its field."""
        for spec in fields(self):
            if (value := getattr(self, spec.name)) is not None:
                _check(spec, value)
        check_range("--num-workers", self.num_workers)
        _check_run_name(self.run_name)
        _check_namespace(self.cloudwatch_namespace)

    @property
    def workers(self) -> tuple[int, int] | None:
        """The minimum and maximum number of workers, or None if the cluster decides."""
        return None if self.num_workers is None else worker_range(self.num_workers)

    @property
    def label(self) -> str:
        """What the run trains, in a few words that fit into the name of a run."""
        return "run"

    def resolve_defaults(self) -> Self:
        """Return this config with a run name of its own if it has none."""
        label = re.sub(r"[^A-Za-z0-9]+", "-", self.label)
        unique = f"{label}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        return replace(self, run_name=self.run_name or unique)

    def command_line(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Return the command that continues the run: its flags that are not at their defaults in this environment."""
        flags: list[str] = []
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not spec.metadata or value == (environment.get(environment_variable(spec.name)) or spec.default):
                continue
            name = spec.metadata.get("flags", (flag(spec.name),))[-1]
            for each in value if spec.metadata.get("repeated") else (value,):
                flags += [name] if value is True else [name, str(each)]
        return [*self.PROGRAM.split(), *flags]

    def next_command(self) -> list[str]:
        """Return the command for a user to continue the run."""
        return self.command_line()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as they are written to config.json and result.json."""
        return asdict(self)


def worker_range(num_workers: int | str) -> tuple[int, int]:
    """Parse `4` or `1:4` into the minimum and maximum number of workers."""
    minimum, _, maximum = str(num_workers).partition(":")
    return int(minimum), int(maximum or minimum)


def parse(config: type[C], arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> C:
    """Parse a command line and the environment into a config of this class.

    Raises:
        UsageError: A value can't be read or breaks its rule.
    """
    values = vars(_parser(config, environment).parse_args(arguments))
    if needless := values.pop(NEEDLESS):
        print(needless_line(needless), file=sys.stderr)
    if config.POSITIONAL:
        values["command"] = (values.pop(config.POSITIONAL), *values.pop(REST))
    repeated = [spec.name for spec in fields(config) if spec.metadata.get("repeated")]
    values |= {name: tuple(values[name] or ()) for name in repeated}
    return config(**values)


def needless_line(flags: Sequence[str]) -> str:
    """Return a line about flags of torchrun that were typed, and are not needed."""
    return f"{', '.join(flags)}: not needed; the cluster sets the rendezvous"


def with_underscores(flag: str) -> str:
    """Return the other form of a flag that torchrun takes: `--rdzv_id` for `--rdzv-id`."""
    return "--" + flag.removeprefix("--").replace("-", "_")


def flag(name: str) -> str:
    """Return the flag of a setting: `--batch-size` for `batch_size`."""
    return "--" + name.replace("_", "-")


def environment_variable(name: str) -> str:
    """Return the environment variable of a setting: `RAY_ON_ECS_BATCH_SIZE` for `batch_size`."""
    return ENVIRONMENT_PREFIX + name.upper()


class _Needless(argparse.Action):
    """Collects the flags that are not needed."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, NEEDLESS, [*getattr(namespace, NEEDLESS), option_string])


class _Parser(argparse.ArgumentParser):
    """Raises one line instead of printing the usage of every flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def _parser(config: type[RunConfig], environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=config.PROGRAM,
        description=config.ABOUT,
        epilog=textwrap.dedent(config.EXAMPLES) + EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if config.POSITIONAL:
        parser.add_argument(config.POSITIONAL, help="what to run; what follows it are its own flags")
        parser.add_argument(REST, nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    parser.set_defaults(**{NEEDLESS: []})
    for name, count in NEEDLESS_FLAGS.items() if config.POSITIONAL else ():
        names = dict.fromkeys((name, with_underscores(name)))
        parser.add_argument(*names, dest=NEEDLESS, action=_Needless, nargs=None if count else 0, help=argparse.SUPPRESS)
    settings = [spec for spec in fields(config) if spec.metadata]
    groups = {spec.metadata["group"] for spec in settings}
    sections = {title: parser.add_argument_group(title) for title in GROUPS if title in groups}
    for spec in settings:
        section = sections[spec.metadata["group"]]
        default = environment.get(environment_variable(spec.name)) or spec.default
        shown = argparse.SUPPRESS if spec.metadata.get("hidden") else _help(spec, default)
        described: dict[str, Any] = {"dest": spec.name, "help": shown}
        names = spec.metadata.get("flags") or (flag(spec.name),)
        if spec.metadata.get("repeated"):
            section.add_argument(*names, action="append", metavar=_metavar(spec), **described)
        elif spec.type == "bool":
            section.add_argument(*names, action="store_true", **described)
        else:
            given = spec.metadata["type"]
            section.add_argument(*names, type=given, default=default, metavar=_metavar(spec), **described)
    return parser


def _metavar(spec: Field) -> str:
    if choices := spec.metadata.get("choices"):
        return "{" + ",".join(choices) + "}"
    return spec.metadata.get("metavar", {int: "N", float: "X"}.get(spec.metadata["type"], "NAME"))


def _help(spec: Field, default: Any) -> str:
    shown = "" if default in (None, (), False) else f" (default: {default})"
    return (spec.metadata["description"] + shown).replace("%", "%%")


def _check(spec: Field, value: Any) -> None:
    rules = spec.metadata
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(spec, value, "a finite number")
    if "at_least" in rules and value < rules["at_least"]:
        _refuse(spec, value, f"{rules['at_least']} or more")
    if "at_most" in rules and value > rules["at_most"]:
        _refuse(spec, value, f"{rules['at_most']} or less")
    if "above" in rules and value <= rules["above"]:
        _refuse(spec, value, f"above {rules['above']:g}")
    if "choices" in rules and value not in rules["choices"]:
        _refuse(spec, value, f"one of {', '.join(rules['choices'])}")


def _refuse(spec: Field, value: Any, rule: str) -> NoReturn:
    raise UsageError(f"{flag(spec.name)}: {value!r} is not allowed; it must be {rule} ({spec.metadata['description']})")


def check_range(flag: str, given: int | str | None) -> None:
    """Raise UsageError unless a flag's value is a number from 1, a range of such as `1:4`, or None."""
    if given is None:
        return
    if re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", str(given)):
        minimum, maximum = worker_range(given)
        if minimum <= maximum:
            return
    raise UsageError(
        f"{flag}: {given!r} is not allowed; it must be a number from 1, or a minimum and a maximum such as 1:4"
    )


def _check_run_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise UsageError(
            f"--run-name: {name!r} is not allowed; it becomes a folder, so use letters, digits, '.', '_' and '-', "
            "up to 128, starting with a letter or digit"
        )


def _check_namespace(name: str | None) -> None:
    """Apply CloudWatch's own rules.

    https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html
    """
    if name is not None and not re.fullmatch(r"(?!AWS/|:| *$)[A-Za-z0-9._/#: -]{1,255}", name):
        raise UsageError(
            f"--cloudwatch-namespace: {name!r} is not allowed; use 1 to 255 letters, digits, '.', '-', '_', '/', '#', "
            "':' and spaces, not beginning with 'AWS/' or ':'"
        )
