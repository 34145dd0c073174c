"""Declaration of settings as flags: description, rules and environment variable of a dataclass field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, field
from typing import Any, NoReturn

from ray_on_ecs.errors import UsageError

ENVIRONMENT_PREFIX = "RAY_ON_ECS_"
LARGEST = 10**15  # every JSON reader knows smaller numbers


def setting(default: Any, description: str, *, section: str, type: Callable[[str], Any] = str, **more: Any) -> Any:
    """Declare a dataclass field that is also a flag, with its line and section in `--help`.

    `type` converts the text of a flag or an environment variable. `more` has the rules `at_least` (inclusive), `above`
    (exclusive) and `choices`; `metavar`; `flags` other than the field's name with dashes; and `repeated` for a flag
    that may be repeated, with a tuple of strings.
    """
    return field(default=default, metadata={"description": description, "section": section, "type": type, **more})


def flag(name: str) -> str:
    """Return the flag of a setting: `--run-name` for `run_name`."""
    return "--" + name.replace("_", "-")


def flags_of(spec: Field) -> tuple[str, ...]:
    """Return the flags of a setting; generated commands use the last one."""
    return spec.metadata.get("flags") or (flag(spec.name),)


def environment_variable(name: str) -> str:
    """Return the environment variable of a setting: `RAY_ON_ECS_RUN_NAME` for `run_name`."""
    return ENVIRONMENT_PREFIX + name.upper()


def has_value(spec: Field) -> bool:
    """Return True for a flag with one value, False for a switch and for one that may be repeated."""
    return spec.type != "bool" and not spec.metadata.get("repeated")


def parse(spec: Field, text: str) -> Any:
    """Return the value of a flag's or an environment variable's text; UsageError if it is not a number."""
    try:
        return spec.metadata["type"](text)
    except ValueError:
        _refuse(spec, text, "a whole number" if spec.metadata["type"] is int else "a number")


def check(spec: Field, value: Any) -> None:
    """Raise UsageError if a value breaks its rule; the message has the flag, the value and the rule."""
    rules = spec.metadata
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(spec, value, "a finite number")
    if isinstance(value, int) and value >= LARGEST:
        _refuse(spec, value, f"below {LARGEST:.0e}")
    if "at_least" in rules and value < rules["at_least"]:
        _refuse(spec, value, f"{rules['at_least']} or more")
    if "above" in rules and value <= rules["above"]:
        _refuse(spec, value, f"above {rules['above']:g}")
    if "choices" in rules and value not in rules["choices"]:
        _refuse(spec, value, f"one of {', '.join(rules['choices'])}")


def _refuse(spec: Field, value: Any, rule: str) -> NoReturn:
    raise UsageError(f"{flag(spec.name)}: {value!r} is not allowed; it must be {rule} ({spec.metadata['description']})")
