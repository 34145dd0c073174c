"""`ray-on-ecs shell`: a shell on the head."""

from __future__ import annotations

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.wake import awaken
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.errors import UsageError


@click.command("shell")
@on_cluster
def command(cluster: Cluster) -> int:
    """Open a shell where Ray's own commands find the cluster: on a stack, in the head's container."""
    awaken(cluster)
    try:
        with cluster.shell() as process:
            return process.wait()
    except FileNotFoundError as cause:
        raise UsageError(f"command not found: {cause.filename}") from cause
