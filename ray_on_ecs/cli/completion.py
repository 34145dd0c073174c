"""`ray-on-ecs completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print what a shell needs to complete verbs and flags; put eval "$(ray-on-ecs completion bash)" into ~/.bashrc."""
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "ray-on-ecs", "_RAY_ON_ECS_COMPLETE").source())
