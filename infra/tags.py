"""The tags that everything of a stack carries, so that people and cost reports can tell its parts."""

from __future__ import annotations

import pulumi


def tags(name: str) -> dict[str, str]:
    """Tags of one resource: its name for people, and the project and stack that it belongs to."""
    return {"Name": name, **stack_tags()}


def stack_tags() -> dict[str, str]:
    """Tags that all of a stack's resources share."""
    return {"project": pulumi.get_project(), "stack": pulumi.get_stack()}
