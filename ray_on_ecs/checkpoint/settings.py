"""The settings of a training, and their changes between two runs of a script."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON has them; a value of another kind becomes a text that is the same in each process."""
    return {str(name): _plain(value) for name, value in settings.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ with both values, or an empty text."""
    changed = [name for name in {**before, **now} if _value(before, name) != _value(now, name)]
    return ", ".join(f"{name} was {_value(before, name)} and is {_value(now, name)}" for name in changed)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return as_json(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(each) for each in value), key=str)
    if hasattr(value, "__qualname__"):  # a function or a class
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text


def _value(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not set"
