"""What ends the program early: one line for a value that cannot work, with the cause that AWS gives."""

from __future__ import annotations

import pulumi


class SettingError(pulumi.RunError):
    """A configuration value that cannot work; as a RunError it ends the program with this line and no traceback."""

    def __init__(self, key: str, value: object, rule: str, way_out: str) -> None:
        """Say which key holds which value, the rule that it breaks, and what to give instead."""
        super().__init__(f"{key}: {value!r} {rule}; {way_out}")


def cause(error: Exception) -> str:
    """Find the line of a provider's answer that says why: where the answer is a list, it stands behind a bullet."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    bullets = [line.removeprefix("* ") for line in lines if line.startswith("* ")]
    return next(iter(bullets + lines), type(error).__name__)
