"""The settings of a training, and their changes between two runs of a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON has them; a value of another kind becomes its text."""
    return json.loads(json.dumps(dict(settings), default=str))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ with both values, or an empty text."""
    changed = [name for name in {**before, **now} if _value(before, name) != _value(now, name)]
    return ", ".join(f"{name} was {_value(before, name)} and is {_value(now, name)}" for name in changed)


def _value(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not set"
