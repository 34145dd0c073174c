"""A CPU helper prepares data while the workers train on it, and the head says how many helpers it needs."""

import re
from collections.abc import Iterator

import pytest

from tests.containers.cluster import CODE, SIZE, Cluster
from tests.waiting import until

EPOCHS, SAMPLES = 5, 4096
# As a driver of Ray's own is submitted on the head; from a laptop with the address of the head's dashboard.
SUBMIT = ("ray", "job", "submit", f"--working-dir={CODE}", "--", "python", "ray_data.py")


@pytest.fixture
def helper(cluster: Cluster) -> Iterator[str]:
    """The container of a helper that has joined, and leaves in peace."""
    if cluster.on_two_networks in cluster.workers:  # a plain Ray Train leaves it to Gloo to choose one
        cluster.stop(cluster.on_two_networks)
        cluster.settle()
    with cluster.one_more("helper", "helper") as name:
        until(lambda: len(cluster.nodes()) == 4, 180, lambda: cluster.engine.logs(name))
        yield name
        cluster.stop_jobs()
        status, _ = cluster.stop(name)
        assert status == 0, cluster.engine.logs(name)


def test_helpers_prepare_what_the_workers_train_on(cluster: Cluster, helper: str) -> None:
    address = cluster.engine.address(helper, cluster.network)
    [node] = [each for each in cluster.nodes() if each["node_ip"] == address]
    assert node["resources_total"]["CPU"] == SIZE.vcpus
    assert node["labels"]["ray.io/node-group"] == "helpers", "a pipeline asks for helpers by this label"

    flags = ("--helpers", "--num-workers=2", f"--epochs={EPOCHS}")
    done = cluster.engine.run("exec", cluster.head, *SUBMIT, *flags, check=False, timeout=400)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    line = r"epoch (\d+): loss ([\d.]+), (\d+) samples, (\d+) different, from (\{.*?\})"
    epochs = {int(epoch): (float(loss), *rest) for epoch, loss, *rest in re.findall(line, said)}
    assert sorted(epochs) == list(range(EPOCHS)), said
    for _, samples, different, places in epochs.values():
        assert int(samples) == int(different) == SAMPLES, "each of them once an epoch"
        assert places == str({address: SAMPLES}), "the workers' CPUs are for training"
    assert epochs[EPOCHS - 1][0] < epochs[0][0] / 2, "it learns from what is prepared"
    trained_at = set(re.findall(r"\(ip=([\d.]+), pid=\d+\) world_rank=", said))
    assert trained_at == cluster.places(), "and the helper's are for the data"
    assert any(key.endswith("state.pt") for key in cluster.keys("runs/ray-data/")), "a checkpoint that a restart reads"
    cluster.until(lambda: cluster.metrics() >= {"CPUs", "CPUsRequested"}, 300)
