"""Stack configuration: settings, pre-flight checks against AWS, and the plan that follows from both.

Only this package reads the configuration, and components do not import it. settings.py declares the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pulumi

from infra.config import arguments, docker, limits
from infra.config.arguments import Arguments, RayClusterArgs, WorkerGroupArgs
from infra.config.identity import check_state
from infra.config.location import ask_caller, check_account, remember
from infra.config.plan import Plan, make_plan
from infra.config.runs import announce_runs, announce_update
from infra.config.settings import Settings
from infra.errors import SettingError
from infra.tags import name_prefix

__all__ = [
    "Plan",
    "RayClusterArgs",
    "WorkerGroupArgs",
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

    Two checks are here because a RayCluster in another program does not need them: the account
    (`aws:allowedAccountIds`), and in a preview the Docker daemon that will build the image.

    Raises:
        RunError: The configuration is invalid.
    """
    settings = _in_one_line(Settings.load)
    check_account(ask_caller().account)
    if not settings.image_uri and pulumi.runtime.is_dry_run():
        _in_one_line(lambda: docker.check(is_up=lambda: remember(name_prefix(cluster_name))[0] is not None))
    return arguments.of_settings(settings)


def read(args: RayClusterArgs) -> Arguments:
    """Validate the arguments of RayCluster without calls to AWS; raises RunError."""
    return _in_one_line(lambda: arguments.read(args))


def plan(args: Arguments, prefix: str, opts: pulumi.InvokeOptions) -> Plan:
    """Validate the arguments against AWS and plan the cluster; raises RunError."""
    made = _in_one_line(lambda: make_plan(args.settings, prefix, args.network, opts))
    nodes, tags = [*made.nodes.values()], made.default_tags
    _in_one_line(lambda: limits.check(args.settings, prefix, made.location, nodes, tags, args.environment))
    return made


def _in_one_line(work: Callable[[], T]) -> T:
    """Convert a SettingError to a RunError, which Pulumi prints without a traceback."""
    try:
        return work()
    except SettingError as error:
        raise pulumi.RunError(str(error)) from error
