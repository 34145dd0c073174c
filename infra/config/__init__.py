"""What is asked for, what AWS says to it, and what is refused: the only package that reads the stack's configuration.

settings.py declares the keys, their defaults and what they mean. Components import nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pulumi

from infra.config import arguments, docker
from infra.config.arguments import Arguments, NodeGroupArgs, RayClusterArgs
from infra.config.identity import check_state
from infra.config.location import ask_caller, check_account, remember
from infra.config.plan import Plan, make_plan
from infra.config.runs import announce_runs, announce_update
from infra.config.settings import Settings
from infra.errors import SettingError
from infra.tags import name_prefix

__all__ = [
    "NodeGroupArgs",
    "Plan",
    "RayClusterArgs",
    "announce_runs",
    "announce_update",
    "check_state",
    "load",
    "plan",
    "read",
]
T = TypeVar("T")


def load(cluster_name: str) -> RayClusterArgs:
    """Read the stack's configuration as arguments of RayCluster.

    It also checks what concerns this stack and this machine rather than the cluster, which may be in any program: the
    account (`aws:allowedAccountIds`), and in a preview the Docker that is to build the image.

    Raises:
        RunError: It cannot work.
    """
    settings = _in_one_line(Settings.load)
    check_account(ask_caller().account)
    if not settings.image_uri and pulumi.runtime.is_dry_run():
        docker.check(is_up=lambda: remember(name_prefix(cluster_name))[0] is not None)
    return arguments.of_settings(settings)


def read(args: RayClusterArgs) -> Arguments:
    """Check the arguments of RayCluster without asking AWS, and end the program with one line if they cannot work."""
    return _in_one_line(lambda: arguments.read(args))


def plan(args: Arguments, prefix: str, opts: pulumi.InvokeOptions) -> Plan:
    """Ask AWS about them, as make_plan does, and end the program with one line if they cannot work."""
    return _in_one_line(lambda: make_plan(args.settings, prefix, args.network, opts))


def _in_one_line(work: Callable[[], T]) -> T:
    """Do what refuses settings, and end the program with that one line if it does."""
    try:
        return work()
    except SettingError as error:
        raise pulumi.RunError(str(error)) from error
