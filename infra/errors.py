"""Errors for invalid configuration values, and AWS's reasons for one."""

from __future__ import annotations

# Error texts of AWS's services and the AWS provider. A denied call comes first: KMS's says "because the resource does
# not exist in this Region, no resource-based policies allow access, or …".
DENIED = ("accessdenied", "not authorized", "unauthorizedoperation", "forbidden", "statuscode: 403")
ABSENT = ("nosuch", "notfound", "not found", "couldn't find", "no matching", "not exist", "be found")
NOTHING = ("empty result", "no results", "malformed", "validation", "invalidparameter", "invalidarn")


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


def is_absent(reason: str) -> bool:
    """True if an error says that the resource does not exist, or can't because of its name."""
    folded = reason.lower()
    return not any(text in folded for text in DENIED) and any(text in folded for text in ABSENT + NOTHING)
