import socket
from contextlib import nullcontext
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import AuthenticationError

from ray_on_ecs import pools
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.tracking.cost import InstanceKind
from tests.lazy import Lazy
from tests.run_folders import Clock

COMMAND_NAME = "ray-on-ecs"

ray_cluster = Lazy("ray_on_ecs.run.ray_cluster")

HEAD = {"CPU": 0.0, "memory": 1e9}
G5_XLARGE = {"CPU": 4.0, "GPU": 1.0}


def test_cluster_that_refuses_the_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=AuthenticationError("Authentication token is missing or incorrect"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(ray_cluster, "_check_reachable", lambda address: None)
    monkeypatch.setattr(ray_cluster.ray, "init", refuse)
    with pytest.raises(UsageError, match="RAY_AUTH_TOKEN"):
        ray_cluster.connect()


def test_token_that_the_gcs_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_connect_to", lambda address: None)
    monkeypatch.setattr(ray_cluster.api, "check_gcs", Mock(side_effect=ray_cluster.api.TokenError))
    with pytest.raises(UsageError, match="RAY_AUTH_TOKEN"):
        ray_cluster._check_reachable("127.0.0.1:6379")


def test_busy_gcs_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = ray_cluster.api.AnswerError("127.0.0.1:6379", "UNAVAILABLE", is_passing=True)
    check = Mock(side_effect=[busy, busy, None])
    monkeypatch.setattr(ray_cluster, "BUSY_POLL_SECONDS", 0.0)
    monkeypatch.setattr(ray_cluster, "_connect_to", lambda address: None)
    monkeypatch.setattr(ray_cluster.api, "check_gcs", check)
    ray_cluster._check_reachable("127.0.0.1:6379")
    assert check.call_count == 3


@pytest.mark.parametrize(
    "address", ["127.0.0.1:9", "no-such-host.invalid:9", "a..b:9", "[::1]:9", f"{'x' * 300}:9", "auto"]
)
def test_address_where_nothing_listens_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ResourceError, match=r"RAY_ADDRESS: no Ray cluster answers at .* by ray-on-ecs run --local"):
        ray_cluster.connect()


def test_server_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "BUSY_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ResourceError, match=rf"no Ray cluster answers at '{address}' \(DEADLINE_EXCEEDED, .*"):
            ray_cluster.connect()


def nodes(*resources: dict[str, float], **labels: str) -> list[Any]:
    """Ray's table of nodes with these resources."""
    names = {name.replace("_", "-"): value for name, value in labels.items()}
    return [
        {"NodeID": str(index), "Alive": True, "Resources": each, "Labels": {f"ray.io/{k}": v for k, v in names.items()}}
        for index, each in enumerate(resources)
    ]


P5 = nodes({"CPU": 192.0, "GPU": 8.0}, node_group="h100", availability_zone="us-west-2c")


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A cluster of only a head, without new nodes; returns the requests."""
    made: list[Any] = []

    def request(bundles: list[Any], bundle_label_selector: Any = None) -> object:
        made.append((bundles, bundle_label_selector))
        return object()

    monkeypatch.setattr(ray_cluster, "placement_group", request)
    monkeypatch.setattr(ray_cluster, "placement_group_table", lambda group: {"state": "CREATED"})
    monkeypatch.setattr(ray_cluster, "remove_placement_group", lambda group: made.append("removed"))
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: nodes(HEAD))
    monkeypatch.setattr(ray_cluster, "time", Clock())
    return made


def test_free_resources_are_not_requested(requested: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: nodes(HEAD, G5_XLARGE))
    assert ray_cluster.wait_for_workers(RunConfig(), 60) == WorkerAllocation(1, True, 4)
    assert requested == []


@pytest.mark.parametrize(("seconds", "waits"), [(60.0, True), (0.0, False)])
def test_run_is_shown_as_waiting_if_it_waits(requested: list[Any], seconds: float, waits: bool) -> None:
    waiting = Mock(side_effect=nullcontext)
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(), seconds, waiting)
    assert waiting.called == bool(requested) == waits


@pytest.mark.usefixtures("requested")
def test_wait_without_a_stack_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE, raising=False)
    with pytest.raises(ResourceError, match=r"; ask for fewer workers, another --device, or add nodes$"):
        ray_cluster.wait_for_workers(RunConfig(), 0.05)
    line = "ray-on-ecs: waiting up to 0 s for more nodes: the cluster has 1 node with 0 CPUs and 0 GPUs\n"
    assert capsys.readouterr().out == line


def group(pool: str, gpu: str, zone: str, **changed: Any) -> Any:
    return {"pool": pool, "gpu": gpu, "zones": [zone], "types": ["g5.xlarge"], "units": 1, "max": 4, **changed}


STACK: Any = {
    "prices": None,
    "groups": {
        "workers": group("default", "A10G", "us-west-2a"),
        "workers-b": group("default", "A10G", "us-west-2b"),
        "cpu-workers": group("cpu", "", "us-west-2a", units=8),
        "h100-workers": group("h100", "H100", "us-west-2c", units=8),
    },
}


class Choice:
    """A choice of a node group that moves when a test says so."""

    def __init__(self, *kinds: str, at_look: int = 0, times_out: bool = False) -> None:
        self.kinds, self.at_look, self.times_out = list(kinds), at_look, times_out
        self.looks, self.info, self.line = 0, STACK, "EC2 has none; tried both"
        self.is_before_start = False

    @property
    def kind(self) -> str:
        return self.kinds[0]

    @property
    def labels(self) -> dict[str, str]:
        return pools.selector(self.kind, STACK)

    @property
    def uses_gpus(self) -> bool:
        return self.kind != "cpu-workers"

    def look_if_due(self) -> None:
        self.looks += 1
        if self.looks == self.at_look:
            self.kinds.pop(0)

    def move_on(self, seconds: float) -> bool:
        moves = self.times_out and len(self.kinds) > 1
        if moves:
            self.kinds.pop(0)
        return moves


IN_A = {"ray.io/node-group": "!in(cpu-workers,h100)", "ray.io/availability-zone": "us-west-2a"}
IN_B = {**IN_A, "ray.io/availability-zone": "us-west-2b"}
OF_H100 = {"ray.io/node-group": "h100"}
ON_GPU = {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize("choice", [Choice("workers", "h100-workers", at_look=2), Choice("workers", "h100-workers")])
def test_request_moves_with_the_choice(requested: list[Any], choice: Any) -> None:
    choice.times_out = not choice.at_look
    with pytest.raises(ResourceError) as error:
        ray_cluster.wait_for_workers(RunConfig(num_workers=2), 60, choice=choice)
    assert requested == [([ON_GPU] * 2, [IN_A] * 2), "removed", ([ON_GPU] * 2, [OF_H100] * 2), "removed"]
    assert str(error.value).endswith("; EC2 has none; tried both")


def test_group_with_room_is_not_requested(requested: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: P5)
    found = ray_cluster.wait_for_workers(RunConfig(), 60, choice=Choice("workers", "h100-workers", at_look=2))
    assert found.node_labels == OF_H100
    assert requested == [([ON_GPU], [IN_A]), "removed"]


@pytest.mark.parametrize(
    ("states", "seconds"),
    [
        (["PENDING", "PENDING", "PREPARED", "CREATED"], 0.15),
        (["CREATED"], 0.0),
        ([None], 2.0),
        (["PENDING"], 2.0),
        (["RESCHEDULING", "CREATED"], 0.05),
    ],
    ids=str,
)
def test_group_keeps_its_request_until_ray_has_placed_it(
    requested: list[Any], monkeypatch: pytest.MonkeyPatch, states: list[Any], seconds: float
) -> None:
    def table(group: Any) -> Any:
        assert requested == [([ON_GPU], None)], "it is removed while Ray places it"
        return {"state": states[0] if len(states) == 1 else states.pop(0)}

    joins = ray_cluster.time.monotonic() + ray_cluster.POLL_SECONDS

    def alive() -> list[Any]:
        return nodes(G5_XLARGE if ray_cluster.time.monotonic() >= joins else HEAD)

    monkeypatch.setattr(ray_cluster, "alive_nodes", alive)
    monkeypatch.setattr(ray_cluster, "placement_group_table", table)
    assert ray_cluster.wait_for_workers(RunConfig(), 60).num_workers == 1
    assert ray_cluster.time.monotonic() - joins == pytest.approx(seconds, abs=0.06)
    assert requested[-1] == "removed"


class Reserved(Choice):
    """A choice of a pool whose reservation starts at a time, unless it is cancelled before."""

    def __init__(self, starts_at: float, cancelled_at: float = 1e9) -> None:
        super().__init__("h100-workers")
        self.starts_at, self.cancelled_at = starts_at, cancelled_at

    def look_if_due(self) -> None:
        now = ray_cluster.time.monotonic()
        self.is_before_start = now < min(self.starts_at, self.cancelled_at)


@pytest.mark.usefixtures("requested")
@pytest.mark.parametrize(
    ("choice", "end"),
    [
        (Reserved(starts_at=6000), 6060),
        (Reserved(starts_at=1030), 1090),
        (Reserved(starts_at=500), 1060),
        (Reserved(starts_at=1e9, cancelled_at=3000), 3060),
    ],
)
def test_wait_for_a_reservation_is_counted_from_its_start(choice: Any, end: float) -> None:
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(num_workers=2), 60, choice=choice)
    assert ray_cluster.time.monotonic() == pytest.approx(end, abs=4)


@pytest.mark.usefixtures("requested")
def test_only_nodes_of_the_chosen_group_count(monkeypatch: pytest.MonkeyPatch) -> None:
    here = nodes(G5_XLARGE, availability_zone="us-west-2b")
    cpu = nodes({"CPU": 8.0}, node_group="cpu-workers", availability_zone="us-west-2b")
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: [*here, *P5, *cpu])

    def found(kind: str, **settings: Any) -> Any:
        try:
            return ray_cluster.wait_for_workers(RunConfig(**settings), 0, choice=Choice(kind))
        except ResourceError:
            return None

    assert found("workers") is None
    assert found("workers-b") == WorkerAllocation(1, True, 4, node_labels=IN_B)
    assert found("workers-b", num_workers=2) is None
    assert found("h100-workers", gpu="H100") == WorkerAllocation(8, True, 24, node_labels=OF_H100)
    of_cpu = {"ray.io/node-group": "cpu-workers"}
    assert found("cpu-workers", pool="cpu") == WorkerAllocation(2, False, 4, node_labels=of_cpu)


@pytest.mark.usefixtures("requested")
def test_nodes_that_join_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([nodes(HEAD)] * 3 + [nodes(HEAD, G5_XLARGE, availability_zone="us-west-2a")] * 2)
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: next(seen))
    choice = Choice("workers")
    assert ray_cluster.wait_for_workers(RunConfig(), 60, choice=choice).num_workers == 1
    assert choice.looks == 1


def test_workers_stay_the_same_on_the_nodes_that_are_left(
    requested: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = nodes({"CPU": 8.0}, {"CPU": 8.0})
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: large[1:])
    before = WorkerAllocation(2, use_gpu=False, cpus_per_worker=8)
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(num_workers=2), 60, before=before)
    assert requested, "two workers of half the CPUs would be other workers"
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: large)
    assert ray_cluster.wait_for_workers(RunConfig(num_workers=2), 60, before=before) is before


@pytest.mark.usefixtures("requested")
def test_workers_of_a_changed_stack_are_allocated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    here = nodes(G5_XLARGE, availability_zone="us-west-2a")
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: [*here, *P5])
    before, config = WorkerAllocation(1, True, 2, node_labels={}), RunConfig(num_workers=1)
    for kind, cpus, labels in (("workers", 4, IN_A), ("h100-workers", 24, OF_H100)):
        found = ray_cluster.wait_for_workers(config, 0, choice=Choice(kind), before=before)
        assert found == WorkerAllocation(1, True, cpus, node_labels=labels)


@pytest.mark.usefixtures("requested")
def test_labels_that_change_during_the_wait_are_requested(requested: list[Any]) -> None:
    choice = Choice("workers", "workers-b", at_look=1)
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(num_workers=1), 60, choice=choice)
    assert [selector for _, selector in requested[::2]] == [[IN_A], [IN_B]]


@pytest.mark.usefixtures("requested")
def test_head_that_does_not_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Mock(side_effect=chain([RuntimeError("away")] * 3, repeat(nodes(G5_XLARGE))))
    monkeypatch.setattr(ray_cluster, "alive_nodes", there)
    monkeypatch.setattr(ray_cluster, "describe_nodes", lambda: "")
    assert ray_cluster.wait_for_workers(RunConfig(), 60).num_workers == 1


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


def test_run_without_a_stack_uses_any_node(cluster: Cluster) -> None:
    cluster.nodes[1]["Labels"] = {"ray.io/node-group": "of-kuberay"}
    assert ray_cluster.wait_for_workers(RunConfig(device="cpu", num_workers=9), 0).node_labels == {}


def test_run_spans_no_pools_if_these_are_not_known(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, "/ray/cluster-info")
    cluster.nodes[1]["Labels"] = {"ray.io/node-group": "cpu-workers"}
    cluster.nodes[2]["Labels"] = {"ray.io/node-group": "h100"}
    assert ray_cluster.wait_for_workers(RunConfig(), 0) == WorkerAllocation(
        1, True, 4, node_labels={"ray.io/node-group": "!in(cpu-workers,h100)"}
    )
    with pytest.raises(ResourceError):
        ray_cluster.wait_for_workers(RunConfig(num_workers=2), 0)
    cluster.nodes[1]["Labels"] = cluster.nodes[2]["Labels"] = {}
    assert ray_cluster.wait_for_workers(RunConfig(num_workers=2), 0).node_labels == {}


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


NEEDED = {
    "nothing there": (1, 0, 0, 0, 1),
    "a gang": (4, 0, 0, 0, 4),
    "a free node": (1, 1, 0, 0, 1),
    "a part of it": (2, 1, 0, 0, 2),
    "a node in use": (1, 1, 1, 0, 2),
    "one of three is free": (2, 3, 2, 0, 4),
    "in use by this job": (2, 2, 0, 2, 2),
    "up to the maximum": (4, 2, 1, 0, 4),
    "more than the maximum": (9, 0, 0, 0, 4),
}


@pytest.mark.parametrize(("workers", "joined", "in_use", "placed", "needed"), NEEDED.values(), ids=NEEDED)
def test_instances_that_others_use_are_needed_too(
    cluster: Cluster, workers: int, joined: int, in_use: int, placed: int, needed: int
) -> None:
    cluster.nodes = nodes(*[G5_XLARGE] * joined, availability_zone="us-west-2a")
    cluster.free = {node["NodeID"]: dict(G5_XLARGE) for node in cluster.nodes}
    names = [node["NodeID"] for node in cluster.nodes]
    for name in names[:in_use]:
        cluster.use(name, ON_GPU)
    if placed:
        cluster.place(OWN_JOB, *names[:placed])
    assert ray_cluster.instances_needed(workers, "workers", STACK, use_gpu=True) == (needed, in_use)
    assert ray_cluster.has_free_room(RunConfig(num_workers=workers), "workers", STACK, use_gpu=True) == (
        workers <= joined - in_use
    )


@pytest.mark.parametrize(
    ("workers", "kind", "use_gpu", "needed"),
    [
        (8, "h100-workers", True, 1),
        (9, "h100-workers", True, 2),
        (1, "h100-workers", True, 1),
        (64, "h100-workers", False, 1),
        (8, "cpu-workers", False, 1),
        (9, "cpu-workers", False, 2),
        (100, "cpu-workers", False, 4),
    ],
)
def test_instance_has_a_worker_for_each_gpu_or_cpu(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, workers: int, kind: str, use_gpu: bool, needed: int
) -> None:
    assert ray_cluster.instances_needed(workers, kind, STACK, use_gpu=use_gpu) == (needed, 0)
    monkeypatch.setattr(ray_cluster.ray, "nodes", Mock(side_effect=RuntimeError("the head does not answer")))
    assert ray_cluster.instances_needed(workers, kind, STACK, use_gpu=use_gpu) == (needed, 0)


def test_instances_count_once_by_node_labels(cluster: Cluster) -> None:
    assert ray_cluster.instances_with_workers() == {}
    cluster.place(OTHER_JOB, "b")
    cluster.place(OWN_JOB, "a", "a", "b")
    assert ray_cluster.instances_with_workers() == {InstanceKind("g5.xlarge", "spot"): 1, InstanceKind(): 1}


def test_unreachable_cluster_has_no_instances(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster.ray, "nodes", Mock(side_effect=RuntimeError("Ray has not been started")))
    assert ray_cluster.instances_with_workers() == {}
