"""`ray-on-ecs completion`, and the names of runs that it offers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import click
from click.shell_completion import CompletionItem, get_completion_class

from ray_on_ecs.private_folder import at_home

SHELLS = ("bash", "zsh", "fish")
# The file with the names that `runs` listed last: a stack can't be asked at each Tab.
LISTED = "runs"


def remember_runs(names: Iterable[str]) -> None:
    """Keep the names of runs for completion."""
    with suppress(OSError, RuntimeError):  # RuntimeError: the user does not have a home directory
        (at_home() / LISTED).write_text("".join(f"{name}\n" for name in names))


def complete_run(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return runs of this folder and of the last `runs` whose names have this prefix."""
    from ray_on_ecs.config import is_run_name

    names: list[str] = []
    with suppress(OSError):
        names += os.listdir(os.environ.get("RAY_ON_ECS_STORAGE_PATH", "results"))
    with suppress(OSError, ValueError, RuntimeError):
        names += (at_home() / LISTED).read_text().split("\n")
    return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(typed) and is_run_name(name)]


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell; put eval "$(ray-on-ecs completion bash)" into ~/.bashrc."""
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(ctx.find_root().command, {}, "ray-on-ecs", "_RAY_ON_ECS_COMPLETE").source())
