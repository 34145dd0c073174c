"""`ray-on-ecs dashboard`: Ray's dashboard in the browser."""

from __future__ import annotations

import socket
import time

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.screen import note, out
from ray_on_ecs.cli.wake import awaken
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.errors import ResourceError

LOOK_SECONDS = 5.0  # AWS closes a session after 20 idle minutes


@click.command("dashboard")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@on_cluster
def command(cluster: Cluster, no_browser: bool) -> int:
    """Forward Ray's dashboard to this machine until Ctrl-C, and open it in the browser."""
    awaken(cluster)
    with cluster.connect_to_ray() as head:
        out.print(f"dashboard  {head.url}")
        if head.token:  # Ray's page asks for it, and can't have it in its address
            out.print(f"token      {head.token}")
        if not no_browser:
            click.launch(head.url)
        note("Ctrl-C closes it")
        hold_open(int(head.url.rpartition(":")[2]))
    return 0


def hold_open(port: int) -> None:
    """Return at Ctrl-C; ResourceError if this machine no longer listens on the port.

    The requests in between also keep AWS from closing the session as idle.
    """
    try:
        while True:
            time.sleep(LOOK_SECONDS)
            with socket.create_connection(("127.0.0.1", port), timeout=LOOK_SECONDS):
                pass
    except KeyboardInterrupt:
        click.echo(err=True)
    except OSError as cause:
        raise ResourceError("the session has ended; run the command again to open a new one") from cause
