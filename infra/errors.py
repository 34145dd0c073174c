"""Refusals and warnings, in which fields have the names that their user wrote, and AWS's reason for an error.

A check raises a SettingError for the value of a field, and a Refusal for all else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar

import pulumi

# Error texts of AWS's services and the AWS provider. A denied call comes first: KMS's says "because the resource does
# not exist in this Region, no resource-based policies allow access, or …".
DENIED = ("accessdenied", "not authorized", "notauthorized", "unauthorizedoperation", "unauthorizedaccess", "forbidden")
DENIED += ("statuscode: 403",)
ABSENT = ("nosuch", "notfound", "not found", "couldn't find", "no matching", "not exist", "be found")
NOTHING = ("empty result", "no results", "malformed", "validation", "invalidparameter", "invalidarn", "invalid value")
# Rewrites the fields in a text as the keys of Pulumi.yaml, where RayClusterArgs.from_config has read them.
AS_WRITTEN: ContextVar[Callable[[str], str]] = ContextVar("AS_WRITTEN", default=str)


class Refusal(pulumi.RunError):
    """Refusal in one line, which Pulumi prints without a traceback.

    Attributes:
        subject: Field of RayClusterArgs, as its user wrote it, or e.g. `aws:region`.
        text: Problem and way out.
    """

    def __init__(self, subject: str, text: str) -> None:
        """Name the subject."""
        rewrite = AS_WRITTEN.get()
        self.subject, self.text = rewrite(subject), rewrite(text)
        super().__init__(f"{self.subject}: {self.text}")


class SettingError(Refusal):
    """Refusal of a field's value."""

    def __init__(self, field: str, value: object, problem: str, hint: str) -> None:
        """Name the field, its value, the rule it breaks and the way out."""
        rewrite = AS_WRITTEN.get()
        shown = rewrite(str(value)) if isinstance(value, bool) else repr(value)
        super().__init__(field, f"{shown} {problem}; {hint}")


def warn(text: str) -> None:
    """Log a warning that names fields."""
    pulumi.log.warn(AS_WRITTEN.get()(text))


def note(text: str) -> None:
    """Log a line of a preview that names fields."""
    if pulumi.runtime.is_dry_run():
        pulumi.log.info(AS_WRITTEN.get()(text))


def error_reason(error: Exception) -> str:
    """Reason in a provider's error message: its first bullet where it has a list, otherwise its first line."""
    text = re.sub(r"^invoke of \S+ failed: ", "", str(error).strip())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    bullets = [line.removeprefix("* ") for line in lines if line.startswith("* ")]
    return next(iter(bullets + lines), type(error).__name__)


def is_absent(reason: str) -> bool:
    """True if an error says that the resource does not exist, or can't because of its name."""
    folded = reason.lower()
    return not any(text in folded for text in DENIED) and any(text in folded for text in ABSENT + NOTHING)
