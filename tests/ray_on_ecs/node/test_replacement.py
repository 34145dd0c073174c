"""An instance whose GPUs fail is marked unhealthy, a few at a time, in moto's EC2 Auto Scaling."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE
from ray_on_ecs.errors import GpuError
from ray_on_ecs.node import gpus, replacement, worker
from tests.ray_on_ecs.node.conftest import GROUP

COMMAND_NAME = "ray-worker"

NOT_OF_A_GROUP = '{"instance_id": "i-0123456789abcdef0"}'


@pytest.fixture
def autoscaling(autoscaling: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """EC2 Auto Scaling with a group of five instances."""
    monkeypatch.setattr(replacement, "SPREAD_SECONDS", 0.0)
    autoscaling.set_desired_capacity(AutoScalingGroupName=GROUP, DesiredCapacity=5)
    return autoscaling


def instances(service: Any) -> list[dict[str, Any]]:
    return service.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])["AutoScalingGroups"][0]["Instances"]


def unhealthy(service: Any) -> list[str]:
    return [
        instance["InstanceId"] for instance in instances(service) if instance["HealthStatus"].lower() == "unhealthy"
    ]


def test_one_of_five_is_marked_at_once(autoscaling: Any) -> None:
    first, second, *_ = [instance["InstanceId"] for instance in instances(autoscaling)]
    assert replacement.mark_unhealthy(first, autoscaling) == f"marked {first} unhealthy; {GROUP} replaces it"
    assert replacement.mark_unhealthy(first, autoscaling) == f"{first} is marked unhealthy; {GROUP} replaces it"
    line = replacement.mark_unhealthy(second, autoscaling)
    assert line.endswith(f"yet: 1 instance of 5 in {GROUP} are, and at most 1 may be at a time")
    assert unhealthy(autoscaling) == [first]


def test_at_most_a_fifth_is_marked_unhealthy(autoscaling: Any) -> None:
    autoscaling.set_desired_capacity(AutoScalingGroupName=GROUP, DesiredCapacity=10)
    for instance in instances(autoscaling):
        replacement.mark_unhealthy(instance["InstanceId"], autoscaling)
    assert len(unhealthy(autoscaling)) == 2


def test_gpu_failure_marks_instance_and_ends_worker(
    autoscaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = instances(autoscaling)[0]["InstanceId"]
    file = tmp_path / "instance.json"
    file.write_text(json.dumps({"instance_id": own}))
    monkeypatch.setenv(INSTANCE_FILE_VARIABLE, str(file))
    monkeypatch.setenv("RAY_HEAD_HOST", "head.invalid")
    monkeypatch.setattr("sys.argv", ["ray-worker", "--num-gpus=1"])
    monkeypatch.setattr(gpus, "CHECK", ("sh", "-c", f"exit {gpus.GPU_FAULT}"))
    monkeypatch.setattr(worker, "RECHECK_SECONDS", 0.0)
    with pytest.raises(GpuError):
        worker.start()
    assert unhealthy(autoscaling) == [own]
    assert f"ray-worker: marked {own} unhealthy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("{}", "KeyError: 'instance_id'"),
        (NOT_OF_A_GROUP, "is not in an Auto Scaling group, which could replace it"),
        (NOT_OF_A_GROUP, "this instance could not be marked unhealthy (EndpointConnectionError: "),
    ],
)
def test_failed_replacement_costs_one_line(
    autoscaling: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    cause: str,
) -> None:
    file = tmp_path / "instance.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(INSTANCE_FILE_VARIABLE, str(file))
    if "Endpoint" in cause:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    replacement.request()
    assert re.fullmatch(rf"ray-worker: .*{re.escape(cause)}.*\n", capsys.readouterr().err)
    assert not unhealthy(autoscaling)


def test_no_replacement_outside_ec2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(INSTANCE_FILE_VARIABLE, raising=False)
    replacement.request()
    assert not capsys.readouterr().err


def test_mark_applies_within_the_grace_period() -> None:
    asked: list[dict[str, Any]] = []

    class Service:
        """EC2 Auto Scaling; moto ignores the grace period."""

        def describe_auto_scaling_instances(self, **_: Any) -> Any:
            return {"AutoScalingInstances": [{"AutoScalingGroupName": GROUP}]}

        def describe_auto_scaling_groups(self, **_: Any) -> Any:
            return {"AutoScalingGroups": [{"Instances": [{"InstanceId": "i-1", "HealthStatus": "Healthy"}]}]}

        def set_instance_health(self, **given: Any) -> None:
            asked.append(given)

    replacement.mark_unhealthy("i-1", Service())
    assert asked == [{"InstanceId": "i-1", "HealthStatus": "Unhealthy", "ShouldRespectGracePeriod": False}]
