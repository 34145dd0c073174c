"""The wait of a Ray program for its workers: it is told once, and has a limit."""

from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from ray_on_ecs.run import program_resources
from ray_on_ecs.run.program_resources import ProgramWatch, describe
from tests.run_folders import Clock

GPUS = Counter({"GPU": 2, "CPU": 4})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(program_resources, "time", clock)
    monkeypatch.setattr(program_resources, "describe_nodes", lambda: "the cluster has nothing")
    return clock


class Program:
    """A program that needs what a test says."""

    def __init__(self) -> None:
        self.needs: Any = Counter()
        self.told: list[Any] = []
        self.watch = ProgramWatch(self.told.append, Console(quiet=True), self._read)

    def _read(self) -> Any:
        if isinstance(self.needs, Exception):
            raise self.needs
        return self.needs


def test_a_wait_is_told_once_with_its_end(clock: Clock) -> None:
    program = Program()
    program.watch.look()
    program.needs = GPUS
    program.watch.look()
    assert program.told == [], "it has no places for a moment whenever it starts workers"
    for _ in range(3):
        program.watch.look()
    program.needs = Counter()
    program.watch.look()
    assert program.told == [GPUS, Counter()]


def test_a_wait_has_a_limit(clock: Clock) -> None:
    program = Program()
    program.needs = GPUS
    program.watch.look()
    program.watch.look()
    clock.now += 9
    assert program.watch.shortage(10) is None
    assert program.watch.is_waiting()
    clock.now += 1
    line = program.watch.shortage(10)
    assert line == (
        "the program waited 10 s for 2 GPUs and 4 CPUs, but the cluster has nothing; ask for fewer workers in the "
        "program, or add nodes"
    )
    program.needs = Counter()
    program.watch.look()
    assert program.watch.shortage(10) is None
    assert not program.watch.is_waiting()


def test_a_look_that_fails_ends_no_program(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    program.needs = GPUS
    program.watch.look()
    program.watch.look()
    program.needs = RuntimeError("the GCS is away")
    program.watch.look()
    clock.now += 1000
    assert program.watch.shortage(10) is None, "it may train"
    assert "the GCS is away" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("needs", "words"),
    [({"GPU": 1}, "1 GPU"), ({"CPU": 3, "GPU": 0.5}, "0.5 GPUs and 3 CPUs"), ({"CPU": 2.0}, "2 CPUs")],
)
def test_needs_are_in_words(needs: dict[str, float], words: str) -> None:
    assert describe(Counter(needs)) == words
