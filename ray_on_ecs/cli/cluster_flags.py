"""Flags of a command that name its cluster."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ray_on_ecs.cli.screen import note
from ray_on_ecs.cluster.clusters import Cluster, choose


def chosen(flags: dict[str, Any]) -> Cluster:
    """Return the cluster of the flags of `cluster_flags`, which its hints repeat; TrainingError if it is not found."""
    cluster = choose(**flags)
    project = cluster.stack.project if cluster.stack else None
    if project and project not in (Path.cwd(), *Path.cwd().parents):
        note(f"using {cluster.name} of the project in {project}, as none here or above has a cluster")
    cluster.typed = typed(flags)
    return cluster


def typed(flags: dict[str, Any]) -> str:
    """Return the cluster flag that the user typed, with a space before it; empty without one."""
    source = click.get_current_context().get_parameter_source
    for name, value in flags.items():
        if value and source(name) is ParameterSource.COMMANDLINE:
            return f" --{name}" if value is True else f" --{name} {shlex.quote(value)}"
    return ""


def cluster_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the cluster flags to a command, which gets them as `flags`; typed flags override the environment's."""

    @click.option(
        "--stack", metavar="NAME", envvar="RAY_ON_ECS_STACK", help="Pulumi stack (default: the selected one)."
    )
    @click.option(
        "--outputs",
        metavar="FILE",
        envvar="RAY_ON_ECS_OUTPUTS",
        help="File with the outputs of the stack, for users without Pulumi (pulumi stack output --json > FILE).",
    )
    @click.option("--local", is_flag=True, envvar="RAY_ON_ECS_LOCAL", help="This machine.")
    @click.option("--compose", is_flag=True, envvar="RAY_ON_ECS_COMPOSE", help="Cluster of docker/compose.yaml.")
    @wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        flags = {name: options.pop(name) for name in ("stack", "outputs", "local", "compose")}
        source = click.get_current_context().get_parameter_source
        typed = {name for name in flags if source(name) is ParameterSource.COMMANDLINE}
        if typed:
            flags = {name: value if name in typed else None for name, value in flags.items()}
        return function(*args, flags=flags, **options)

    return wrapper


def on_cluster(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the cluster flags to a command, which gets the cluster as `cluster`."""

    @cluster_flags
    @wraps(function)
    def wrapper(*args: Any, flags: dict[str, Any], **options: Any) -> Any:
        return function(*args, cluster=chosen(flags), **options)

    return wrapper
