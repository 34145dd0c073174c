"""A run outlives its worker; a cluster outlives its head."""

import json
import threading
import time

from tests.containers.cluster import Cluster, until

# After the head answers again, until both workers are back. docs/image.md says so, too.
BACK_SECONDS = 120
EPOCHS = 6
LONG = ("--dataset=synthetic", "--samples=3000", f"--epochs={EPOCHS}")


class Run(threading.Thread):
    """A run that goes on while the test does something to the cluster."""

    def __init__(self, cluster: Cluster, name: str, *flags: str) -> None:
        super().__init__(daemon=True)
        self.cluster, self.run_name, self.flags = cluster, name, flags
        self.log = self.failure = ""
        self.start()

    def run(self) -> None:
        try:
            self.log = self.cluster.train(self.run_name, *self.flags, seconds=420)
        except AssertionError as failure:
            self.failure = str(failure)

    def epochs(self) -> int:
        """The epochs whose metrics are in the bucket."""
        assert not self.failure, self.failure
        return len(self.cluster.read(f"runs/{self.run_name}/metrics.jsonl").splitlines())

    def wait_for_epochs(self, count: int) -> None:
        """Wait until this many are trained."""
        until(lambda: self.epochs() >= count, 180)

    def finish(self, seconds: float) -> dict:
        """Wait for the end while what ended is replaced; the run's result."""
        self.cluster.until(lambda: not self.is_alive(), seconds)
        assert not self.failure, self.failure
        return json.loads(self.cluster.read(f"runs/{self.run_name}/result.json"))


def test_a_killed_worker_is_replaced_and_the_run_ends(cluster: Cluster) -> None:
    run = Run(cluster, "killed", *LONG)
    run.wait_for_epochs(2)
    assert run.epochs() < EPOCHS, "it is killed in the middle"
    cluster.engine.run("kill", "--signal=KILL", cluster.workers[0])
    result = run.finish(300)
    assert result["metrics"]["epoch"] == EPOCHS - 1, "all epochs are trained"
    epochs = [json.loads(line)["epoch"] for line in cluster.read("runs/killed/metrics.jsonl").splitlines()]
    assert epochs == list(range(EPOCHS)), "none is missing and none is there twice"


def test_workers_come_back_to_a_new_head_and_the_next_run_works(cluster: Cluster) -> None:
    old = cluster.addresses()
    cluster.engine.run("kill", "--signal=KILL", cluster.head)
    cluster.replace_stopped()
    until(lambda: cluster.is_well(cluster.head), 120)
    began = time.monotonic()
    cluster.settle(BACK_SECONDS)
    print(f"workers were back {time.monotonic() - began:.0f} s after the head")
    assert not set(old) & set(cluster.workers), "workers of the old head have gone"
    log = cluster.train("after", "--dataset=digits", "--epochs=1")
    assert "test accuracy" in log
