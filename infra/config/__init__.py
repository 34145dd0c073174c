"""What is asked for, what AWS says to it, and what is refused: the only package that reads the stack's configuration.

The keys, their defaults and what they mean stand in Pulumi.yaml. Components import nothing of this.
"""

from __future__ import annotations

import pulumi

from infra.config.plan import Plan, make_plan
from infra.config.settings import Settings
from infra.errors import SettingError


def load() -> tuple[Settings, Plan]:
    """Read the stack's configuration, ask AWS about it, and end the program with one line if it cannot work."""
    try:
        settings = Settings.load()
        return settings, make_plan(settings)
    except SettingError as error:
        raise pulumi.RunError(str(error)) from error
