"""A worker that can't join reports the reason in one line, and stops within a stated time."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from infra.definitions.user_data import INSTANCE_FILE
from ray_on_ecs.errors import GpuError, HeadError, StartError
from ray_on_ecs.node import gpus
from tests.containers.cluster import HEAD_HOST, INSTANCE, S3, Cluster
from tests.containers.engine import Engine

WAIT = "8"
# In addition to the wait: the container's start, and one unanswered request.
GRACE_SECONDS = 120
RAY = version("ray")  # from the lock, as in the image
METADATA = f"import importlib.metadata as m; print(m.distribution('ray').locate_file('ray-{RAY}.dist-info/METADATA'))"


# A group of two in the containers' AWS; prints an instance.
GROUP = """
import boto3
where = {"endpoint_url": "http://127.0.0.1:5000", "region_name": "us-east-1"}
autoscaling = boto3.client("autoscaling", **where)
autoscaling.create_launch_configuration(LaunchConfigurationName="gpu", ImageId="ami-1", InstanceType="g5.xlarge")
autoscaling.create_auto_scaling_group(
    AutoScalingGroupName="gpu", LaunchConfigurationName="gpu", MinSize=2, MaxSize=2, AvailabilityZones=["us-east-1a"]
)
[group] = autoscaling.describe_auto_scaling_groups()["AutoScalingGroups"]
print(group["Instances"][0]["InstanceId"])
"""
UNHEALTHY = """
import boto3
autoscaling = boto3.client("autoscaling", endpoint_url="http://127.0.0.1:5000", region_name="us-east-1")
[group] = autoscaling.describe_auto_scaling_groups()["AutoScalingGroups"]
print(*(each["InstanceId"] for each in group["Instances"] if each["HealthStatus"] == "Unhealthy"))
"""


Refused = dict[str, Future[tuple[int, str]]]


@pytest.fixture(scope="module")
def workers(made: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refused]:
    """Workers that must not join, each for a different reason: concurrent, as they mostly wait.

    The worker with a wrong name is separate: it asks the name server.
    """
    made.settle()
    hosts = made.hosts()
    instance = made.engine.python(made.storage, GROUP)
    (made.instance / INSTANCE_FILE).write_text(json.dumps({**INSTANCE, "instance_id": instance}))
    older = another_version(made, tmp_path_factory.mktemp("older"))
    with ThreadPoolExecutor(6) as pool:
        yield {
            "no-head": pool.submit(refused, made, "no-head", *hosts, RAY_HEAD_HOST=S3),
            "wrong-token": pool.submit(refused, with_token(made, "another"), "wrong-token", *hosts),
            "no-token": pool.submit(refused, with_token(made, ""), "no-token", *hosts),
            "another-version": pool.submit(refused, made, "another-version", *hosts, older),
            "few-gpus": pool.submit(
                refused,
                made,
                "few-gpus",
                grace=gpus.TIMEOUT_SECONDS + GRACE_SECONDS,
                command=("ray-worker", "--num-cpus=1", "--num-gpus=2"),
                FAKE_CUDA="999",
            ),
            "no-driver": pool.submit(
                refused,
                made,
                "no-driver",
                grace=gpus.TIMEOUT_SECONDS,
                command=("ray-worker", "--num-cpus=1", "--num-gpus=2"),
            ),
        }


def refused(cluster: Cluster, name: str, *options: str, grace: float = GRACE_SECONDS, **given: Any) -> tuple[int, str]:
    """Exit status and last line of a worker that must not join and ends in time."""
    began = time.monotonic()
    with cluster.one_more("worker", name, *options, RAY_HEAD_WAIT_S=WAIT, **given) as container:
        status, log = cluster.engine.wait(container)
    assert time.monotonic() - began < float(WAIT) + grace
    assert "Traceback" not in log
    return status, log.strip().splitlines()[-1]


def with_token(cluster: Cluster, token: str) -> Cluster:
    """The cluster for a client with this token."""
    return replace(cluster, engine=Engine(cluster.engine.command, {"RAY_AUTH_TOKEN": token}))


def another_version(cluster: Cluster, folder: Path) -> str:
    """The option that changes the version of a container's Ray."""
    path = cluster.engine.python(cluster.head, METADATA)
    metadata = cluster.engine.execute(cluster.head, "cat", path).stdout
    older = folder / "METADATA"
    older.write_text(metadata.replace(f"Version: {RAY}", "Version: 0.0.0"))
    older.chmod(0o644)
    folder.chmod(0o755)
    return f"--volume={older}:{path}:ro"


def test_wrong_name_of_the_head_is_reported(cluster: Cluster) -> None:
    status, line = refused(cluster, "wrong-name", RAY_HEAD_HOST="hed.ray.internal")
    assert status == HeadError.exit_status
    assert "hed.ray.internal has no address, after 8 s" in line


def test_unreachable_head_is_reported(workers: Refused) -> None:
    status, line = workers["no-head"].result()
    assert status == HeadError.exit_status
    assert f"{S3}:8265 does not answer" in line


def test_wrong_token_is_reported(workers: Refused) -> None:
    status, line = workers["wrong-token"].result()
    assert status == StartError.exit_status
    assert f"the head {HEAD_HOST} refuses the token" in line


def test_missing_token_is_reported(workers: Refused) -> None:
    status, line = workers["no-token"].result()
    assert status == StartError.exit_status
    assert "RAY_AUTH_TOKEN must be set" in line


def test_other_ray_version_is_reported(workers: Refused) -> None:
    status, line = workers["another-version"].result()
    assert status == StartError.exit_status
    assert f"the head {HEAD_HOST} runs Ray {RAY} and this node Ray 0.0.0" in line


def test_gpus_without_a_driver_are_reported(workers: Refused) -> None:
    status, line = workers["no-driver"].result()
    assert status == StartError.exit_status
    assert "the CUDA driver is missing" in line


def test_instance_with_failing_gpus_is_replaced(workers: Refused, made: Cluster) -> None:
    status, line = workers["few-gpus"].result()
    assert status == GpuError.exit_status
    assert "the CUDA driver does not start: cuInit returns 999" in line
    assert len(made.nodes()) == 3
    own = json.loads((made.instance / INSTANCE_FILE).read_text())["instance_id"]
    assert made.engine.python(made.storage, UNHEALTHY) == own


def test_worker_with_lost_gpus_is_unhealthy(made: Cluster) -> None:
    made.settle()
    worker = made.workers[0]
    assert made.engine.execute(worker, "ray-health", "worker", check=False).returncode == 0
    done = made.engine.execute(worker, "ray-health", "worker", "--num-gpus=1", check=False)
    assert (done.returncode, "the CUDA driver is missing" in done.stderr) == (1, True)
