"""A run outlives its worker; a cluster outlives its head, and what the head knew its container."""

import json
import time
from collections.abc import Callable

import pytest

from tests.containers.cluster import EPOCHS, LONG, Cluster, Run, until

# After the head answers again, until both workers can work; docs/image.md says so, too.
BACK_SECONDS = 120
# As long as ECS may take to start a head again, and longer than the minute that Ray waits for one by itself.
AWAY_SECONDS = 75
# What a torn disk leaves of the head's state.
DAMAGE = """
import pathlib
for path in pathlib.Path("/var/lib/ray").glob("*/tables/*"):
    path.write_bytes(b"damaged")
"""


def test_a_killed_worker_is_replaced_and_the_run_ends(cluster: Cluster) -> None:
    run = Run(cluster, "killed", *LONG)
    run.wait_for_epochs(3)
    before = cluster.addresses()
    killed = cluster.workers[0]
    cluster.engine.run("kill", "--signal=KILL", killed)
    assert run.epochs() < EPOCHS, "it was killed in the middle"
    run.finish(240)
    assert killed not in cluster.workers
    ranks = run.addresses(EPOCHS - 1)
    assert ranks == set(cluster.addresses().values()) - {before[cluster.head]}, "the new container took its place"


def test_a_head_that_comes_back_elsewhere_knows_its_jobs_and_workers_and_the_run_goes_on(cluster: Cluster) -> None:
    run = Run(cluster, "restarted", *LONG)
    run.wait_for_epochs(3)
    workers, nodes, address = list(cluster.workers), worker_nodes(cluster), cluster.addresses()[cluster.head]
    [job] = running(cluster)
    cluster.engine.run("kill", "--signal=KILL", cluster.head)
    run.join(30)
    time.sleep(AWAY_SECONDS)
    assert all(map(cluster.is_well, workers)), "ECS would replace them, with the head about to come back"
    began = time.monotonic()
    with cluster.one_more("worker", "neighbour", command=("sleep", "600")):  # some engines give it the free address
        cluster.start_head()
        until(lambda: cluster.is_well(cluster.head), 120)
        print(f"the head was back {time.monotonic() - began:.0f} s after it was started again")
        assert cluster.addresses()[cluster.head] != address, "only the name leads to it"
        until(lambda: cluster.jobs()[job] == "FAILED", BACK_SECONDS)
        print(f"its job had ended after {time.monotonic() - began:.0f} s")
        until(lambda: cluster.free_cpus() == 2, BACK_SECONDS)
        print(f"and what it used was free after {time.monotonic() - began:.0f} s")
    assert "continued from the last checkpoint" in cluster.train("restarted", *LONG)
    print(f"the run had ended after {time.monotonic() - began:.0f} s")
    lines = cluster.read("runs/restarted/metrics.jsonl").splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == list(range(EPOCHS))
    assert cluster.workers == workers, "no container was replaced"
    assert worker_nodes(cluster) == nodes, "and none started Ray anew"


def lost(cluster: Cluster) -> None:
    """The head's instance is replaced."""
    cluster.engine.remove(cluster.head)
    cluster.engine.remove_volume(cluster.state(cluster.head))


def damaged(cluster: Cluster) -> None:
    """The head is killed, and can't read what it wrote."""
    cluster.engine.python(cluster.head, DAMAGE)
    cluster.engine.run("kill", "--signal=KILL", cluster.head)


@pytest.mark.parametrize(("end", "run_name"), [(lost, "after-lost"), (damaged, "after-damaged")])
def test_workers_come_back_to_a_head_without_its_state_and_the_next_run_works(
    cluster: Cluster, end: Callable[[Cluster], None], run_name: str
) -> None:
    old = list(cluster.workers)
    end(cluster)
    began = time.monotonic()
    cluster.until(lambda: cluster.is_well(cluster.head), 180)
    print(f"the head was back {time.monotonic() - began:.0f} s after it was gone")
    began = time.monotonic()
    cluster.settle(BACK_SECONDS)
    print(f"workers were back {time.monotonic() - began:.0f} s after the head")
    assert not set(old) & set(cluster.workers), "workers of the old head have gone"
    assert "test accuracy" in cluster.train(run_name, "--dataset=digits", "--epochs=1")


def worker_nodes(cluster: Cluster) -> set[str]:
    """Ray's own names of the workers, which each start of Ray gives anew."""
    return {node["NodeID"] for node in cluster.nodes() if "CPU" in node["Resources"]}


def running(cluster: Cluster) -> list[str]:
    """The jobs that run, by their submission ids."""
    return [name for name, status in cluster.jobs().items() if status == "RUNNING"]
