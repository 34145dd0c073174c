"""What ends the program early: one line for a value that cannot work, with the reason that AWS gives."""

from __future__ import annotations


class SettingError(Exception):
    """A configuration value that cannot work; `infra.config` ends the program with this line and no traceback."""

    def __init__(self, key: str, value: object, problem: str, hint: str) -> None:
        """Say which key holds which value, what is wrong with it, and what to give instead."""
        super().__init__(f"{key}: {value!r} {problem}; {hint}")


def error_reason(error: Exception) -> str:
    """Find the line of a provider's answer that says why: where the answer is a list, it stands behind a bullet."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    bullets = [line.removeprefix("* ") for line in lines if line.startswith("* ")]
    return next(iter(bullets + lines), type(error).__name__)
