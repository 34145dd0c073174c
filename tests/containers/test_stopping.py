"""SIGTERM: a node drains what it does and is out in time, with exit status 0."""

import time

from infra.containers import WORKER_DRAIN_SECONDS
from tests.containers.cluster import EPOCHS, LONG, Cluster, Run, until

# What `docker stop` itself may add to the stop timeout before it kills.
GRACE_SECONDS = 20


def stop(cluster: Cluster, name: str) -> tuple[int, float]:
    """Exit status of a node that is asked to stop, and how long it took."""
    began = time.monotonic()
    cluster.engine.run("stop", name, timeout=180)  # SIGTERM; SIGKILL, and 137, after the definition's stop timeout
    seconds = time.monotonic() - began
    return cluster.engine.wait(name)[0], seconds


def test_an_idle_worker(cluster: Cluster) -> None:
    name = cluster.workers[0]
    status, seconds = stop(cluster, name)
    log = cluster.engine.logs(name)
    assert status == 0, log
    assert "asked to stop" in log
    assert seconds < 20, "nothing was to be drained"


def test_a_worker_that_waits_for_its_head(cluster: Cluster) -> None:
    with cluster.one_more("worker", "waiting", RAY_HEAD_HOST="nobody.internal") as name:
        until(lambda: "waiting for the head" in cluster.engine.logs(name), 30)
        status, seconds = stop(cluster, name)
        assert status == 0
        assert seconds < GRACE_SECONDS


def test_a_worker_that_trains_is_left_at_once_and_the_run_goes_on_elsewhere(cluster: Cluster) -> None:
    run = Run(cluster, "drained", *LONG, "--max-failures=0")
    run.wait_for_epochs(3)
    name, before = cluster.workers[0], cluster.addresses()
    status, seconds = stop(cluster, name)
    print(f"the worker left {seconds:.0f} s after SIGTERM")
    log = cluster.engine.logs(name)
    assert status == 0, log
    assert "Local node finished draining" in log, "it left because its work was done"
    assert seconds < WORKER_DRAIN_SECONDS / 2, "the run has stored a checkpoint and is gone"
    run.finish(240)
    assert "are to be stopped; left after step" in run.log
    assert run.addresses(EPOCHS - 1) == set(cluster.addresses().values()) - {before[cluster.head]}


def test_a_worker_that_is_not_left_in_time_is_cut_off(cluster: Cluster) -> None:
    cluster.engine.remove(cluster.workers.pop())
    name = cluster.start_worker(RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="5")
    cluster.settle()
    run = Run(cluster, "moved", *LONG)
    run.wait_for_epochs(3)
    before = cluster.addresses()
    status, seconds = stop(cluster, name)
    assert status == 0, cluster.engine.logs(name)
    assert seconds < 5 + GRACE_SECONDS, "the limit holds, whatever runs"
    assert run.epochs() < EPOCHS, "it was cut off"
    run.finish(240)
    assert run.addresses(EPOCHS - 1) == set(cluster.addresses().values()) - {before[cluster.head]}, (
        "and went on elsewhere"
    )


def test_a_head_in_the_middle_of_a_run(cluster: Cluster) -> None:
    run = Run(cluster, "headless", *LONG)
    run.wait_for_epochs(3)
    status, seconds = stop(cluster, cluster.head)
    assert status == 0, cluster.engine.logs(cluster.head)
    assert seconds < cluster.definition("head")["stopTimeout"]
    run.join(30)
    assert "interrupted; continue with --run-name headless" in run.log + run.failure
    status, seconds = stop(cluster, cluster.workers[0])
    assert status == 0, "a worker without a head"
    assert seconds < WORKER_DRAIN_SECONDS / 2, "nobody is left to drain it"
    cluster.settle()
    assert "continued from the last checkpoint" in cluster.train("headless", *LONG)
