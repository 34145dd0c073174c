"""Slow ranks by the times at which ranks join collectives, in simulated programs."""

import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from ray_on_ecs.run import flight_recorder, slow_ranks
from ray_on_ecs.run.collectives import Reading
from ray_on_ecs.run.group import Place
from ray_on_ecs.run.slow_ranks import WINDOW_SECONDS, SlowRanks
from ray_on_ecs.tracking.slow_ranks import SlowTime

RANKS = 4
ALL = tuple(range(RANKS))
# What a rank does in a step: seconds of work before each collective, with the group of that.
Program = Callable[[int, int], Sequence[tuple[float, tuple[int, ...]]]]
Arrivals = dict[int, list[tuple[str, int, float]]]


def data_parallel(work: Callable[[int, int], float], buckets: int = 1, group: tuple[int, ...] = ALL) -> Program:
    """Return a program that reduces its gradients in buckets after some work."""
    return lambda rank, step: [(work(rank, step), group), *[(0.001, group)] * (buckets - 1)]


def simulate(program: Program, steps: int, ranks: Sequence[int] = ALL) -> Arrivals:
    """Return the arrivals of each rank in so many steps; a collective ends when all ranks of its group are there."""

    def parts_of(rank: int) -> Iterator[tuple[float, tuple[int, ...]]]:
        for step in range(steps):
            yield from program(rank, step)

    now = dict.fromkeys(ranks, 1000.0)
    todo = {rank: parts_of(rank) for rank in ranks}
    waiting: dict[int, tuple[int, ...]] = {}
    counts: dict[tuple[int, ...], int] = {}
    arrivals: Arrivals = {rank: [] for rank in ranks}
    while True:
        for rank in ranks:
            if rank not in waiting and (part := next(todo[rank], None)):
                now[rank] += part[0]
                waiting[rank] = part[1]
        ready = next((group for group in waiting.values() if all(waiting.get(rank) == group for rank in group)), None)
        if ready is None:
            return arrivals
        counts[ready] = counts.get(ready, 0) + 1
        end = max(now[rank] for rank in ready)
        for rank in ready:
            arrivals[rank].append((f"gloo/{list(ready)}/0", counts[ready], now[rank]))
            now[rank], _ = end, waiting.pop(rank)


class Driver:
    """Compares simulated ranks as the driver does: a reading of each every four seconds."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.times: list[SlowTime] = []
        self.ranks = SlowRanks(self.times)
        self._caplog = caplog

    @property
    def lines(self) -> list[str]:
        """The lines so far."""
        return self._caplog.messages

    def watch(
        self,
        arrivals: Arrivals,
        *,
        places: Sequence[Place] = (),
        clocks: Sequence[float] = (),
        p2p: int = 0,
        step_seconds: float = 0,
        seconds: int = 4,
    ) -> None:
        """Take all arrivals; each rank's clock is behind by so much."""
        begin = min(parts[0][2] for parts in arrivals.values() if parts)
        end = max(parts[-1][2] for parts in arrivals.values() if parts)
        for number in range(1, int((end - begin) / seconds) + 2):
            for rank, parts in arrivals.items():
                since = begin + seconds * (number - 1)
                found = [
                    (group, sequence, at - (clocks[rank] if clocks else 0.0))
                    for group, sequence, at in parts
                    if since <= at < since + seconds
                ][-flight_recorder.MOST :]
                groups = {group: tuple(json.loads(group.split("/")[1])) for group, _, _ in found}
                reading = Reading(rank, number, groups, p2p * len(found), found, instance=f"i-{rank}")
                self.ranks.take(reading, places[rank] if places else Place(), clocks[rank] if clocks else 0.0)
            for look in range(4, seconds + 1, 4):
                now = seconds * number + look
                step = round(now / step_seconds) if step_seconds else None
                self.ranks.look(begin + now, step)


@pytest.fixture
def driver(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(slow_ranks, "LOOK_SHARE", math.inf)  # on a busy machine looks take long, and so are rare
    return Driver(caplog)


def late(slow: int, seconds: float = 0.1) -> Callable[[int, int], float]:
    """Return the work of ranks of which one takes longer."""
    return lambda rank, step: 0.02 + random.random() * 0.004 + (seconds if rank == slow else 0)


SLOW = {
    "one bucket": data_parallel(late(2)),
    "buckets": data_parallel(late(2), buckets=5),
    "many collectives a step": data_parallel(late(2), buckets=12),
    "every other step": data_parallel(lambda rank, step: 0.02 + 0.1 * (rank == 2 and step % 2)),
    "busy CPUs": lambda rank, step: [
        (late(2)(rank, step), ALL),
        *((0.03 * random.random() ** 4, ALL) for _ in range(4)),
    ],
    "half as slow": data_parallel(late(2, 0.01)),
    "stopped at times": data_parallel(
        lambda rank, step: 0.02 + 0.8 * (rank == 2 and random.Random(step).random() < 0.02)
    ),
    "every hundredth step": data_parallel(lambda rank, step: 0.02 + 1.0 * (rank == 2 and step % 100 == 99)),
}


@pytest.mark.parametrize("program", SLOW.values(), ids=SLOW)
def test_slow_rank_is_named(program: Program, driver: Driver) -> None:
    driver.watch(simulate(program, 1600))
    assert len(driver.lines) == 1
    assert driver.lines[0].startswith("rank 2 (i-2) comes last to ")
    assert [each["what"] for each in driver.times] == driver.lines


def test_wait_is_told_in_steps(driver: Driver) -> None:
    driver.watch(simulate(data_parallel(lambda rank, step: 0.014 + 0.104 * (rank == 2)), 800), step_seconds=0.118)
    assert "comes last to the collectives: 100 % of the waiting is for it, 104 of 118 ms a step" in driver.lines[0]


def test_readings_may_be_rare(driver: Driver) -> None:
    driver.watch(simulate(data_parallel(late(2)), 1500), seconds=32)
    assert [line.split(" comes")[0] for line in driver.lines] == ["rank 2 (i-2)"]


PAIRS = {rank: (rank // 2 * 2, rank // 2 * 2 + 1) for rank in ALL}
REPLICAS = {rank: (rank % 2, rank % 2 + 2) for rank in ALL}


@pytest.mark.parametrize("slow", [0, 3])
def test_tensor_parallel_partner_is_not_blamed(slow: int, driver: Driver) -> None:
    work = late(slow)
    driver.watch(simulate(lambda rank, step: [(work(rank, step), PAIRS[rank]), (0.001, REPLICAS[rank])], 800))
    assert driver.lines[0].startswith(f"rank {slow} ")
    assert len(driver.lines) == 1


def test_groups_that_never_meet_are_compared_apart(driver: Driver) -> None:
    work = late(3)
    driver.watch(simulate(lambda rank, step: [(work(rank, step) * (1 + 2 * (rank < 2)), PAIRS[rank])], 800))
    assert [line.split(" (")[0] for line in driver.lines] == ["rank 3"]


HEALTHY = {
    "equal": data_parallel(lambda rank, step: 0.02),
    "jitter": data_parallel(lambda rank, step: random.random() * 0.1),
    "one at random": data_parallel(lambda rank, step: 0.02 + 0.2 * (random.Random(step).randrange(RANKS) == rank)),
    "less than a tenth": data_parallel(lambda rank, step: 0.1 + 0.008 * (rank == 1)),
    "one long pause": data_parallel(lambda rank, step: 0.02 + 30 * (rank == 0 and step == 300)),
    "validation on rank 0": data_parallel(lambda rank, step: 0.02 + 2 * (rank == 0 and step % 200 == 199)),
    "validation that is not equally long": data_parallel(
        lambda rank, step: 0.02 + 2 * random.random() * (rank == 0 and step % 100 == 99)
    ),
    "validation among many collectives": data_parallel(
        lambda rank, step: 0.02 + 0.8 * (rank == 0 and step % 100 == 99), buckets=4
    ),
    "validation beside jitter": data_parallel(
        lambda rank, step: 0.02 + 0.02 * random.random() ** 6 + 1.5 * (rank == 0 and step % 200 == 199)
    ),
    "the best model is saved": data_parallel(
        lambda rank, step: 0.02 + (rank == 0 and step % 50 == 49 and random.Random(step).random() < 0.5)
    ),
    "validation and checkpoints": data_parallel(
        lambda rank, step: 0.02 + (rank == 0) * ((step % 60 == 59) + (step % 100 == 99))
    ),
    "pauses": data_parallel(lambda rank, step: 0.02 + 10 * (rank == 1 and step in (300, 350, 1000, 1290, 1700))),
    "one alone": lambda rank, step: [(0.02, (rank,))],
    "two alternate": data_parallel(lambda rank, step: 0.02 + 0.05 * (rank == step % 2)),
}


@pytest.mark.parametrize("program", HEALTHY.values(), ids=HEALTHY)
def test_healthy_ranks_are_not_named(program: Program, driver: Driver) -> None:
    driver.watch(simulate(program, 2000))
    assert driver.lines == []


def test_stages_of_a_pipeline_are_not_compared(driver: Driver) -> None:
    driver.watch(simulate(data_parallel(late(3)), 800), p2p=2)
    assert driver.lines == []


@pytest.mark.parametrize("steps", [150, 199])
def test_few_collectives_are_no_evidence(steps: int, driver: Driver) -> None:
    driver.watch(simulate(data_parallel(late(1, 0.5)), steps))
    assert driver.lines == []


def test_an_episode_begins_and_ends_once(driver: Driver) -> None:
    of_step = data_parallel(lambda rank, step: 0.05 + 0.05 * (rank == 1 and 1000 <= step < 3000))
    driver.watch(simulate(of_step, 3000 + round(2.5 * WINDOW_SECONDS / 0.05)))
    assert len(driver.lines) == 2
    assert driver.lines[1] == "the others no longer wait for rank 1 (i-1)"
    [time] = driver.times
    assert time["since"] < str(time["until"])


NODES = [Place(f"10.0.2.{rank // 2}", f"node-{rank // 2}") for rank in ALL]
OWN_NODES = [Place(f"10.0.2.{rank}", f"node-{rank}") for rank in ALL]


CLOCKS = [0.0, 3.0, -7.0, 0.1]


def test_clocks_of_nodes_are_put_right(driver: Driver) -> None:
    driver.watch(simulate(data_parallel(late(3)), 800), places=OWN_NODES, clocks=CLOCKS)
    assert [line.split(" comes")[0] for line in driver.lines] == ["rank 3 (i-3, 10.0.2.3)"]


def test_clocks_of_nodes_blame_nobody(driver: Driver) -> None:
    driver.watch(simulate(HEALTHY["jitter"], 1000), places=OWN_NODES, clocks=CLOCKS)
    assert driver.lines == []


def test_waits_below_the_clocks_error_are_no_evidence(driver: Driver) -> None:
    program = data_parallel(lambda rank, step: 0.02 + 0.012 * (rank == 2))
    driver.watch(simulate(program, 3000), places=OWN_NODES)
    assert driver.lines == []


def test_slow_node_is_named_with_its_ranks(driver: Driver) -> None:
    program = data_parallel(lambda rank, step: 0.02 + random.random() * 0.01 + 0.1 * (rank > 1))
    driver.watch(simulate(program, 800), places=NODES)
    assert [line.split(" last")[0] for line in driver.lines] == ["ranks 2, 3 (i-2, 10.0.2.1) come"]


def test_slow_rank_of_a_node_is_named_alone(driver: Driver) -> None:
    driver.watch(simulate(data_parallel(late(1)), 800), places=NODES)
    assert [line.split(" comes")[0] for line in driver.lines] == ["rank 1 (i-1, 10.0.2.0)"]


def test_arrivals_of_part_of_the_ranks_are_left_out(driver: Driver) -> None:
    arrivals = simulate(data_parallel(late(1)), 600)
    driver.watch({rank: parts for rank, parts in arrivals.items() if rank != 1})
    assert driver.lines == []
    assert driver.ranks.waits == []


def test_waits_of_each_rank_are_kept(driver: Driver) -> None:
    driver.watch(simulate(data_parallel(lambda rank, step: 0.05 + 0.05 * (rank == 1)), 800))
    assert [(wait["rank"], wait["share"]) for wait in driver.ranks.waits] == [(0, 0.5), (1, 0.0), (2, 0.5), (3, 0.5)]
