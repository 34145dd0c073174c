"""The nodes of a Ray program: a limited wait, reported once, failures excused by lost nodes, and its hardware."""

from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

from ray_on_ecs.pools import Condition, Request
from tests.lazy import Lazy
from tests.run_folders import Clock

COMMAND_NAME = "ray-on-ecs"

program_resources = Lazy("ray_on_ecs.run.program.resources")
ray_cluster = Lazy("ray_on_ecs.run.ray_cluster")
GPUS = Counter({"GPU": 2, "CPU": 4})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(program_resources, "time", clock)
    monkeypatch.setattr(program_resources, "describe_nodes", lambda: "the cluster has nothing")
    return clock


class Program:
    """A program whose requests a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.needs: Any = Counter()
        self.told: list[Any] = []
        self.nodes: set[str] = set()
        self.draining: set[str] = set()
        self.requests: list[Request] = []
        self.hardware: dict[str, Any] | None = None
        monkeypatch.setattr(program_resources, "missing", self._read)
        monkeypatch.setattr(program_resources, "draining_nodes", lambda: dict.fromkeys(self.draining))
        for name in ("nodes", "requests", "hardware"):
            monkeypatch.setattr(program_resources, name, lambda pid, name=name: getattr(self, name))
        self.watch = program_resources.ProgramWatch(self.told.append)

    def _read(self, pid: int) -> Any:
        if isinstance(self.needs, Exception):
            raise self.needs
        return self.needs


@pytest.fixture
def program(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch)


def test_wait_is_reported_once_with_its_end(program: Program) -> None:
    program.watch.look()
    program.needs = GPUS
    program.watch.look()
    assert program.told == [], "during each start of workers it briefly has no places"
    for _ in range(3):
        program.watch.look()
    program.needs = Counter()
    program.watch.look()
    assert program.told == [GPUS, Counter()]


def test_wait_is_limited(clock: Clock, program: Program) -> None:
    program.needs = GPUS
    program.watch.look()
    program.watch.look()
    clock.now += 9
    assert program.watch.shortage(10) is None
    assert program.watch.waits_since is not None
    clock.now += 1
    line = program.watch.shortage(10)
    assert line == (
        "the program waited 10 s for 2 GPUs and 4 CPUs, but the cluster has nothing; ask for fewer workers in the "
        "program, or add nodes"
    )
    program.needs = Counter()
    program.watch.look()
    assert program.watch.shortage(10) is None
    assert program.watch.waits_since is None


def test_wait_for_a_reservation_is_counted_from_its_start(
    clock: Clock, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Mock(is_before_start=True, line="")
    monkeypatch.setattr(program.watch, "_find_shortage", lambda needs: watch)
    program.needs = GPUS
    for _ in range(5):
        program.watch.look()
        clock.now += 9
        assert program.watch.shortage(10) is None
    watch.is_before_start = False
    program.watch.look()
    clock.now += 1
    assert program.watch.shortage(10)


def group(pool: str, gpu: str, units: int) -> Any:
    return {
        "pool": pool,
        "gpu": gpu,
        "units": units,
        "zones": ["us-west-2a"],
        "types": ["p5.48xlarge"],
        "max": 2,
        "spot": False,
    }


STACK: Any = {
    "groups": {"workers": group("default", "A10G", 1), "h100-workers": group("h100", "H100", 8)},
    "prices": None,
}
H100 = Condition("ray.io/node-group", ("h100",))


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (
            Request({"GPU": 16}),
            "no node of the stack can have 16 GPU: it has default (2 x p5.48xlarge: A10G) and h100 (",
        ),
        (
            Request({"GPU": 1, "accelerator_type:B200": 0.001}),
            "no node of the stack can have 1 GPU and B200: it has default (",
        ),
        (
            Request({"GPU": 1}, (Condition("ray.io/node-group", ("b200",)),)),
            "no node of the stack can have 1 GPU and ray.io/node-group in (b200): it has default (",
        ),
    ],
)
def test_request_that_no_pool_can_hold_is_named(
    clock: Clock, program: Program, monkeypatch: pytest.MonkeyPatch, request_: Request, line: str
) -> None:
    monkeypatch.setattr(program_resources, "read_cluster_info", lambda: STACK)
    monkeypatch.setattr(program_resources, "Shortage", lambda *given: pytest.fail("there is no group to look at"))
    program.needs, program.requests = GPUS, [Request({"GPU": 1}), request_]
    program.watch.look()
    program.watch.look()
    assert program.watch.unmet.startswith(line)
    clock.now += 10
    assert f"but the cluster has nothing; {line}" in program.watch.shortage(10)
    program.needs = Counter()
    program.watch.look()
    assert program.watch.unmet == ""


def test_request_that_changes_is_explained_anew(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_resources, "read_cluster_info", lambda: STACK)
    monkeypatch.setattr(program_resources, "Shortage", Mock())
    program.needs, program.requests = GPUS, [Request({"GPU": 1})]
    for _ in range(2):
        program.watch.look()
    assert program.watch.unmet == ""
    program.requests = [Request({"GPU": 16})]
    program.watch.look()
    assert program.watch.unmet.startswith("no node of the stack can have 16 GPU"), "the GPUs in all are the same"


def test_group_of_the_first_request_is_looked_at(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    shortage, needed = Mock(), Mock(return_value=(1, 0))
    monkeypatch.setattr(program_resources, "read_cluster_info", lambda: STACK)
    monkeypatch.setattr(program_resources, "Shortage", shortage)
    monkeypatch.setattr(program_resources, "instances_needed", needed)
    on_h100 = Request({"GPU": 4}, (H100,))
    program.needs, program.requests = GPUS, [on_h100, Request({"GPU": 1}), on_h100]
    program.watch.look()
    program.watch.look()
    [(info, kind, count, _)] = [call.args for call in shortage.call_args_list]
    assert (info, kind, count()) == (STACK, "h100-workers", (1, 0))
    needed.assert_called_once_with(8, "h100-workers", STACK, use_gpu=True)


def test_instances_are_those_beside_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [
        {"NodeID": "head", "Resources": {"node:__internal_head__": 1.0}},
        {"NodeID": "gpu", "Resources": {"GPU": 1.0}},
    ]
    monkeypatch.setattr(program_resources, "alive_nodes", lambda: table)
    monkeypatch.setattr(program_resources, "nodes", lambda pid: {"head", "gpu"})
    monkeypatch.setattr(program_resources, "instances_of", lambda names: Counter(names))
    assert program_resources.instances(1) == Counter({"gpu": 1})


def test_kinds_are_those_of_the_nodes_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"a": {}, "b": {"ray.io/node-group": "h100"}, "c": {"ray.io/node-group": "another"}}
    table = [{"NodeID": name, "Labels": each} for name, each in labels.items()]
    monkeypatch.setattr(program_resources, "alive_nodes", lambda: table)
    monkeypatch.setattr(program_resources, "read_cluster_info", lambda: STACK)
    for names, kinds in {
        "a": {"workers"},
        "ab": {"workers", "h100-workers"},
        "bc": {"h100-workers"},
        "": set(),
    }.items():
        monkeypatch.setattr(program_resources, "nodes", lambda pid, names=names: set(names))
        assert program_resources.kinds(1) == kinds
    monkeypatch.setattr(program_resources, "read_cluster_info", lambda: None)
    assert program_resources.kinds(1) == set()


HEAD_NODE, GPU_NODE = {"CPU": 2.0}, {"CPU": 8.0, "GPU": 2.0, "accelerator_type:A10G": 1.0}
A_GPU = ("gpu", {"CPU": 3.0, "GPU": 1.0})


@pytest.mark.parametrize(
    ("places", "actors", "hardware"),
    [
        ([], [], None),
        ([("head", {"CPU": 1.0})] * 2, ["head"] * 3, (2, "CPU", 1, 2)),
        ([A_GPU, A_GPU], ["head", "gpu", "gpu"], (2, "A10G", 3, 8)),
        ([("head", {"CPU": 1.0}), ("gpu", {"GPU": 0.5})], [], (1, "A10G", 1, 8)),
        ([("lost", {"CPU": 1.0}), ("gpu", {"CPU": 2.0})], [], (1, "CPU", 2, 8)),
        ([], ["gpu", "lost", "gpu"], (2, "A10G", None, 8)),
    ],
)
def test_hardware_is_that_of_places_or_actors(
    monkeypatch: pytest.MonkeyPatch, places: Any, actors: list[str], hardware: Any
) -> None:
    groups = {
        str(number): {"bundles": {0: bundle, 1: bundle}, "bundles_to_node_id": {0: node, 1: ""}}
        for number, (node, bundle) in enumerate(places)
    }
    table = [{"State": "ALIVE", "Address": {"NodeID": node}} for node in actors]
    nodes = [{"NodeID": name, "Resources": each} for name, each in (("head", HEAD_NODE), ("gpu", GPU_NODE))]
    monkeypatch.setattr(program_resources, "_jobs", lambda pid: {"01"})
    monkeypatch.setattr(ray_cluster, "placement_groups", lambda jobs: groups)
    monkeypatch.setattr(program_resources, "actors_of", lambda job: [*table, {"State": "DEAD", "Address": {}}])
    monkeypatch.setattr(program_resources, "alive_nodes", lambda: nodes)
    found = program_resources.hardware(1)
    names = ("workers", "device", "threads_per_worker", "node_cpus")
    assert (found and tuple(map(found.get, names))) == hardware


def test_most_workers_with_places_are_kept(program: Program) -> None:
    placed, fewer = {"workers": 2, "threads_per_worker": 1}, {"workers": 1, "threads_per_worker": 1}
    for found in (None, {"workers": 3}, fewer, placed, fewer, {"workers": 3}, None):
        program.hardware = found
        program.watch.look()
    assert program.watch.hardware == placed


def test_failed_query_ends_no_program(clock: Clock, program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program.needs = GPUS
    program.watch.look()
    program.watch.look()
    program.needs = RuntimeError("the GCS is away")
    program.watch.look()
    clock.now += 1000
    assert program.watch.shortage(10) is None
    assert "the GCS is away" in capsys.readouterr().out


def test_failure_after_own_node_drained_is_excused_once(clock: Clock, program: Program) -> None:
    program.nodes, program.draining = {"a", "b"}, {"b"}
    program.watch.look()
    program.nodes, program.draining = set(), set()  # the node and the program have ended
    program.watch.look()
    clock.now += 100
    assert program.watch.was_reclaimed()
    assert not program.watch.was_reclaimed()


def test_program_ending_before_next_query_is_excused(program: Program) -> None:
    program.nodes = {"a", "b"}
    program.watch.look()
    program.nodes, program.draining = set(), {"b"}
    assert program.watch.was_reclaimed()
    assert not program.watch.was_reclaimed()


def test_late_or_unrelated_failure_counts(clock: Clock, program: Program) -> None:
    program.nodes, program.draining = {"a"}, {"another's"}
    program.watch.look()
    assert not program.watch.was_reclaimed()
    program.draining = {"a"}
    program.watch.look()
    program.nodes, program.draining = {"c"}, set()
    clock.now += 200
    assert not program.watch.was_reclaimed()


@pytest.mark.parametrize(
    ("needs", "words"),
    [({"GPU": 1}, "1 GPU"), ({"CPU": 3, "GPU": 0.5}, "0.5 GPUs and 3 CPUs"), ({"CPU": 2.0}, "2 CPUs")],
)
def test_requests_are_in_words(needs: dict[str, float], words: str) -> None:
    assert program_resources.describe(Counter(needs)) == words
