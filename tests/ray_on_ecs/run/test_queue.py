"""Runs start in the order of their submission while the cluster has room, and a dead driver leaves the queue."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.config import LOCAL_VARIABLE, RunConfig
from ray_on_ecs.run import queue
from ray_on_ecs.run.queue import Place, Ticket, find_room
from tests.waiting import until

HOLDS = """
import sys, time
from pathlib import Path
from ray_on_ecs.run.queue import Place, Ticket
with Place(Ticket("first", "ada", 1.0, "cuda", 4), Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def ticket(name: str, workers: int | None, device: str = "auto", since: float = 1.0) -> Ticket:
    return Ticket(name, "ada", since, device, workers)


LINES: dict[str, Any] = {
    "nothing before it": ((), ticket("own", 8), 4, None),
    "room for both": ((ticket("a", 2),), ticket("own", 2), 4, None),
    "room for one": ((ticket("a", 2),), ticket("own", 3), 4, "a"),
    "the one before is queued, too": ((ticket("a", 4), ticket("b", 4)), ticket("own", 1), 4, "b"),
    "a small run passes none": ((ticket("a", 3), ticket("b", 2)), ticket("own", 1), 4, "b"),
    "one that takes all": ((ticket("a", None),), ticket("own", 1), 4, "a"),
    "one that wants all": ((ticket("a", 1),), ticket("own", None), 4, "a"),
    "more than there is": ((ticket("a", 1),), ticket("own", 64), 4, "a"),
    "behind a Ray program": ((ticket("a", 0),), ticket("own", None), 4, None),
    "a Ray program": ((ticket("a", 4),), ticket("own", 0), 4, None),
    "a run on CPUs beside one on GPUs": ((ticket("a", 4),), ticket("own", 1, "cpu"), 4, None),
    "two runs on CPUs": ((ticket("a", 1, "cpu"),), ticket("own", 1, "cpu"), 4, "a"),
    "a cluster without GPUs": ((ticket("a", 1),), ticket("own", 1), 0, "a"),
    "GPUs that have not come": ((ticket("a", 1, "cuda"),), ticket("own", 1, "cuda"), 0, None),
}


@pytest.mark.parametrize(("before", "own", "gpus", "behind"), LINES.values(), ids=LINES)
def test_run_is_queued_behind_the_blocking_run(
    before: tuple[Ticket, ...], own: Ticket, gpus: int, behind: str | None
) -> None:
    room = find_room(before, own, {"default": gpus})
    assert (room.run_name if isinstance(room, Ticket) else None) == behind


@pytest.mark.parametrize(
    ("path", "own", "place"),
    [("/a", "/a", ""), ("/a", "/a/", ""), ("/a b", "/c", ", in /a b"), ("", "/c", ""), ("/a", "", "")],
)
def test_run_of_another_folder_is_named_with_it(path: str, own: str, place: str) -> None:
    ahead = replace(ticket("first", 2), storage_path=path)
    assert queue.describe(ahead, storage_path=own) == f"queued behind first (ada, 2 workers{place})"


POOLS = {"default": 4, "h100": 16, "a100": 8, "cpu": 0}
H100, A100 = ("h100",), ("a100",)


@pytest.mark.parametrize(
    ("before", "own", "found"),
    [
        ([("a", 4, ("default",), "default")], (4, H100), "h100"),
        ([("a", 16, H100, "h100")], (4, ("default",)), "default"),
        ([("a", 16, H100, "h100")], (8, ("h100", "a100")), "a100"),
        ([("a", 8, H100, "h100")], (8, ("h100", "a100")), "h100"),
        ([("a", 8, H100, "h100"), ("b", 16, H100, "")], (8, H100), "behind b"),
        ([("a", 8, H100, "h100"), ("b", 16, H100, "")], (8, ("h100", "a100")), "a100"),
        ([("a", 16, H100, "h100"), ("b", 8, A100, "a100")], (8, ("a100", "h100")), "behind b"),
        ([("a", 16, H100, "h100"), ("b", 8, ("h100", "a100"), "")], (8, A100), "behind b"),
        ([("a", 8, ("h100", "a100"), "a100")], (16, H100), "h100"),
        ([("a", None, H100, "h100")], (1, H100), "behind a"),
        ([("a", None, H100, "h100")], (1, ("default", "h100")), "default"),
        ([("a", 0, H100, "")], (16, H100), "h100"),
        ([("a", 2, ("cpu",), "cpu")], (2, ("cpu",)), "behind a"),
        ([("a", 2, ("cpu",), "cpu")], (4, ("default",)), "default"),
        ([("a", 4, ("removed",), "removed")], (4, ("default",)), "default"),
        ([("a", 4, ("default",), "default")], (4, ("removed",)), "removed"),
    ],
)
def test_each_pool_has_a_line(before: list[Any], own: Any, found: str) -> None:
    tickets = [Ticket(name, "ada", 1.0, "auto", workers, pools, pool) for name, workers, pools, pool in before]
    room = find_room(tickets, Ticket("own", "ada", 2.0, "auto", *own), POOLS)
    assert (f"behind {room.run_name}" if isinstance(room, Ticket) else room) == found
    assert not isinstance(room, Ticket) or room.pool == own[1][0], "the pool in whose line it waits"


BOTH = ("default", "cpu")


@pytest.mark.parametrize(
    ("before", "own", "found"),
    [
        ([], ("cpu", BOTH), "default"),
        ([("auto", ("cpu",), "cpu")], ("cpu", BOTH), "behind a"),
        ([("cpu", ("cpu",), "cpu")], ("cpu", BOTH), "behind a"),
        ([("cpu", BOTH, "default")], ("auto", ("cpu",)), "behind a"),
        ([("cpu", BOTH, "cpu")], ("cpu", BOTH), "behind a"),
        ([("cpu", BOTH, "")], ("cpu", ("cpu",)), "behind a"),
        ([("cpu", BOTH, "cpu")], ("auto", ("default",)), "default"),
        ([("auto", ("default",), "default")], ("cpu", BOTH), "default"),
        ([("auto", ("prepare",), "prepare")], ("cpu", BOTH), "default"),
        ([("cpu", BOTH, "cpu")], ("auto", ("prepare",)), "prepare"),
    ],
)
def test_runs_on_cpus_take_turns_over_all_their_pools(before: list[Any], own: Any, found: str) -> None:
    tickets = [Ticket("a", "ada", 1.0, device, 2, pools, pool) for device, pools, pool in before]
    device, pools = own
    room = find_room(tickets, Ticket("own", "ada", 2.0, device, 2, pools), {**POOLS, "prepare": 0})
    assert (f"behind {room.run_name}" if isinstance(room, Ticket) else room) == found


def test_run_that_has_begun_moves_to_a_pool_with_room(tmp_path: Path) -> None:
    def of_pools(name: str, since: float, workers: int, *pools: str) -> Place:
        return Place(Ticket(name, "ada", since, "auto", workers, pools), tmp_path)

    with (
        of_pools("own", 5.0, 8, "h100", "a100") as own,
        of_pools("other", 4.0, 8, "a100") as other,
        of_pools("later", 6.0, 8, "h100", "a100") as later,
    ):
        assert own.begin_if_free(POOLS) is None
        assert own.pool == "h100"
        assert other.begin_if_free(POOLS) is None
        assert not own.move("a100", POOLS)
        assert own.pool == "h100"
        assert [each.pool for each in later.tickets_before()] == ["a100", "h100"]
        assert own.move("default", {**POOLS, "default": 8}), "a later run that waits is no hindrance"
        assert own.pool == "default"
        assert later.begin_if_free(POOLS) is None
        assert later.pool == "h100"


def test_run_does_not_move_before_an_earlier_one_that_waits(tmp_path: Path) -> None:
    with ExitStack() as held:
        places = [
            held.enter_context(Place(Ticket(name, "ada", since, "auto", 8, pools), tmp_path))
            for name, since, pools in [("blocks", 1.0, A100), ("waits", 2.0, A100), ("own", 3.0, H100)]
        ]
        assert [place.begin_if_free(POOLS) is None for place in places] == [True, False, True]
        blocks, waits, own = places
        blocks.__exit__()
        assert not own.move("a100", POOLS)
        assert waits.begin_if_free(POOLS) is None
        waits.__exit__()
        assert own.move("a100", POOLS)
        own.__exit__()


def test_runs_wait_in_the_order_of_submission(tmp_path: Path) -> None:
    with ExitStack() as held:
        places = {
            name: held.enter_context(Place(ticket(name, 1, since=since), tmp_path))
            for name, since in (("third", 30.0), ("first", 1.5), ("second", 20.0))
        }
        assert [each.run_name for each in places["third"].tickets_before()] == ["first", "second"]
        assert places["first"].tickets_before() == []


def test_earlier_run_does_not_overtake_a_running_one(tmp_path: Path) -> None:
    later = Place(ticket("later", 4, since=20.0), tmp_path)
    earlier = Place(ticket("earlier", 4, since=10.0), tmp_path)  # its code took minutes to upload
    with later:
        assert later.begin_if_free({"default": 4}) is None
        with earlier:
            begun = replace(ticket("later", 4, since=20.0), pools=["default"], pool="default")
            assert earlier.begin_if_free({"default": 4}) == begun
            assert earlier.begin_if_free({"default": 8}) is None
            assert [each.run_name for each in later.tickets_before()] == ["earlier"]


def test_unreachable_cluster_starts_no_second_run(tmp_path: Path) -> None:
    with (
        Place(ticket("first", 4, since=1.0), tmp_path) as first,
        Place(ticket("second", 1, since=2.0), tmp_path) as second,
    ):
        assert first.begin_if_free(None) is None
        assert second.begin_if_free(None) is not None
        assert second.begin_if_free({"default": 8}) is None


def test_unreachable_cluster_delays_no_ray_program() -> None:
    assert find_room((ticket("a", 4),), ticket("own", 4), None) == replace(ticket("a", 4), pool="default")
    assert find_room((ticket("a", 4),), ticket("own", 0), None) == "default"
    assert find_room((ticket("a", 4),), replace(ticket("own", 4), pools=("h100",)), None) == "h100"


def test_killed_driver_leaves_the_queue(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    with driver, Place(ticket("own", 4, since=2.0), tmp_path) as own:
        assert driver.stdout.readline() == "held\n"
        assert [each.run_name for each in own.tickets_before()] == ["first"]
        driver.send_signal(signal.SIGKILL)
        until(lambda: not own.tickets_before())
    assert not list(tmp_path.iterdir())


def test_invalid_ticket_delays_no_run(tmp_path: Path) -> None:
    (tmp_path / "begun-0000000000.500-1.ticket").write_text("{")
    with Place(ticket("own", 4), tmp_path) as own:
        assert own.tickets_before() == []


@pytest.mark.parametrize(
    ("given", "workers"),
    [({}, None), ({"num_workers": "3"}, 3), ({"num_workers": "1:4"}, 4), ({"driver": True}, 0)],
)
def test_ticket_counts_the_maximum_workers(given: dict[str, object], workers: int | None) -> None:
    config = RunConfig(command=("train.py",), run_name="own", **given)  # ty: ignore[invalid-argument-type]
    assert Ticket.of(config, "ada", 1.0).workers == workers


DRIVERS: dict[str, Any] = {
    "a driver by hand": (None, None, False),
    "an empty address": (None, "", False),
    "a job of a head": (None, "127.0.0.1:6379", False),
    "run --local": ("1", None, True),
    "with an empty address": ("1", "", True),
    "a job's folder": ("/home/ada/.ray-on-ecs/jobs/laptop/1", None, True),
    "a Ray program": ("1", "127.0.0.1:6379", False),
}


@pytest.mark.parametrize(("local", "address", "is_without"), DRIVERS.values(), ids=DRIVERS)
def test_only_a_local_script_is_without_ray(
    monkeypatch: pytest.MonkeyPatch, local: str | None, address: str | None, is_without: bool
) -> None:
    for name, value in {LOCAL_VARIABLE: local, "RAY_ADDRESS": address}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert queue.is_without_ray() == is_without
