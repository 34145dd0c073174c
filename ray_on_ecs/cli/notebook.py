"""`ray-on-ecs notebook`: Jupyter as a job of Ray, so that Ray chooses the node and keeps its GPU for it."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.dashboard import hold_open
from ray_on_ecs.cli.screen import note, out
from ray_on_ecs.cli.wake import awaken
from ray_on_ecs.cluster.clusters import Cluster, ComposeCluster
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.contract import NOTEBOOK_PORT
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError, one_line
from ray_on_ecs.jobs.record import ENDED
from ray_on_ecs.node.api import AnswerError
from ray_on_ecs.private_folder import temporary

PACKAGE = "jupyterlab"
START_SECONDS = 900.0  # a new GPU instance
POLL_SECONDS = 1.0  # each reads the log
IDLE_SECONDS = 3600  # a lunch break
# Jupyter ends its kernels, and then itself, when they are not used: it holds a GPU.
ENTRYPOINT = (
    f"python -m {PACKAGE} --no-browser --ip={{ip}} --port={NOTEBOOK_PORT} --ServerApp.port_retries=0 --allow-root "
    f"--MappingKernelManager.cull_idle_timeout={IDLE_SECONDS} "
    f"--ServerApp.shutdown_no_activity_timeout={IDLE_SECONDS}"
)


@click.command("notebook")
@click.option("--worker", is_flag=True, help="Run on a worker, with one GPU; autoscaling starts the worker.")
@click.option("--install", is_flag=True, help=f"Let Ray install {PACKAGE} first, only for this notebook.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@on_cluster
def command(cluster: Cluster, worker: bool, install: bool, no_browser: bool) -> int:
    """Run Jupyter on the head, or on a worker's GPU, until Ctrl-C. Its files are gone with it."""
    if worker and isinstance(cluster, ComposeCluster):
        raise UsageError("--worker: compose only publishes the head's port; leave it out")
    token = secrets.token_hex(16)
    job_id = f"notebook-{secrets.token_hex(3)}"
    environment: dict[str, Any] = {"env_vars": {"JUPYTER_TOKEN": token}}
    if install:
        environment["pip"] = {"packages": [PACKAGE], "pip_check": False}
    awaken(cluster)
    with cluster.connect_to_ray() as head:
        try:
            head.submit(
                job_id,
                # A node of a stack is reached from its instance, which its security group alone lets in, and this
                # machine from itself.
                ENTRYPOINT.format(ip="127.0.0.1" if cluster.is_here else "0.0.0.0"),  # nosec B104
                {},
                runtime_env=environment,
                entrypoint_num_gpus=1 if worker else None,
            )
        except AnswerError as cause:
            raise ResourceError(f"the Ray head did not accept the job of the notebook: {cause}") from cause
        try:
            with out.status("waiting for a GPU, and for Jupyter" if worker else "waiting for Jupyter"):
                host = _wait_until_it_listens(head, job_id)
            with cluster.forward(host, NOTEBOOK_PORT) as port:
                url = f"http://127.0.0.1:{port}/lab?token={token}"
                out.print(url)
                with _page(url) as page:
                    if not no_browser:
                        click.launch(page)
                        note("a browser that may not read temporary files needs the address above")
                    note("Ctrl-C ends it")
                    hold_open(port)
        except OSError as cause:
            raise ResourceError(f"lost the connection to the notebook ({one_line(cause)})") from cause
        finally:
            _stop(cluster, head, job_id)
    return 0


@contextmanager
def _page(url: str) -> Generator[str]:
    """Yield the address of a page that leads to another, which a browser's arguments would show to other users."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", dir=temporary()) as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={url}">\n')
        file.flush()
        yield Path(file.name).as_uri()


def _stop(cluster: Cluster, head: Head, job_id: str) -> None:
    """Stop the job, over a new connection if need be: it may hold a GPU."""
    with suppress(AnswerError):
        head.stop_job(job_id)
        return
    try:
        with cluster.connect_to_ray() as new:
            new.stop_job(job_id)
    except (OSError, TrainingError):
        stop = f"ray job stop {job_id} in {cluster.command('shell')}"
        note(f"{job_id} could not be stopped, and ends after an hour without use; {stop} ends it now")


def _wait_until_it_listens(head: Head, job_id: str) -> str:
    """Return the address of the node where it is."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        job = head.job(job_id)
        log = head.log(job_id) if job["status"] != "PENDING" else ""
        if job["status"] in ENDED:
            said = f"{log} {job['message'] or ''}"
            if f"No module named {PACKAGE}" in said:
                raise UsageError(f"{PACKAGE} is not installed on that node; --install lets Ray install it")
            if "is already in use" in said:
                raise UsageError(f"port {NOTEBOOK_PORT} is taken on that node, by another notebook; end that one first")
            raise TrainingError(f"Jupyter has ended ({one_line(said[-300:])})")
        if "is running at" in log:  # Jupyter's line when it listens
            return job["driver_agent_http_address"].split("//")[-1].rpartition(":")[0]
        time.sleep(POLL_SECONDS)
    raise ResourceError(
        f"Jupyter has not started in {START_SECONDS / 60:.0f} minutes; ray-on-ecs status shows the queue"
    )
