"""Errors for invalid configuration values, and AWS's reason for one."""

from __future__ import annotations


class SettingError(Exception):
    """Invalid configuration value; `infra.config` prints it as one line, without a traceback."""

    def __init__(self, key: str, value: object, problem: str, hint: str) -> None:
        """Name the key, its value, the rule it breaks and the way out."""
        super().__init__(f"{key}: {value!r} {problem}; {hint}")


def error_reason(error: Exception) -> str:
    """Reason in a provider's error message: its first bullet where it has a list, otherwise its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    bullets = [line.removeprefix("* ") for line in lines if line.startswith("* ")]
    return next(iter(bullets + lines), type(error).__name__)
