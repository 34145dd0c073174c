"""SIGTERM: a node drains what it does and is out in time, with exit status 0."""

import time

from tests.containers.cluster import Cluster, until
from tests.containers.test_failures import EPOCHS, LONG, Run

# What `docker stop` itself may add to the stop timeout before it kills.
GRACE_SECONDS = 5


def stop(cluster: Cluster, name: str) -> tuple[int, float]:
    """Exit status of a node that is asked to stop, and how long it took."""
    began = time.monotonic()
    cluster.engine.run("stop", name, timeout=180)  # SIGTERM; SIGKILL, and 137, after the definition's stop timeout
    return cluster.engine.state(name)[1], time.monotonic() - began


def test_an_idle_worker(cluster: Cluster) -> None:
    name = cluster.workers[0]
    status, seconds = stop(cluster, name)
    log = cluster.engine.logs(name)
    assert status == 0, log
    assert "asked to stop" in log
    assert seconds < 20, "nothing was to be drained"


def test_an_idle_head(cluster: Cluster) -> None:
    status, seconds = stop(cluster, cluster.head)
    assert status == 0, cluster.engine.logs(cluster.head)
    assert seconds < cluster.definition("head")["stopTimeout"]


def test_a_worker_that_waits_for_its_head(cluster: Cluster) -> None:
    with cluster.one_more("worker", "waiting", RAY_HEAD_HOST="nobody.internal") as name:
        until(lambda: "waiting for the head" in cluster.engine.logs(name), 30)
        status, seconds = stop(cluster, name)
        assert status == 0
        assert seconds < GRACE_SECONDS


def test_a_worker_in_the_middle_of_a_run(cluster: Cluster) -> None:
    run = Run(cluster, "drained", *LONG)
    run.wait_for_epochs(2)
    name = cluster.workers[0]
    status, seconds = stop(cluster, name)
    assert status == 0, cluster.engine.logs(name)
    assert seconds < cluster.definition("worker")["stopTimeout"]
    print(f"a worker in the middle of a run was out after {seconds:.0f} s")
    assert run.finish(300)["metrics"]["epoch"] == EPOCHS - 1, "the run goes on with the worker that replaces it"


def test_a_head_in_the_middle_of_a_run(cluster: Cluster) -> None:
    run = Run(cluster, "headless", *LONG)
    run.wait_for_epochs(2)
    status, seconds = stop(cluster, cluster.head)
    assert status == 0, cluster.engine.logs(cluster.head)
    assert seconds < cluster.definition("head")["stopTimeout"]
    run.join(30)
    assert "continue with --run-name headless" in run.failure, "the one who follows the log is told how to go on"
    cluster.settle()
    log = cluster.train("headless", *LONG)
    assert "continued from the last checkpoint" in log
