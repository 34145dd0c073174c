"""`ray-on-ecs dashboard`."""

from __future__ import annotations

import threading

import click

from ray_on_ecs.cluster import Cluster, on_cluster
from ray_on_ecs.screen import note, out


@click.command("dashboard")
@click.option("--no-browser", is_flag=True, help="Print the address only.")
@on_cluster
def command(cluster: Cluster, no_browser: bool) -> int:
    """Forward Ray's dashboard to this machine until Ctrl-C, and open it in the browser."""
    with cluster.connect() as head:
        out.print(f"dashboard  {head.url}", markup=False)
        if head.token:
            out.print(f"token      {head.token}", markup=False)
        if not no_browser:
            click.launch(head.url)
        note("Ctrl-C closes it")
        wait_for_interrupt()
    return 0


def wait_for_interrupt() -> None:
    """Return when the user presses Ctrl-C."""
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        click.echo(err=True)
