"""`ray-on-ecs shell`: a shell on the head."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.errors import UsageError


@click.command("shell")
@on_cluster
def command(cluster: Cluster) -> int:
    """Open a shell where Ray's own commands find the cluster: on a stack, in the head's container."""
    try:
        with cluster.shell() as process, _keys_ignored():
            return process.wait()
    except FileNotFoundError as cause:
        raise UsageError(f"command not found: {cause.filename}") from cause


@contextmanager
def _keys_ignored() -> Generator[None]:
    """Ignore these signals in this process: the keys that send them are for the shell."""
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
