"""`ray-on-ecs shell`: a shell on the head."""

from __future__ import annotations

import signal
import subprocess

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.errors import UsageError


@click.command("shell")
@on_cluster
def command(cluster: Cluster) -> int:
    """Open a shell where Ray's own commands find the cluster: on a stack, in the head's container."""
    arguments = cluster.shell()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the shell
    try:
        return subprocess.call(arguments, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    except FileNotFoundError as cause:
        raise UsageError(f"command not found: {arguments[0]}; ray-on-ecs doctor says what to install") from cause
    finally:
        signal.signal(signal.SIGINT, before)
