"""The nodes of a Ray program: a limited wait, reported once, and failures excused by lost nodes."""

from collections import Counter
from typing import Any

import pytest

from tests.lazy import Lazy
from tests.run_folders import Clock

COMMAND_NAME = "ray-on-ecs"

program_resources = Lazy("ray_on_ecs.run.program.resources")
GPUS = Counter({"GPU": 2, "CPU": 4})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(program_resources, "time", clock)
    monkeypatch.setattr(program_resources, "describe_nodes", lambda: "the cluster has nothing")
    return clock


class Program:
    """A program whose requests a test sets."""

    def __init__(self) -> None:
        self.needs: Any = Counter()
        self.told: list[Any] = []
        self.nodes: set[str] = set()
        self.draining: set[str] = set()
        self.watch = program_resources.ProgramWatch(
            self.told.append, self._read, lambda pid: self.nodes, lambda: self.draining
        )

    def _read(self, pid: int) -> Any:
        if isinstance(self.needs, Exception):
            raise self.needs
        return self.needs


def test_wait_is_reported_once_with_its_end(clock: Clock) -> None:
    program = Program()
    program.watch.look()
    program.needs = GPUS
    program.watch.look()
    assert program.told == [], "during each start of workers it briefly has no places"
    for _ in range(3):
        program.watch.look()
    program.needs = Counter()
    program.watch.look()
    assert program.told == [GPUS, Counter()]


def test_wait_is_limited(clock: Clock) -> None:
    program = Program()
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


def test_failed_query_ends_no_program(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    program.needs = GPUS
    program.watch.look()
    program.watch.look()
    program.needs = RuntimeError("the GCS is away")
    program.watch.look()
    clock.now += 1000
    assert program.watch.shortage(10) is None
    assert "the GCS is away" in capsys.readouterr().out


def test_failure_after_own_node_drained_is_excused_once(clock: Clock) -> None:
    program = Program()
    program.nodes, program.draining = {"a", "b"}, {"b"}
    program.watch.look()
    program.nodes, program.draining = set(), set()  # the node and the program have ended
    program.watch.look()
    clock.now += 100
    assert program.watch.was_reclaimed()
    assert not program.watch.was_reclaimed()


def test_program_ending_before_next_query_is_excused(clock: Clock) -> None:
    program = Program()
    program.nodes = {"a", "b"}
    program.watch.look()
    program.nodes, program.draining = set(), {"b"}
    assert program.watch.was_reclaimed()
    assert not program.watch.was_reclaimed()


def test_late_or_unrelated_failure_counts(clock: Clock) -> None:
    program = Program()
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
