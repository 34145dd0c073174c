"""The settings that every run has, and the command line: flags, help and saved JSON all come from one dataclass.

A recipe adds settings of its own in a subclass of `RunConfig`. A flag's default can be set by an environment variable,
`--storage-path` by `TRAINING_STORAGE_PATH`; that is how the cluster's task definition passes the bucket.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

from training.errors import UsageError

ENVIRONMENT_PREFIX = "TRAINING_"
DEVICES = ("auto", "cuda", "cpu")
ON_OFF = ("on", "off")
AUTO_ON_OFF = ("auto", *ON_OFF)

# The sections of `--help`, in order.
GROUPS = ("what to train", "how", "how fast", "where", "when something happens")

EPILOG = """\
examples:
  python -m training --dataset digits --epochs 3
  python -m training --data-dir ~/data/fashion-mnist --batch-size 128 --num-workers 4
  python -m training --storage-path s3://my-bucket/runs --run-name baseline

To resume a run that was interrupted, repeat the command with the same --run-name and the same other flags.
Every flag has an environment variable that sets its default: --batch-size reads TRAINING_BATCH_SIZE.

exit status: 0 finished, 1 training failed, 2 a setting or a data set can't be used (nothing was trained),
3 the cluster had too few free workers within the time given, 130 interrupted.
"""

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
        **rules: `at_least` and `at_most` (inclusive), `above` (exclusive), `choices`, `metavar`.
    """
    metadata = {"description": description, "group": group, "type": type, "may_change": may_change, **rules}
    return field(default=default, metadata=metadata)


where = partial(setting, group="where")
when_something_happens = partial(setting, group="when something happens", may_change=True)


def _number_or_text(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of any run: where it trains, and what happens when something fails.

    Values are checked on construction.

    Raises:
        UsageError: A value breaks its rule. The message names the flag, the value and the rule.
    """

    num_workers: int | str | None = where(
        None,
        "worker processes, one per GPU; 1:4 trains on whatever is available, from 1 to 4 workers, with the steps of 4 "
        "(default: the cluster's GPUs, or 2 on CPUs)",
        type=_number_or_text,
        metavar="N|MIN:MAX",
    )
    device: str = where(
        "auto",
        "auto: that of the run that is resumed; for a new one cuda if the cluster has GPUs, else cpu",
        choices=DEVICES,
    )
    storage_path: str = where(
        "results", "folder or s3://bucket/prefix that holds the runs' folders", metavar="PATH", may_change=True
    )
    run_name: str | None = where(
        None, "folder of this run under the storage path; an unfinished run of this name is resumed", metavar="NAME"
    )
    keep_checkpoints: int = when_something_happens(
        3, "number of latest checkpoints to keep, in addition to the best one", type=int, at_least=1
    )
    checkpoint_seconds: float = when_something_happens(
        300.0, "seconds between checkpoints within an epoch; each epoch also ends with one", type=float, at_least=0.0
    )
    max_failed_checkpoints: int = when_something_happens(
        3, "checkpoints in a row that may fail to be stored before the run ends", type=int, at_least=0
    )
    max_failures: int = when_something_happens(
        3,
        "failures in a row, of whatever kind, without a new checkpoint in between, after which training is restarted",
        type=int,
        at_least=0,
    )
    stall_timeout: float = when_something_happens(
        600.0,
        "seconds without progress after which the workers' stacks are saved and training is restarted; loading the "
        "data may take six times as long",
        type=float,
        above=0.0,
    )
    wait_seconds: float = when_something_happens(
        600.0, "seconds to wait for the workers to join the cluster", type=float, at_least=0.0
    )
    cloudwatch_namespace: str | None = when_something_happens(
        None, "CloudWatch namespace that the run's metrics are published to (default: none)", metavar="NAMESPACE"
    )

    def __post_init__(self) -> None:
        """Check every value against the rules of its field."""
        for spec in fields(self):
            if (value := getattr(self, spec.name)) is not None:
                _check(spec, value)
        _check_workers(self.num_workers)
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
    return config(**vars(_parser(config, environment).parse_args(arguments)))


def flag(name: str) -> str:
    """Return the flag of a setting: `--batch-size` for `batch_size`."""
    return "--" + name.replace("_", "-")


def environment_variable(name: str) -> str:
    """Return the environment variable of a setting: `TRAINING_BATCH_SIZE` for `batch_size`."""
    return ENVIRONMENT_PREFIX + name.upper()


class _Parser(argparse.ArgumentParser):
    """Raises one line instead of printing the usage of every flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see python -m training --help")


def _parser(config: type[RunConfig], environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m training",
        description="Train an image classifier with PyTorch DDP on a Ray cluster, or on this machine.",
        epilog=textwrap.dedent(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sections = {title: parser.add_argument_group(title) for title in GROUPS}
    for spec in fields(config):
        default = environment.get(environment_variable(spec.name)) or spec.default
        sections[spec.metadata["group"]].add_argument(
            flag(spec.name),
            type=spec.metadata["type"],
            default=default,
            metavar=_metavar(spec),
            help=_help(spec, default),
        )
    return parser


def _metavar(spec: Field) -> str:
    if choices := spec.metadata.get("choices"):
        return "{" + ",".join(choices) + "}"
    return spec.metadata.get("metavar", {int: "N", float: "X"}.get(spec.metadata["type"], "NAME"))


def _help(spec: Field, default: Any) -> str:
    shown = "" if default is None else f" (default: {default})"
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


def _check_workers(given: int | str | None) -> None:
    if given is None:
        return
    if re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", str(given)):
        minimum, maximum = worker_range(given)
        if minimum <= maximum:
            return
    raise UsageError(
        f"--num-workers: {given!r} is not allowed; it must be a number from 1, or a minimum and a maximum such as 1:4"
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
