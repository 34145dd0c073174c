"""A CPU worker prepares data while the workers train on it, and the head reports the needed CPU workers."""

import re
from collections.abc import Iterator

import pytest

from tests.containers.cluster import BUCKET, SIZE, Cluster
from tests.waiting import until

EPOCHS, IMAGES = 5, 512
# As a Ray program is submitted on the head; from a laptop with the address of the head's dashboard.
SUBMIT = ("ray", "job", "submit", "--", "python", "-m", "training.preprocess", f"s3://{BUCKET}/runs", "--name=prepared")


@pytest.fixture
def cpu_worker(cluster: Cluster) -> Iterator[str]:
    """The container of a CPU worker that has joined, and leaves with exit status 0."""
    if cluster.on_two_networks in cluster.workers:  # plain Ray Train lets Gloo choose a network
        cluster.stop(cluster.on_two_networks)
        cluster.settle()
    with cluster.one_more("cpu-worker", "cpu-worker") as name:
        until(lambda: len(cluster.nodes()) == 4, why=lambda: cluster.engine.logs(name))
        yield name
        cluster.stop_jobs()
        if cluster.is_running(name):
            status, _ = cluster.stop(name)
            assert status == 0, cluster.engine.logs(name)


def test_cpu_workers_preprocess_the_training_data(cluster: Cluster, cpu_worker: str) -> None:
    address = cluster.engine.address(cpu_worker, cluster.network)
    [node] = [node for node in cluster.nodes() if node["node_ip"] == address]
    assert node["resources_total"]["CPU"] == SIZE.vcpus
    assert node["labels"]["ray.io/node-group"] == "cpu-workers", "a pipeline asks for CPU workers by this label"

    flags = ("--cpu-workers", "--num-workers=2", f"--epochs={EPOCHS}", f"--records={IMAGES}", "--size=32", "--blurs=1")
    done = cluster.engine.run("exec", cluster.head, *SUBMIT, *flags, check=False, timeout=400)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    line = r"epoch (\d+): loss ([\d.]+), (\d+) images, [\d.]+ a second, prepared on (\{.*?\})"
    epochs = {int(epoch): (float(loss), *rest) for epoch, loss, *rest in re.findall(line, output)}
    assert sorted(epochs) == list(range(EPOCHS)), output
    for _, images, places in epochs.values():
        assert int(images) == IMAGES
        assert places == str({address: IMAGES})
    assert epochs[EPOCHS - 1][0] < epochs[0][0] / 2
    trained_at = set(re.findall(r"\(ip=([\d.]+), pid=\d+\) world_rank=", output))
    assert trained_at == cluster.places()
    assert any(key.endswith("state.pt") for key in cluster.keys("runs/prepared/"))
    cluster.until(lambda: cluster.metrics() >= {"CPUs", "CPUsRequested"})
