"""What is asked for, what AWS says to it, and what is refused: the only package that reads the stack's configuration.

settings.py declares the keys, their defaults and what they mean. Components import nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pulumi

from infra.config.identity import check_state
from infra.config.plan import Plan, make_plan
from infra.config.settings import Settings
from infra.errors import SettingError
from infra.references import ExistingNetwork

__all__ = ["Plan", "Settings", "check_state", "in_one_line", "load", "plan"]
T = TypeVar("T")


def load() -> Settings:
    """Read the stack's configuration, and end the program with one line if it cannot work."""
    return in_one_line(Settings.load)


def plan(settings: Settings, prefix: str, network: ExistingNetwork | None = None) -> Plan:
    """Ask AWS about settings, as make_plan does, and end the program with one line if they cannot work."""
    return in_one_line(lambda: make_plan(settings, prefix, network))


def in_one_line(work: Callable[[], T]) -> T:
    """Do what refuses settings, and end the program with that one line if it does."""
    try:
        return work()
    except SettingError as error:
        raise pulumi.RunError(str(error)) from error
