"""`ray-on-ecs recipe`: the packaged jobs, each one file to copy and to change."""

from __future__ import annotations

import ast
import os
import shlex
from pathlib import Path

import click

import ray_on_ecs
from ray_on_ecs.errors import UsageError

RECIPES = ("ray_train_ddp", "image_classifier", "language_model", "preprocess", "network_bench")


def path_of(name: str) -> Path:
    """Return the file of a packaged job, which is next to this package and is not imported."""
    if name not in RECIPES:
        raise UsageError(f"NAME: unknown recipe {name!r}; use {', '.join(RECIPES)}")
    return Path(ray_on_ecs.__file__).parents[1] / "training" / f"{name}.py"


@click.group("recipe")
def command() -> None:
    """List the packaged training jobs, each one file, or copy one into your project to change it."""


@command.command("list")
def list_recipes() -> None:
    """Print the name of each recipe and its first line."""
    width = max(map(len, RECIPES))
    for name in RECIPES:
        about = (ast.get_docstring(ast.parse(path_of(name).read_text())) or "").partition("\n")[0]
        click.echo(f"{name:<{width}}  {about}")


@command.command("copy")
@click.argument("name")
@click.argument("file", required=False)
def copy(name: str, file: str | None) -> None:
    """Copy recipe NAME to FILE, by default NAME.py in the current folder; `ray-on-ecs run FILE` starts it."""
    source = path_of(name.removesuffix(".py"))
    content = source.read_text()
    target = Path(file or source.name)
    if target.is_dir() or str(file).endswith(os.sep):
        target /= source.name
    try:
        with target.open("x") as opened:
            opened.write(content)
    except FileExistsError as cause:
        raise UsageError(f"FILE: {str(target)!r} exists; give another name") from cause
    except OSError as cause:
        raise UsageError(f"FILE: {str(target)!r} can't be written ({cause.strerror})") from cause
    name = shlex.quote(str(target))
    click.echo(
        f"{target}: ray-on-ecs run {name} starts it on the cluster, ray-on-ecs run --local {name} on this machine"
    )
