import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import AuthenticationError

from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.tracking.cost import InstanceKind
from tests.lazy import Lazy
from tests.run_folders import Clock
from tests.waiting import LIMIT_SECONDS

COMMAND_NAME = "ray-on-ecs"

ray_cluster = Lazy("ray_on_ecs.run.ray_cluster")

HEAD = {"CPU": 0.0, "memory": 1e9}
G5_XLARGE = {"CPU": 4.0, "GPU": 1.0}
ON_A_GPU = (1, True, 4)  # an allocation of one worker


def test_cluster_that_refuses_the_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise AuthenticationError("Authentication token is missing or incorrect")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(ray_cluster, "_check_reachable", lambda address: None)
    monkeypatch.setattr(ray_cluster.ray, "init", refuse)
    with pytest.raises(UsageError, match="RAY_AUTH_TOKEN"):
        ray_cluster.connect()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "a..b", "[::1]", "x" * 300])
def test_address_where_nothing_listens_is_named(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"{host}:9")
    with pytest.raises(ResourceError, match=r"RAY_ADDRESS: nothing listens at .* by ray-on-ecs run --local"):
        ray_cluster.connect()


def refuse_to_ask(bundles: list[dict[str, float]]) -> None:
    raise AssertionError(f"instances would be started for {bundles}")


def test_free_resources_are_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "placement_group", refuse_to_ask)
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [HEAD, G5_XLARGE])
    assert ray_cluster.wait_for_workers(RunConfig(), 60) == WorkerAllocation(*ON_A_GPU)


@pytest.mark.parametrize(("seconds", "waits"), [(60.0, True), (0.0, False)])
def test_run_is_shown_as_waiting_if_it_waits(monkeypatch: pytest.MonkeyPatch, seconds: float, waits: bool) -> None:
    for name in ("placement_group", "remove_placement_group", "failover_of"):
        monkeypatch.setattr(ray_cluster, name, lambda *given: None)
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [HEAD])
    monkeypatch.setattr(ray_cluster, "time", Clock())
    waiting = Mock(side_effect=nullcontext)
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(), seconds, waiting)
    assert waiting.called == waits


def test_run_without_wait_requests_no_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "placement_group", refuse_to_ask)
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [HEAD])
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(), 0)


@pytest.fixture
def nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of only a head, without new nodes."""
    monkeypatch.setattr(ray_cluster, "_pending_placement_group", lambda config: nullcontext())
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: [HEAD])
    monkeypatch.setattr(ray_cluster, "time", Clock())


class Capacity:
    """A watch that finds the shortage at its first look."""

    def __init__(self) -> None:
        self.shortage = ""
        self.looks = 0

    def look_if_due(self) -> None:
        self.looks += 1
        self.shortage = "EC2 has no g5.xlarge [at all]"


@pytest.mark.usefixtures("nothing_to_join")
def test_expired_wait_names_the_missing_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "failover_of", lambda *given: Capacity())
    with pytest.raises(ResourceError) as error:
        ray_cluster.wait_for_workers(RunConfig(), 0.3)
    assert str(error.value) == (
        "the run needs a GPU or a CPU for each worker, but the cluster has 1 node with 0 CPUs and 0 GPUs, after a wait "
        "of 0 s; EC2 has no g5.xlarge [at all]"
    )


@pytest.mark.usefixtures("nothing_to_join")
def test_waiting_job_logs_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(), 0.05)
    line = "ray-on-ecs: waiting up to 0 s for more nodes: the cluster has 1 node with 0 CPUs and 0 GPUs\n"
    assert capsys.readouterr().out == line


@pytest.mark.usefixtures("nothing_to_join")
def test_joined_workers_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = Capacity()
    monkeypatch.setattr(ray_cluster, "failover_of", lambda *given: capacity)
    seen = iter([[HEAD], [HEAD], [HEAD, G5_XLARGE]])
    monkeypatch.setattr(ray_cluster, "_nodes", lambda: next(seen))
    assert ray_cluster.wait_for_workers(RunConfig(), 60) == WorkerAllocation(*ON_A_GPU)
    assert capacity.looks == 1, "a look may end instances, so none is allowed before the run"


@pytest.mark.usefixtures("nothing_to_join")
def test_wait_without_a_stack_calls_no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE, raising=False)
    with pytest.raises(ResourceError, match=r"; ask for fewer workers, another --device, or add nodes$"):
        ray_cluster.wait_for_workers(RunConfig(), 0.05)


@pytest.mark.parametrize(
    ("num_workers", "use_gpu", "gpus", "needed"),
    [(4, True, 1, 4), (4, True, 4, 1), (5, True, 4, 2), (8, False, 4, 1)],
    ids=["a GPU each", "four GPUs", "rounded up", "without GPUs"],
)
def test_number_of_instances_for_the_workers(num_workers: int, use_gpu: bool, gpus: int, needed: int) -> None:
    workers: Any = {"gpus": gpus}
    assert ray_cluster._instances_needed(num_workers, use_gpu, workers) == needed


@pytest.mark.usefixtures("nothing_to_join")
@pytest.mark.parametrize(("given", "workers"), [({}, 1), ({"num_workers": 4}, 4), ({"num_workers": "2:4"}, 2)])
def test_wait_watches_for_the_fewest_workers(
    given: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ray_cluster, "failover_of", lambda *needs: asked.append(needs))
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(**given), 0.05)
    assert asked == [(workers, True)]


OWN_JOB, OTHER_JOB = "01000000", "02000000"
LABELS = {"instance-type": "g5.xlarge", "ray.io/market-type": "spot", "ray.io/node-id": "a"}


class Cluster:
    """Ray's state of a cluster with a head, a CPU worker without GPUs, and two workers, a and b."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = {"head": HEAD, "cpu-worker": {"CPU": 8.0}, "a": dict(G5_XLARGE), "b": dict(G5_XLARGE)}
        self.nodes = [
            {"NodeID": name, "Alive": True, "Resources": dict(total), "Labels": LABELS if name == "a" else {}}
            for name, total in self.free.items()
        ]
        self.groups: dict[str, Any] = {}
        context = SimpleNamespace(get_job_id=lambda: OWN_JOB)
        monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: self.nodes)
        monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray_cluster, "available_resources_per_node", lambda: self.free)
        monkeypatch.setattr(ray_cluster, "placement_group_table", lambda: self.groups)

    def place(self, job: str, *nodes: str) -> None:
        """Place a group of a job, a CPU and a GPU on each node; without nodes it waits."""
        bundle = {"CPU": 1.0, "GPU": 1.0}
        self.groups[f"6885d6fc52fa502fbbe7eea350cf{job}"] = {
            "state": "CREATED" if nodes else "PENDING",
            "bundles": dict.fromkeys(range(len(nodes) or 1), bundle),
            "bundles_to_node_id": dict(enumerate(nodes or [""])),
        }
        for node in nodes:
            self.use(node, bundle)

    def use(self, node: str, resources: dict[str, float]) -> None:
        for kind, number in resources.items():
            self.free[node][kind] -= number


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({}, {}),
        ({"device": "cpu", "num_workers": 8}, {"ray.io/node-group": "!cpu-workers"}),
        ({"device": "cpu", "num_workers": 9}, {}),
    ],
)
def test_cpu_workers_are_reserved_for_data(cluster: Cluster, settings: dict[str, Any], labels: dict[str, str]) -> None:
    cluster.nodes[1]["Labels"] = {"ray.io/node-group": "cpu-workers"}
    allocation = ray_cluster.wait_for_workers(RunConfig(**settings), 0)
    assert allocation.node_labels == labels, "a pipeline would wait for a CPU forever"


def test_moments_of_nodes_are_labels_and_joins(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in cluster.nodes:
        node["Labels"] = {"launched": "100.000", "booted": "soon"} if node["NodeID"] == "a" else {"code": "1234"}
    monkeypatch.setattr(ray_cluster, "join_times", lambda: {"a": 150.5})
    assert ray_cluster.moments_of({"a"}) == [{"launched": 100.0, "joined": 150.5}]
    assert ray_cluster.moments_of({"b"}) == [{}]
    assert ray_cluster.moments_of({"of another cluster"}) == [{}]


@pytest.mark.parametrize("error", [RuntimeError(), OSError(), ValueError(), AttributeError()])
def test_moments_of_nodes_are_unknown_without_ray(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(ray_cluster, "join_times", Mock(side_effect=error))
    assert ray_cluster.moments_of(["a", "b"]) == [{}, {}]


def test_gpus_waiting_only_for_this_job_are_idle(cluster: Cluster) -> None:
    assert ray_cluster.gpus_are_idle()
    cluster.place(OTHER_JOB)
    assert ray_cluster.gpus_are_idle(), "a waiting group holds no GPU"
    cluster.place(OWN_JOB, "a")
    assert ray_cluster.gpus_are_idle(), "GPUs of this job wait with it"
    cluster.use("cpu-worker", {"CPU": 4.0})
    assert ray_cluster.gpus_are_idle(), "a node without GPUs does not move with the workers"


@pytest.mark.parametrize("used", [{"GPU": 1.0}, {"GPU": 0.5}, {"CPU": 1.0}])
def test_gpus_on_shared_nodes_are_not_idle(used: dict[str, float], cluster: Cluster) -> None:
    cluster.place(OWN_JOB, "a")
    cluster.use("b", used)
    assert not ray_cluster.gpus_are_idle(), "its work would be lost"


def test_gpus_of_another_job_are_not_idle(cluster: Cluster) -> None:
    cluster.place(OTHER_JOB, "a")
    assert not ray_cluster.gpus_are_idle()


def test_only_other_jobs_with_gpu_requests_wait(cluster: Cluster) -> None:
    cluster.place(OWN_JOB)
    cluster.place(OTHER_JOB, "a")
    assert not ray_cluster.other_jobs_wait(), "one group has its place, the other belongs to this job"
    cluster.place(OTHER_JOB)
    assert ray_cluster.other_jobs_wait()
    for group in cluster.groups.values():
        group["bundles"] = {index: {"CPU": 1.0} for index in group["bundles"]}
    assert not ray_cluster.other_jobs_wait(), "they wait for CPUs"


def test_instances_count_once_by_node_labels(cluster: Cluster) -> None:
    assert ray_cluster.instances_with_workers() == {}
    cluster.place(OTHER_JOB, "b")
    cluster.place(OWN_JOB, "a", "a", "b")
    assert ray_cluster.instances_with_workers() == {InstanceKind("g5.xlarge", "spot"): 1, InstanceKind(): 1}


def test_unreachable_cluster_has_no_instances(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Ray has not been started")

    monkeypatch.setattr(ray_cluster.ray, "nodes", fail)
    assert ray_cluster.instances_with_workers() == {}


def test_only_a_job_without_workers_waits(cluster: Cluster) -> None:
    assert ray_cluster._is_waiting(), "an elastic run requests only free places"
    cluster.place(OWN_JOB)
    assert ray_cluster._is_waiting()
    cluster.place(OWN_JOB, "a", "b")
    assert not ray_cluster._is_waiting()
    next(iter(cluster.groups.values()))["state"] = "RESCHEDULING"
    assert not ray_cluster._is_waiting(), "the remaining workers may be saving a checkpoint"


def test_wait_for_lost_workers_checks_ec2_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([False, True, True, False, *[True] * 20])
    over = threading.Event()
    watches: list[Capacity] = []

    def is_waiting() -> bool:
        found = next(waits, None)
        if found is None:
            over.set()
        return bool(found)

    def watch(num_workers: int, use_gpu: bool) -> Capacity:
        assert (num_workers, use_gpu) == (2, True)
        watches.append(Capacity())
        return watches[-1]

    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, "cluster-info")
    monkeypatch.setattr(ray_cluster, "_is_waiting", is_waiting)
    monkeypatch.setattr(ray_cluster, "failover_of", watch)
    monkeypatch.setattr(ray_cluster, "WATCH_SECONDS", 0.01)
    with ray_cluster.zone_failover(WorkerAllocation(4, True, 4, limits=(2, 4))):
        assert over.wait(LIMIT_SECONDS)
    first, second = watches
    assert second.looks > 0, "the next wait may try each zone again"
    assert second.looks > first.looks, "starting workers are not a shortage"
