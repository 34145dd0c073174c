"""A run outlives its worker; a cluster outlives its head."""

import time

from tests.containers.cluster import EPOCHS, LONG, Cluster, Run, until

# After the head answers again, until both workers are back; docs/image.md says so, too.
BACK_SECONDS = 120


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


def test_workers_come_back_to_a_new_head_and_the_next_run_works(cluster: Cluster) -> None:
    old = cluster.addresses()
    cluster.engine.run("kill", "--signal=KILL", cluster.head)
    cluster.replace_stopped()
    until(lambda: cluster.is_well(cluster.head), 120)
    began = time.monotonic()
    cluster.settle(BACK_SECONDS)
    print(f"workers were back {time.monotonic() - began:.0f} s after the head")
    assert not set(old) & set(cluster.workers), "workers of the old head have gone"
    assert "test accuracy" in cluster.train("after", "--dataset=digits", "--epochs=1")
