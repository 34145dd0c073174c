"""Command line of `make emulate`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.session


@dataclass
class Step:
    """An update under a changed configuration, of the stack that is up or, with a state's name, of a new one.

    With an alarm, nothing is updated.
    """

    changes: dict[str, str] = field(default_factory=dict)
    state: str = ""
    refused: str = ""
    alarm: str = ""


def changes(text: str) -> dict[str, str]:
    """Keys and values from key=value[,key=value]; a value may have commas."""
    return dict(map(pair, filter(None, re.split(r",(?=[\w:.-]+=)", text))))


def pair(text: str) -> tuple[str, str]:
    """A key and its value."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if key == "aws:region":
        raise argparse.ArgumentTypeError("aws:region is the option --region here")
    return key, value


def region(text: str) -> str:
    """A region of any partition."""
    session = botocore.session.get_session()
    regions = [
        name for kind in session.get_available_partitions() for name in session.get_available_regions("ec2", kind)
    ]
    if text not in regions:
        raise argparse.ArgumentTypeError(f"{text!r} is not a region of AWS, e.g. us-west-2")
    return text


def project(text: str) -> Path:
    """Folder of a Pulumi program."""
    if not (Path(text) / "Pulumi.yaml").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} has no Pulumi.yaml")
    return Path(text)


def then(text: str) -> Step:
    """The step of --then."""
    return Step(changes(text))


def second(text: str) -> Step:
    """The step of --state."""
    name, _, changed = text.partition(",")
    return Step(changes(changed), state=name)


def alarm(text: str) -> Step:
    """The step of --alarm."""
    return Step(alarm=text)


def steps(found: list[Step | str]) -> list[Step]:
    """The first `up` and the steps after it; a refusal belongs to the step before it."""
    all_steps = [Step()]
    for each in found:
        if isinstance(each, Step):
            all_steps.append(each)
        else:
            all_steps[-1].refused = each
    return all_steps


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="make emulate", description="The stack on an emulated AWS: see tests/emulator/README.md."
    )
    add = parser.add_argument
    add("--project", type=project, default=Path(), help="folder of the Pulumi program (this one)")
    add("--stack", default="dev", help="the stack's name (dev)")
    add("--config", action="append", type=pair, default=[], metavar="KEY=VALUE", help="a key of the configuration")
    add("--region", type=region, default="us-west-2", help="the region, of any partition (us-west-2)")
    step: Any = {"action": "append", "dest": "steps", "default": []}
    add("--then", type=then, **step, metavar="KEY=VALUE[,…]", help="update the stack; stack=NAME renames it")
    add("--state", type=second, **step, metavar="NAME[,KEY=VALUE…]", help="create it again, under another state")
    add("--alarm", type=alarm, **step, metavar="NAME", help="apply an alarm's scaling policies, e.g. of head-sleep")
    add("--refused", **step, metavar="TEXT", help="the step before this one fails, with this text")
    add("--plan-only", action="store_true", help="stop before the first update, and leave plan.json in --out")
    add("--keep", action="store_true", help="leave the stack up until Ctrl-C")
    add("--out", type=Path, help="folder of Terraform's files and logs (a new one)")
    return parser
