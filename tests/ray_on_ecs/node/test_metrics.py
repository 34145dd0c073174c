"""The head publishes what the cluster has and needs, and is not harmed when CloudWatch can't be reached."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from botocore.exceptions import BotoCoreError

from ray_on_ecs import cluster_info
from ray_on_ecs.contract import (
    CLOUDWATCH_NAMESPACE_VARIABLE,
    CLUSTER_INFO_VARIABLE,
    HEAD_IDLE,
    HEAD_REQUESTED,
    KIND_DIMENSION,
)
from ray_on_ecs.jobs.documents import Wake
from ray_on_ecs.node import api, metrics, ports, resource_state
from ray_on_ecs.node.idle import Idle
from ray_on_ecs.node.resource_state import Node, ResourceState
from ray_on_ecs.pools import ZONE_LABEL, Condition, Request
from tests.aws import REGION, metric_totals
from tests.ray_on_ecs.node.conftest import Gcs, Head
from tests.ray_on_ecs.node.test_process import fake_ray
from tests.worker_pools import cpu_group, node_group, workers

COMMAND_NAME = "ray-head"

COUNTS = {"GPUs", "GPUsRequested", "GPUsUsed", "GPUNodesInUse", "RunProgress"}


def node(*gpus: dict[str, Any], state: str = "ALIVE") -> dict[str, Any]:
    """A node as Ray 2.60's dashboard shows it: ray/dashboard/modules/reporter/reporter_models.py."""
    return {"hostname": "worker", "raylet": {"state": state, "nodeId": "0" * 56}, "gpus": list(gpus)}


def gpu(busy: int | None, used: int, total: int = 23028) -> dict[str, Any]:
    names = {"index": 0, "name": "NVIDIA A10G", "uuid": "GPU-0", "processesPids": []}
    return {**names, "utilizationGpu": busy, "memoryUsed": used, "memoryTotal": total, "powerMw": None}


def summary(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"result": True, "msg": "Node summary fetched.", "data": {"summary": list(nodes)}}


def used_node(*, gpus: float = 0, cpus: float = 8, used: bool = True, **labels: str) -> Node:
    """A node that is used wholly or not at all; labels are `pool` and `zone`."""
    names = {"pool": "ray.io/node-group", "zone": ZONE_LABEL}
    total = {name: amount for name, amount in (("GPU", gpus), ("CPU", cpus)) if amount}
    return Node(
        labels={names[key]: value for key, value in labels.items()}, total=total, available={} if used else total
    )


def set_state(monkeypatch: pytest.MonkeyPatch, state: ResourceState) -> None:
    """Have the GCS, as long as it answers, tell this state."""
    monkeypatch.setattr(resource_state, "read", lambda gcs: api.check_gcs(gcs) or state)


@pytest.fixture
def ray(head: Head, gcs_server: Gcs, monkeypatch: pytest.MonkeyPatch) -> Head:
    """A head whose cluster has three GPUs and needs five, and a worker with eight CPUs, which needs ten."""
    nodes = [used_node(gpus=1), used_node(gpus=2), used_node(pool="cpu-workers"), used_node(cpus=0)]
    pending = ((Request({"GPU": 1}), 2), (Request({"CPU": 2}), 1))
    state = ResourceState(nodes=tuple(nodes), pending=pending)
    set_state(monkeypatch, state)
    monkeypatch.setattr(metrics, "read_cluster_info", lambda: workers(workers=node_group(max=9)))
    head.answer = summary(node(), node(gpu(97, 11514)), node(gpu(3, 11514), gpu(97, 23028)))
    return head


def test_gpu_metrics_are_published(ray: Head, cloudwatch: Any) -> None:
    metrics.publish("head-a")
    assert metric_totals(cloudwatch, "head-a") == {
        "GPUs": (1, 3, "Count"),
        "GPUsRequested": (1, 5, "Count"),
        "GPUsUsed": (1, 3, "Count"),
        "GPUNodesInUse": (1, 2, "Count"),
        "RunProgress": (1, 0, "Count"),
        "GPUUtilization": (3, 97 + 3 + 97, "Percent"),
        "GPUMemoryUtilization": (3, 50 + 50 + 100, "Percent"),
    }


def test_a_metric_has_no_dimension(ray: Head, cloudwatch: Any) -> None:
    metrics.publish("head-b")
    assert all(not metric["Dimensions"] for metric in cloudwatch.list_metrics(Namespace="head-b")["Metrics"])


def test_cpu_metrics_are_published_with_cpu_workers(
    ray: Head, cloudwatch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = workers(workers=node_group(max=9), cpu_workers=cpu_group())
    monkeypatch.setattr(metrics, "read_cluster_info", lambda: info)
    metrics.publish("head-f")
    published = metric_totals(cloudwatch, "head-f")
    expected = {"CPUs": (1, 8, "Count"), "CPUsRequested": (1, 10, "Count"), "CPUsUsed": (1, 8, "Count")}
    expected["CPUNodesInUse"] = (1, 1, "Count")
    assert {name: published.get(name) for name in expected} == expected


@pytest.fixture
def by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack with a default pool in two zones, H100s that are used, and CPU workers of two pools."""
    info = workers(
        workers=node_group(),
        workers_b=node_group(zone="us-west-2b"),
        cpu_workers=cpu_group(),
        h100_workers=node_group("h100", "p5.48xlarge", units=8),
        big_workers=cpu_group("big", units=64),
    )
    nodes = (
        used_node(gpus=1, zone="us-west-2a"),
        used_node(gpus=8, pool="h100"),
        used_node(gpus=8, pool="h100", used=False),
        used_node(cpus=64, pool="big"),
    )
    in_b = Condition(ZONE_LABEL, ("us-west-2b",))
    state = ResourceState(nodes=nodes, pending=((Request({"GPU": 1}, (in_b,)), 9),))
    set_state(monkeypatch, state)
    monkeypatch.setattr(metrics, "read_cluster_info", lambda: info)


@pytest.fixture
def calls(cloudwatch: Any) -> Iterator[list[list[dict[str, Any]]]]:
    """The metrics of each call that the head makes."""
    sent: list[list[dict[str, Any]]] = []

    def note(params: dict[str, Any], **_: Any) -> None:
        sent.append(params["MetricData"])
        assert not any("Timestamp" in datum for datum in params["MetricData"]), "clocks may be wrong"

    events = metrics.client("cloudwatch", **metrics.LIMITS).meta.events
    events.register("before-parameter-build.cloudwatch.PutMetricData", note)
    yield sent
    events.unregister("before-parameter-build.cloudwatch.PutMetricData", note)


def values(call: list[dict[str, Any]]) -> dict[str, float]:
    """The first value of each metric of a call."""
    return {datum["MetricName"]: datum["Values"][0] for datum in call}


def test_each_kind_has_its_metrics(ray: Head, by_kind: None, calls: list[list[dict[str, Any]]]) -> None:
    ray.answer = summary(node())
    metrics.publish("head-i")
    published: dict[str, dict[str, float]] = {}
    for datum in itertools.chain(*calls):
        dimensions = {one["Name"]: one["Value"] for one in datum["Dimensions"]}
        assert dimensions.keys() <= {KIND_DIMENSION}
        [value] = datum["Values"]
        published.setdefault(dimensions.get(KIND_DIMENSION, ""), {})[datum["MetricName"]] = value
    assert published == {
        "": {
            **{"GPUs": 1, "GPUsRequested": 1, "GPUsUsed": 1, "GPUNodesInUse": 1, "RunProgress": 0},
            **{"CPUs": 0, "CPUsRequested": 0, "CPUsUsed": 0, "CPUNodesInUse": 0},
        },
        # The pool's maximum is four, and one is in use in the other zone.
        "workers-b": {"GPUs": 0, "GPUsRequested": 3, "GPUsUsed": 0, "GPUNodesInUse": 0, "RunProgress": 0},
        "h100-workers": {"GPUs": 16, "GPUsRequested": 8, "GPUsUsed": 8, "GPUNodesInUse": 1, "RunProgress": 0},
        "big-workers": {"CPUs": 64, "CPUsRequested": 64, "CPUsUsed": 64, "CPUNodesInUse": 1},
    }


def test_scaling_metrics_without_gpu_utilization(ray: Head, cloudwatch: Any) -> None:
    ray.answer = {"of another": "Ray"}
    with pytest.raises(KeyError):
        metrics.publish("head-d")
    assert set(metric_totals(cloudwatch, "head-d")) == COUNTS


def test_a_gcs_that_does_not_answer_publishes_nothing(ray: Head, gcs_server: Gcs, cloudwatch: Any) -> None:
    gcs_server.error = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(OSError, match=r"doesn't answer at .* \(UNAVAILABLE"):
        metrics.publish("head-h")
    assert metric_totals(cloudwatch, "head-h") == {}


@pytest.fixture
def idle() -> Idle:
    """The idle time of a head that was busy an hour ago."""
    idle_time = Idle([], lambda: time.monotonic() - 3600)
    idle_time._now = time.monotonic
    return idle_time


def test_idle_time_is_in_the_first_call(ray: Head, idle: Idle, calls: list[list[dict[str, Any]]]) -> None:
    metrics.publish("head-m", idle)
    first, second = map(values, calls)
    assert HEAD_IDLE not in second
    assert first.keys() == {*COUNTS, HEAD_IDLE}, "a busy head requests itself"
    assert first[HEAD_IDLE] == pytest.approx(60, abs=1)
    calls.clear()
    metrics.publish("head-m")
    assert not any(HEAD_IDLE in values(call) for call in calls), "it does not sleep"


def silence_gcs(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    gcs.error = grpc.StatusCode.UNAVAILABLE


def fail_demand(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_state, "read", lambda gcs: {}["nodes"])


def hang_gcs(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.check_gcs, "__defaults__", (0.1, None))
    monkeypatch.setattr(ports, "own_gcs", lambda: "192.0.2.1:6379")


def without_info(parameter: str) -> Callable[[Gcs, pytest.MonkeyPatch], None]:
    """Return a fault with which AWS has never told the stack's workers."""

    def begin(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cluster_info, "_answers", {})
        monkeypatch.setattr(metrics, "read_cluster_info", cluster_info.read_cluster_info)
        monkeypatch.setenv(CLUSTER_INFO_VARIABLE, parameter)

    return begin


@pytest.mark.parametrize(
    "fault",
    [
        silence_gcs,
        fail_demand,
        hang_gcs,
        pytest.param(without_info("missing"), id="no such parameter"),
        pytest.param(without_info("not/a/name//"), id="refused"),
        pytest.param(without_info(""), id="outside a stack"),
    ],
)
def test_head_that_does_not_know_its_demand_is_busy(
    ray: Head,
    gcs_server: Gcs,
    idle: Idle,
    calls: list[list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Gcs, pytest.MonkeyPatch], None],
) -> None:
    fault(gcs_server, monkeypatch)
    with pytest.raises((OSError, LookupError)):
        metrics.publish("head-n", idle)
    assert [values(call) for call in calls] == [{HEAD_IDLE: 0, HEAD_REQUESTED: 1}]


def test_dashboard_that_does_not_answer_keeps_the_idle_time(
    ray: Head, idle: Idle, calls: list[list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is published before, as the metrics that scale are; the thread of the idle time asks the dashboard, too."""
    monkeypatch.setattr(ports, "DASHBOARD", 9)
    with pytest.raises(OSError, match="Connection refused"):
        metrics.publish("head-o", idle)
    assert values(calls[0]).keys() == {*COUNTS, HEAD_IDLE}


def test_request_for_the_next_head_is_a_metric_of_seconds(cloudwatch: Any) -> None:
    metrics.request_head(Wake("ray-on-ecs/head-p", REGION, 60))
    assert metric_totals(cloudwatch, "ray-on-ecs/head-p") == {HEAD_REQUESTED: (1, 1, "None")}
    assert metrics.head_requested()["StorageResolution"] == 1


def test_gpu_without_utilization_is_skipped() -> None:
    [busy, full] = metrics.utilization(summary(node(gpu(None, 0), gpu(-1, 0), gpu(0, 0))))
    assert (busy["Values"], busy["Counts"]) == ([0], [1])
    assert (full["Values"], full["Counts"]) == ([0], [3])


def test_a_dead_node_is_left_out() -> None:
    assert metrics.utilization(summary(node(gpu(50, 50), state="DEAD"))) == []


class Enough(BaseException):
    """Ends a loop that has no end."""


def outcomes(*causes: str | None) -> Callable[[], None]:
    """Return work that fails for these causes, one per call, and then ends the loop."""
    left: Iterator[str | None] = iter(causes)

    def work() -> None:
        cause = next(left, Enough())
        if isinstance(cause, Enough):
            raise cause
        if cause:
            raise OSError(cause)

    return work


@pytest.mark.parametrize(
    ("causes", "lines"),
    [
        ([None, None], []),
        (["silent", "silent", "mute"], ["has failed (OSError: silent)"]),
        (["silent", "silent", None, None], ["has failed (OSError: silent)", "works again"]),
        (["a", None, "b"], ["has failed (OSError: a)", "works again", "has failed (OSError: b)"]),
        (["several\nlines"], ["has failed (OSError: several lines)"]),
    ],
)
def test_failure_and_recovery_cost_one_line_each(
    causes: list[str | None], lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "PUBLISH_SECONDS", 0.0)
    with pytest.raises(Enough):
        metrics.repeat(outcomes(*causes))
    errors = [line.removesuffix("; trying again") for line in capsys.readouterr().err.splitlines()]
    assert errors == [f"ray-head: metrics: the publication {line}" for line in lines]


class Clock:
    """Time that passes only in a sleep."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_slow_publishing_keeps_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = Clock(), []
    monkeypatch.setattr(metrics, "time", clock)

    def work() -> None:
        times.append(clock.now - Clock.now)
        clock.sleep(20)
        if len(times) == 4:
            raise Enough

    with pytest.raises(Enough):
        metrics.repeat(work)
    assert times == [60, 120, 180, 240]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect to the endpoint URL"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
    ],
)
def test_aws_errors_are_raised(
    ray: Head, cloudwatch: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BotoCoreError, match=message):
        metrics.publish("head-e")


HEAD = """
from ray_on_ecs.node import head, metrics, ports
ports.GCS = 9
head.RAY = ["ray"]
metrics.PUBLISH_SECONDS = 0.1
head.main()
"""


def test_head_runs_without_cloudwatch(tmp_path: Path) -> None:
    # Ray runs until the head has said something.
    ray = fake_ray(tmp_path, "#!/bin/sh\nfor _ in $(seq 600); do [ -s said ] && exit 7; sleep 0.1; done\n")
    with (tmp_path / "said").open("w") as log:
        status = subprocess.call(
            [sys.executable, "-c", HEAD],
            env={**ray, "CLOUDWATCH_NAMESPACE": "mine", "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=tmp_path,
            stderr=log,
            timeout=180,
        )
    assert status == 7
    [line] = (tmp_path / "said").read_text().splitlines()
    assert line.startswith("ray-head: metrics: the publication has failed")


@pytest.mark.parametrize(("namespace", "threads"), [("mine", 1), ("", 0)], ids=["a namespace", "none"])
def test_without_a_namespace_nothing_is_published(
    monkeypatch: pytest.MonkeyPatch, namespace: str, threads: int
) -> None:
    begun: list[object] = []
    monkeypatch.setenv(CLOUDWATCH_NAMESPACE_VARIABLE, namespace)
    monkeypatch.setattr(metrics.threading.Thread, "start", lambda thread: begun.append(thread))
    metrics.start()
    assert len(begun) == threads
