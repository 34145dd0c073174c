"""A run outlives its workers and its head; a cluster outlives its head, and the head's state its container.

The tests disturb one run in turn. Tests without a run use a second cluster meanwhile, as they mostly wait.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.definitions.containers import WORKER_DRAIN_SECONDS, WORKER_STOP_SECONDS
from tests.containers.cluster import EPOCHS, GRACE_SECONDS, Cluster, Disturbed, Run, cluster_of
from tests.containers.engine import Engine
from tests.waiting import until

# From the head's first answer until both workers can work. It takes less than the two minutes of
# docs/design/nodes.md, and the tests print it; this limit only ends a hang.
BACK_SECONDS = 300
# The time ECS may need to restart a head; longer than the minute that Ray waits by default.
AWAY_SECONDS = 75
# The time for work on a draining worker, where a test can't wait for the stack's limit.
DRAIN_SECONDS = 5
# The head's state on a torn disk.
DAMAGE = """
import pathlib
for path in pathlib.Path("/var/lib/ray").glob("*/tables/*"):
    path.write_bytes(b"damaged")
"""


def lost(cluster: Cluster) -> None:
    """The head's instance is replaced."""
    cluster.engine.remove(cluster.head)
    cluster.engine.remove_volume(cluster.state(cluster.head))


def damaged(cluster: Cluster) -> None:
    """The head is killed and can't read its state."""
    cluster.engine.python(cluster.head, DAMAGE)
    cluster.engine.run("kill", "--signal=KILL", cluster.head)


ENDS = {"lost": lost, "damaged": damaged}
Beside = dict[str, Future[None]]


@pytest.fixture(scope="module", autouse=True)
def beside(request: pytest.FixtureRequest, engine: Engine, image: str, s3_image: str, code: Path) -> Iterator[Beside]:
    """The tests of the second cluster, one after the other."""
    chosen = [end for end in ENDS if any(f"[{end}]" in item.name for item in request.session.items)]
    with cluster_of(engine, image, s3_image, code) as cluster, ThreadPoolExecutor(1) as pool:
        heads = {end: pool.submit(workers_come_back, cluster, end) for end in chosen}
        yield {**heads, "frozen": pool.submit(lose_a_worker, cluster)}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def disturbed(made: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    disturbed = Disturbed(made, tmp_path_factory.mktemp("runs"))
    yield disturbed
    disturbed.end()


def test_drained_worker_stops_at_once_and_run_resumes(cluster: Cluster, disturbed: Disturbed) -> None:
    """ECS's steps when EC2 reclaims an instance; docs/design/measurements.md has the seconds that this prints."""
    run = disturbed.under_way()
    name = cluster.workers[0]
    began = time.monotonic()

    def saw(what: str) -> None:
        print(f"{what} {time.monotonic() - began:.1f} s after SIGTERM")

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(cluster.stop, name)
        until(lambda: "received SIGTERM. Draining" in cluster.engine.logs(name), WORKER_STOP_SECONDS)
        saw("Ray drained the node")
        [checkpoint] = until(
            lambda: re.findall(r"nodes are being reclaimed; restarting from (\S+) of ", run.log), WORKER_STOP_SECONDS
        )
        saw("the ranks had stored a checkpoint and stopped")
        status, seconds = stopping.result()
        saw("the worker was gone")
    [step] = re.findall(r"the scripts are being ended: saving after step (\d+)", run.log)
    assert checkpoint.startswith(f"checkpoints/step-{int(step):09d}"), "no step is lost"
    assert f"{checkpoint}/checkpoint.json" in cluster.keys(f"runs/{run.name}/")
    log = cluster.engine.logs(name)
    assert status == 0, log
    assert "Local node finished draining" in log
    assert seconds < WORKER_DRAIN_SECONDS
    began = time.monotonic()
    cluster.settle()
    print(f"another worker had joined {time.monotonic() - began:.1f} s after its container's start")
    until(lambda: f"resuming after step {step} " in run.log, why=lambda: run.log)
    print(f"and the run went on {time.monotonic() - began:.1f} s after that start")
    run.goes_on()


def test_run_resumes_after_its_head_is_stopped(cluster: Cluster, disturbed: Disturbed) -> None:
    run = disturbed.under_way()
    status, _ = cluster.stop(cluster.head)
    assert status == 0, cluster.engine.logs(cluster.head)
    until(lambda: not run.is_alive())
    assert f"stopped; the same command with --run-name {run.name} resumes the run" in run.log
    status, seconds = cluster.stop(cluster.workers[0])
    assert status == 0
    assert seconds < WORKER_DRAIN_SECONDS
    cluster.settle()
    until(lambda: running(cluster), BACK_SECONDS)
    run.again()
    run.goes_on()
    assert f"run {run.name} is already active as job " in run.log
    assert "resuming after step " in run.log


def test_killed_or_late_worker_is_replaced(cluster: Cluster, disturbed: Disturbed) -> None:
    run = disturbed.under_way()
    cluster.engine.remove(cluster.workers.pop(0))
    assert run.epochs() < EPOCHS
    hasty = cluster.start_worker(RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=str(DRAIN_SECONDS))
    run.goes_on()
    status, seconds = cluster.stop(hasty)
    assert status == 0, cluster.engine.logs(hasty)
    assert seconds < DRAIN_SECONDS + GRACE_SECONDS
    assert run.epochs() < EPOCHS
    run.goes_on()
    assert hasty not in cluster.workers


def test_head_with_a_new_address_resumes_its_runs(cluster: Cluster, disturbed: Disturbed) -> None:
    run = disturbed.under_way()
    workers, nodes, address = list(cluster.workers), worker_nodes(cluster), cluster.addresses()[cluster.head]
    [job] = running(cluster)
    cluster.engine.run("kill", "--signal=KILL", cluster.head)
    until(lambda: not run.is_alive())
    time.sleep(AWAY_SECONDS)
    assert all(map(cluster.is_well, workers)), "ECS would replace healthy workers while the head restarts"
    began = time.monotonic()
    with cluster.one_more(
        "worker", "neighbour", command=("sleep", "600")
    ):  # takes the free address, which some engines would reuse
        cluster.start_head()
        until(lambda: cluster.is_well(cluster.head))
        print(f"the head was back {time.monotonic() - began:.0f} s after it was started again")
        assert cluster.addresses()[cluster.head] != address
        until(lambda: cluster.jobs()[job] == "FAILED", BACK_SECONDS)
        print(f"its job had ended after {time.monotonic() - began:.0f} s")
        [successor] = until(lambda: running(cluster), BACK_SECONDS)
        print(f"and the head had submitted it again after {time.monotonic() - began:.0f} s")
    run.again()
    run.finish()
    print(f"the run had ended after {time.monotonic() - began:.0f} s")
    assert f"run {run.name} is already active as job {successor}, " in run.log
    assert "resuming after step " in run.log
    until(lambda: cluster.jobs()[successor] == "SUCCEEDED")
    assert cluster.workers == workers
    assert worker_nodes(cluster) == nodes
    undisturbed = Run(cluster, "undisturbed", disturbed.folder / "undisturbed.log")
    undisturbed.finish()
    assert cluster.same_weights(run.name, undisturbed.name)


@pytest.mark.parametrize("end", ENDS)
def test_workers_rejoin_a_head_without_its_state(beside: Beside, end: str) -> None:
    beside[end].result()


def test_worker_lost_by_the_head_is_unhealthy(beside: Beside) -> None:
    beside["frozen"].result()


def workers_come_back(cluster: Cluster, end: str) -> None:
    """End a head and its state; the workers are replaced and train."""
    cluster.settle()
    old = list(cluster.workers)
    ENDS[end](cluster)
    began = time.monotonic()
    cluster.until(lambda: cluster.is_well(cluster.head))
    print(f"the head was back {time.monotonic() - began:.0f} s after it was gone")
    began = time.monotonic()
    cluster.settle(BACK_SECONDS)
    print(f"workers were back {time.monotonic() - began:.0f} s after the head")
    assert not set(old) & set(cluster.workers)
    assert "test_accuracy" in cluster.train(f"after-{end}", "--data=digits", "--epochs=1")


def lose_a_worker(cluster: Cluster) -> None:
    """Freeze Ray on a worker until its health check fails."""
    cluster.settle()
    name = cluster.workers[0]
    cluster.signal(name, "raylet", "SIGSTOP")
    until(lambda: not cluster.is_well(name), 300)  # the head asks five times, some seconds each
    assert cluster.is_running(name)


def worker_nodes(cluster: Cluster) -> set[str]:
    """Ray's IDs of the workers, which change with each start of Ray."""
    return {node["node_id"] for node in cluster.nodes() if "CPU" in node["resources_total"]}


def running(cluster: Cluster) -> list[str]:
    """Return the IDs of the jobs that run."""
    return [name for name, status in cluster.jobs().items() if status == "RUNNING"]
