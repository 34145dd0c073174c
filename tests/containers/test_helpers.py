"""A CPU helper prepares data while the workers train on it, and the head says how many helpers it needs."""

import json
import re
from collections.abc import Iterator

import pytest

from tests import prepared_batches
from tests.containers.cluster import BUCKET, SIZE, Cluster
from tests.waiting import until

EPOCHS, IMAGES = 5, 512
# As a Ray program is submitted on the head; from a laptop with the address of the head's dashboard.
SUBMIT = ("ray", "job", "submit", "--", "python", "-m", "training.preprocess", f"s3://{BUCKET}/runs", "--name=prepared")


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
        if cluster.is_running(name):
            status, _ = cluster.stop(name)
            assert status == 0, cluster.engine.logs(name)


def test_helpers_prepare_what_the_workers_train_on(cluster: Cluster, helper: str) -> None:
    address = cluster.engine.address(helper, cluster.network)
    [node] = [each for each in cluster.nodes() if each["node_ip"] == address]
    assert node["resources_total"]["CPU"] == SIZE.vcpus
    assert node["labels"]["ray.io/node-group"] == "helpers", "a pipeline asks for helpers by this label"

    flags = ("--helpers", "--num-workers=2", f"--epochs={EPOCHS}", f"--records={IMAGES}", "--size=32", "--blurs=1")
    done = cluster.engine.run("exec", cluster.head, *SUBMIT, *flags, check=False, timeout=400)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    line = r"epoch (\d+): loss ([\d.]+), (\d+) images, [\d.]+ a second, prepared on (\{.*?\})"
    epochs = {int(epoch): (float(loss), *rest) for epoch, loss, *rest in re.findall(line, said)}
    assert sorted(epochs) == list(range(EPOCHS)), said
    for _, images, places in epochs.values():
        assert int(images) == IMAGES, "as many in each epoch"
        assert places == str({address: IMAGES}), "the workers' CPUs are for training"
    assert epochs[EPOCHS - 1][0] < epochs[0][0] / 2, "it learns from what is prepared"
    trained_at = set(re.findall(r"\(ip=([\d.]+), pid=\d+\) world_rank=", said))
    assert trained_at == cluster.places(), "and the helper's are for the data"
    assert any(key.endswith("state.pt") for key in cluster.keys("runs/prepared/")), "a checkpoint that a restart reads"
    cluster.until(lambda: cluster.metrics() >= {"CPUs", "CPUsRequested"}, 300)


SECONDS = 480
# Texts in the bucket of the cluster.
DATA = """
import boto3

for number in range(6):
    text = f"the text of number {{number}}\\n" * 500
    boto3.client("s3").put_object(Bucket="{bucket}", Key=f"texts/{{number}}.txt", Body=text.encode())
"""
TEXTS = (
    *(f"--corpus=s3://{BUCKET}/texts", "--vocab-size=280", "--layers=1", "--width=16"),
    *("--heads=2", "--kv-heads=1", "--context=16", "--sharding=full", "--max-steps=6", "--epochs=2", "--device=cpu"),
    *("--batch-size=2", "--sample-tokens=4", "--num-workers=2"),
)


def tasks(cluster: Cluster) -> dict[str, int]:
    """How many tasks of Ray Data have prepared a batch, by the address of their node."""
    return prepared_batches.by_address(cluster.engine.python(cluster.head, prepared_batches.PROGRAM))


def losses(cluster: Cluster, run: str) -> list[float]:
    return [json.loads(line)["train_loss"] for line in cluster.read(f"runs/{run}/metrics.jsonl").splitlines()]


def test_a_helper_tokenizes_the_text_of_a_bucket(cluster: Cluster, helper: str) -> None:
    address = cluster.engine.address(helper, cluster.network)
    cluster.engine.python(cluster.head, DATA.format(bucket=BUCKET))
    before = tasks(cluster)
    command = ("ray-on-ecs", "run", "--recipe=language", "--run-name=read", *TEXTS)
    done = cluster.engine.run("exec", cluster.head, *command, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(tasks(cluster)) == {address}, "the workers' CPUs are for training"
    assert tasks(cluster)[address] > before.get(address, 0)
    assert len(losses(cluster, "read")) == 2
    assert {"sample.txt", "result.json"} <= cluster.keys("runs/read/")
    assert {name.rpartition("/")[2] for name in cluster.keys("runs/.corpora/")} >= {"about.json", "train", "test"}
