"""Three containers form one Ray cluster, which trains and saves to the bucket."""

import json
import re

from tests.containers.cluster import SIZE, Cluster, Trained
from tests.waiting import until

RESULTS = {"result.json", "metrics.jsonl", "curves.png", "best.safetensors", "model.safetensors", "run.json"}


def test_nodes_join_with_the_resources_of_their_task(cluster: Cluster) -> None:
    nodes = {node["node_ip"]: node["resources_total"] for node in cluster.nodes()}
    addresses = cluster.addresses()
    assert set(nodes) == set(addresses.values())
    head = nodes.pop(addresses[cluster.head])
    assert "CPU" not in head, "Ray could place work on the head"
    for resources in nodes.values():
        assert resources["CPU"] == SIZE.vcpus
        assert "GPU" not in resources
        assert resources["object_store_memory"] == SIZE.object_store_bytes
        announced = resources["memory"] + resources["object_store_memory"]
        assert announced <= SIZE.memory_mib * 2**20, "Ray would announce the host's memory and exceed the task's"


def test_ray_status_shows_all_nodes(cluster: Cluster) -> None:
    def status() -> str:
        return cluster.engine.execute(cluster.head, "ray", "status", check=False).stdout

    # Nodes that have just joined are not in it yet.
    until(lambda: len(re.findall(r"^ 1 node_", status(), re.MULTILINE)) == 3, 120, status)
    assert f"/{2 * SIZE.vcpus:.1f} CPU" in status()


def test_train_command_uses_two_workers_and_the_bucket(cluster: Cluster, trained: Trained) -> None:
    addresses = cluster.addresses()
    head = addresses.pop(cluster.head)
    assert cluster.trained_on() == set(addresses.values()), f"one rank on each worker and none on the head {head}"
    keys = cluster.keys(f"runs/{trained.name}/")
    assert keys >= RESULTS
    assert any(key.startswith("ray/") and key.endswith("/optimizer.pt") for key in keys)
    result = json.loads(cluster.read(f"runs/{trained.name}/result.json"))
    assert result["hardware"]["workers"] == 2
    assert 2 < result["cost"]["usd"] <= 2 * result["times"]["total_seconds"], "two nodes cost a dollar a second each"
    assert result["metrics"]["test_accuracy"] > 0.5, "three epochs are enough for the digits"


def test_metrics_show_ray_demand_and_job_progress(cluster: Cluster, trained: Trained) -> None:
    expected = {"GPUs", "GPUsRequested", "GPUsUsed", "RunProgress", "TrainLoss", "TestAccuracy"}
    cluster.until(lambda: cluster.metrics() >= expected, why=lambda: f"{cluster.metrics()}\n{trained.log}")


def test_root_is_read_only_and_processes_lack_capabilities(cluster: Cluster) -> None:
    for name in (cluster.head, *cluster.workers):
        refused = cluster.engine.execute(name, "touch", "/usr/local/x", check=False)
        assert "Read-only file system" in refused.stderr
        elsewhere = cluster.engine.execute(name, "find", "/run", "/var/tmp", "-user", "ray").stdout
        assert not elsewhere, "some engines make these writable; ECS does not"
        status = cluster.engine.execute(name, "grep", "-h", "Cap", "/proc/1/status", "/proc/self/status").stdout
        assert set(re.findall(r"\t([0-9a-f]+)", status)) == {"0" * 16}
        status = cluster.engine.execute(name, "grep", "NoNewPrivs", "/proc/1/status").stdout
        assert status.split() == ["NoNewPrivs:", "1"]
