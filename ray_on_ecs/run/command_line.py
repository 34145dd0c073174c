"""The command line of `python -m ray_on_ecs.run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn

from ray_on_ecs.config import DRIVER, RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.flags import environment_variable, flags_of, help_line

ABOUT = (
    "Start a script that torchrun could start, unmodified, on every worker of the Ray cluster of RAY_ADDRESS; "
    "restart it after failures, and keep the files that it writes."
)
EPILOG = """\
examples:
  python -m ray_on_ecs.run --num-workers 2 train.py --epochs 3
  python -m ray_on_ecs.run --storage-path s3://my-bucket/runs --run-name baseline -m my.package
  python -m ray_on_ecs.run --input data=s3://my-bucket/images --metric 'loss=loss: {number}' train.py

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
# The words after the script.
REST = "rest"
# The settings as fields, in the order of the sections of `--help`.
SETTINGS = tuple(spec for spec in fields(RunConfig) if spec.metadata)


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> RunConfig:
    """Parse a command line and the environment.

    Raises:
        UsageError: A value can't be read or breaks its rule.
    """
    values: dict[str, Any] = vars(_parser(environment).parse_args(arguments))
    if needless := values.pop(NEEDLESS):
        print(needless_line(needless), file=sys.stderr)
    command = (values.pop("SCRIPT"), *values.pop(REST))
    values |= {spec.name: tuple(values[spec.name] or ()) for spec in SETTINGS if spec.metadata.get("repeated")}
    return RunConfig(command=command, **values)


def needless_line(flags: Sequence[str]) -> str:
    """Return a line about flags of torchrun that were typed, and are not needed."""
    return f"{', '.join(flags)}: not needed; the cluster sets the rendezvous"


def with_underscores(flag: str) -> str:
    """Return the other form of a flag that torchrun takes: `--rdzv_id` for `--rdzv-id`."""
    return "--" + flag.removeprefix("--").replace("-", "_")


class _Needless(argparse.Action):
    """Collects the flags that are not needed."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, NEEDLESS, [*getattr(namespace, NEEDLESS), option_string])


class _Parser(argparse.ArgumentParser):
    """Raises one line instead of printing the usage of every flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=" ".join(DRIVER),
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("SCRIPT", help="file to run, followed by its flags")
    parser.add_argument(REST, nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    parser.set_defaults(**{NEEDLESS: []})
    for name, count in NEEDLESS_FLAGS.items():
        names = dict.fromkeys((name, with_underscores(name)))
        parser.add_argument(*names, dest=NEEDLESS, action=_Needless, nargs=None if count else 0, help=argparse.SUPPRESS)
    titles = dict.fromkeys(spec.metadata["section"] for spec in SETTINGS)
    sections = {title: parser.add_argument_group(title) for title in titles}
    for spec in SETTINGS:
        default = environment.get(environment_variable(spec.name)) or spec.default
        sections[spec.metadata["section"]].add_argument(*flags_of(spec), dest=spec.name, **_argument(spec, default))
    return parser


def _argument(spec: Field, default: Any) -> dict[str, Any]:
    """Return a setting as argparse takes it."""
    hidden = spec.metadata.get("hidden")
    given: dict[str, Any] = {"help": argparse.SUPPRESS if hidden else help_line(spec, default).replace("%", "%%")}
    if spec.type == "bool":
        return {**given, "action": "store_true"}
    if spec.metadata.get("repeated"):
        return {**given, "action": "append", "metavar": _metavar(spec)}
    return {**given, "type": spec.metadata["type"], "default": default, "metavar": _metavar(spec)}


def _metavar(spec: Field) -> str:
    if choices := spec.metadata.get("choices"):
        return "{" + ",".join(choices) + "}"
    return spec.metadata.get("metavar", {int: "N", float: "X"}.get(spec.metadata["type"], "NAME"))
