"""Workers as actors of a Ray that fails: each of its errors becomes a lost worker or a lost group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RaySystemError, RpcError

from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.group import Directive, GroupError, WorkerStatus
from tests.lazy import Lazy
from tests.run_folders import Clock

placing, ray_cluster = Lazy("ray_on_ecs.run.placing"), Lazy("ray_on_ecs.run.ray_cluster")
script_actor, worker_group = Lazy("ray_on_ecs.run.script_actor"), Lazy("ray_on_ecs.run.worker_group")

ERRORS = [RaySystemError("away"), RpcError("UNAVAILABLE"), ConnectionError("no head"), RuntimeError(), ValueError()]


class FakeRay:
    """A cluster of two nodes whose actors answer at once.

    Attributes:
        fails: The error that a function of Ray raises, by its name.
        polls: The number of polls.
        lost: The error that the actors' polls raise.
        of_others: The state of the placement groups but the first.
        clocks: The actors' clocks when they answer.
    """

    def __init__(self) -> None:
        self.fails: dict[str, Exception] = {}
        self.polls = 0
        self.lost: Exception | None = None
        self.of_others = "PENDING"
        self.clocks: Iterator[float] = itertools.repeat(0.0)
        self._groups: list[object] = []
        self._located = 0

    def call(self, name: str, result: Any = None) -> Any:
        if name in self.fails:
            raise self.fails[name]
        return result() if callable(result) else result

    # Of `ray`

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda: self.call("remote", self._actor))
        )

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return self.call("wait", (references, []))

    def get(self, reference: Any) -> Any:
        if isinstance(reference, list):
            return [self.get(each) for each in reference]
        return self.call("get", reference)

    def kill(self, actor: Any) -> None:
        self.call("kill")

    # Of `ray.util`

    def placement_group(self, bundles: list[Any], strategy: str, bundle_label_selector: Any = None) -> Any:
        self._groups.append(self.call("placement_group", object))
        return self._groups[-1]

    def placement_group_table(self, group: Any) -> dict[str, Any]:
        state = "CREATED" if group is self._groups[0] else self.of_others
        return self.call("table", {"state": state, "bundles_to_node_id": {0: "node-0", 1: "node-1"}})

    def remove_placement_group(self, group: Any) -> None:
        self.call("remove")

    def alive_nodes(self) -> list[dict[str, Any]]:
        return self.call(
            "nodes", [{"NodeID": f"node-{index}", "NodeManagerHostname": f"{index}"} for index in range(2)]
        )

    def _actor(self) -> Any:
        node = self._located % 2
        self._located += 1

        def poll(number: int, directive: Directive, known: int, seconds: float) -> Callable[[], Any]:
            self.polls += 1
            return lambda: self._answer()

        return SimpleNamespace(
            locate=SimpleNamespace(remote=lambda: lambda: script_actor.Location(f"node-{node}", "host", ())),
            begin=SimpleNamespace(remote=lambda *settings: lambda: None),
            poll=SimpleNamespace(remote=poll),
        )

    def _answer(self) -> tuple[int, WorkerStatus]:
        if self.lost:
            raise self.lost
        return 1, WorkerStatus(generation=0, clock=next(self.clocks))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    clock = Clock()
    for module in (worker_group, placing):
        monkeypatch.setattr(module, "ray", ray)
        monkeypatch.setattr(module, "time", clock)
    for name in ("placement_group", "placement_group_table", "remove_placement_group", "alive_nodes"):
        monkeypatch.setattr(placing, name, getattr(ray, name))
    monkeypatch.setattr(ray_cluster, "placement_group_table", ray.placement_group_table)
    monkeypatch.setattr(placing, "PlacementGroupSchedulingStrategy", lambda *bundle: None)
    return ray


def group_of(count: int = 2, **more: Any) -> Any:
    settings: Any = None
    allocation = WorkerAllocation(count, use_gpu=False, cpus_per_worker=1, **more)
    return worker_group.RayGroup(settings, allocation, 60.0)


def poll(group: Any, count: int = 5) -> None:
    for _ in range(count):
        group.poll(Directive())


def begun(count: int = 2, **more: Any) -> Any:
    """Return a group whose workers have begun."""
    group = group_of(count, **more)
    while len(group.poll(Directive())) < count:
        pass
    return group


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("function", ["placement_group", "table", "remote", "wait", "get", "nodes"])
def test_error_of_ray_while_workers_are_placed_loses_the_group(ray: FakeRay, function: str, error: Exception) -> None:
    ray.fails[function] = error
    group = group_of()
    with pytest.raises(GroupError):
        poll(group)
    ray.fails |= dict.fromkeys(("kill", "remove"), error)
    group.close()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("function", ["table", "nodes", "remote"])
def test_lost_worker_is_not_replaced_while_ray_is_away(ray: FakeRay, function: str, error: Exception) -> None:
    group = begun()
    group.lost[1] = "it ended"
    ray.fails[function] = error
    assert not group.replace_lost()
    ray.fails.clear()
    assert group.replace_lost()
    assert not group.lost


@pytest.mark.parametrize("error", ERRORS)
def test_run_grows_once_there_is_room_and_ray_says_so(ray: FakeRay, error: Exception) -> None:
    group = begun(1, limits=(1, 3))
    assert not group.can_grow()

    def grows() -> bool:
        placing.time.now += worker_group.GROW_SECONDS
        return group.can_grow()

    assert not grows()
    ray.of_others = "CREATED"
    ray.fails["table"] = error
    assert not grows()
    ray.fails.clear()
    assert grows()
    assert not group.can_grow(), "asked once a minute"


@pytest.mark.parametrize("error", [ActorDiedError(), *ERRORS])
def test_error_of_a_poll_loses_the_worker(ray: FakeRay, error: Exception) -> None:
    group = begun()
    ray.lost = error
    ray.fails["kill"] = error
    poll(group)
    assert set(group.lost) == {0, 1}


def test_clock_of_a_worker_is_compared_by_its_quickest_answer(ray: FakeRay) -> None:
    ray.clocks = itertools.cycle([worker_group.time.time() - behind for behind in (5.9, 5.1, 5.0, 7.0)])
    group = begun(1)
    poll(group, 8)
    assert group.poll(Directive())[0].clock == pytest.approx(5.0)


def test_worker_out_of_reach_is_asked_at_intervals(ray: FakeRay) -> None:
    """Ray knows at once that its node does not answer."""
    group = begun()
    before, began = ray.polls, placing.time.now
    ray.lost = ActorUnavailableError("the connection is closed", None)
    while placing.time.now - began < 10 * worker_group.POLL_SECONDS:
        group.poll(Directive())
    assert ray.polls - before <= 2 * 12
    assert not group.lost
    ray.lost = None
    for _ in range(3):
        assert len(group.poll(Directive())) == 2


IDS = "\tclass_name: ScriptActor\n\tactor_id: 0123ab\n\tpid: 12\n\tnamespace: 4c\n\tip: 10.0.0.1\n"
BEFORE = f"The actor died unexpectedly before finishing this task.\n{IDS}"
ENDED = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
CAUSES = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
    "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker "
    "crashed unexpectedly due to SIGSEGV or another unexpected error."
)
OF_NODE = "the actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats."


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            f"{BEFORE}{ENDED}{CAUSES} If the process was killed by the kernel OOM killer (verifiable by dmesg), ask.",
            CAUSES,
        ),
        (f"{BEFORE}The actor died because its node has died. Node Id: 89ef\n\t{OF_NODE}", f"NODE {OF_NODE}"),
        (f"{BEFORE}{ENDED}{'long ' * 100}end.", f"{'long ' * 100}end."),
        (
            f"{BEFORE}{ENDED}Task was killed due to the node running low on memory. Top 10 memory users: \n1 2",
            "Task was killed due to the node running low on memory.",
        ),
    ],
)
def test_reason_of_a_lost_worker_is_whole(message: str, reason: str) -> None:
    reason = reason.replace("NODE", "The actor died because its node has died.")
    assert worker_group.reason_of(RayActorError("0123ab", message)) == f"a process of the run ended ({reason})"
