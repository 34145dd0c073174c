"""Settings of a training as JSON, and their comparison with a checkpoint's settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values; other types become a string that is the same in each process."""
    return {str(name): _plain(value) for name, value in settings.items()}


def differences(previous: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return the settings that differ, with both values; empty if they are equal."""
    changes = []
    for name in {**previous, **current}:
        old = json.dumps(previous[name]) if name in previous else "not set"
        new = json.dumps(current[name]) if name in current else "not set"
        if old != new:
            changes.append(f"{name} was {old} and is {new}")
    return ", ".join(changes)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return as_json(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if hasattr(value, "__qualname__"):  # a function or a class
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value)
    if " at 0x" in text:  # the default repr, with an address that differs between processes
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return text
