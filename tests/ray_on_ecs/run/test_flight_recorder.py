"""The flight recorder of PyTorch as it is read here: these names and numbers of it are private."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs import sdk
from ray_on_ecs.run import collectives, flight_recorder, slow_ranks
from tests.slow_rank_run import run

RANKS = Path(__file__).with_name("recorded_ranks.py")


def test_folder_is_that_of_the_sdk() -> None:
    assert flight_recorder.FOLDER_VARIABLE == sdk.FOLDER_VARIABLE


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a script whose collectives are read."""
    folder.mkdir(exist_ok=True)
    path = str(collectives.install(folder))
    own = {sdk.FOLDER_VARIABLE: str(folder), "PYTHONPATH": path, "TORCH_FR_BUFFER_SIZE": "2000"}
    return {**os.environ, **own, **variables}


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Return the looks of the two ranks of the script."""
    folder = tmp_path_factory.mktemp("ranks")
    commands = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(folder)],
            env=environment(folder / f"rank-{rank}", RANK=str(rank)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [[json.loads(line) for line in command.communicate(timeout=100)[0].splitlines()] for command in commands]


def test_nothing_is_read_without_a_process_group(looks: list[list[Any]]) -> None:
    assert [of_rank[0] for of_rank in looks] == [None, None]


def test_arrivals_have_group_number_and_time(looks: list[list[Any]]) -> None:
    for rank, of_rank in enumerate(looks):
        first = of_rank[1]
        assert (first["rank"], first["number"], first["p2p"], first["groups"]) == (rank, 1, 0, {"gloo/0/0": [0, 1]})
        assert [(group, number) for group, number, _ in first["arrivals"]] == [("gloo/0/0", n) for n in (1, 2, 3)]
        times = [at for _, _, at in first["arrivals"]]
        assert times == sorted(times)
        assert 0 <= time.time() - times[0] < 600


def test_groups_are_told_apart(looks: list[list[Any]]) -> None:
    for rank, of_rank in enumerate(looks):
        found = {tuple(of_rank[2]["groups"][group]): number for group, number, _ in of_rank[2]["arrivals"]}
        assert found == {(rank,): 1, (0, 1): 4}  # of the pair, and then of the default group
        assert len(of_rank[2]["groups"]) == 3


def test_sends_and_receives_are_counted(looks: list[list[Any]]) -> None:
    assert [of_rank[2]["p2p"] for of_rank in looks] == [1, 1]


def test_nothing_is_read_twice(looks: list[list[Any]]) -> None:
    for of_rank in looks:
        assert (of_rank[3]["number"], of_rank[3]["arrivals"], of_rank[3]["p2p"]) == (3, [], 0)
        assert of_rank[3]["last"] == of_rank[2]["last"]


def test_last_collective_may_be_one_that_waits(looks: list[list[Any]]) -> None:
    for last in (of_rank[4]["last"] for of_rank in looks):
        assert (last["kind"], last["sequence"], last["group"]) == ("all_reduce", 5, "0")


def test_group_that_is_made_again_is_another(looks: list[list[Any]]) -> None:
    for of_rank in looks:
        assert of_rank[5]["arrivals"][-1][:2] == ["gloo/0/1", 1]


@pytest.mark.parametrize("count", [0, 1, flight_recorder.MOST, flight_recorder.MOST + 1, 2000])
def test_newest_entries_of_a_dump_are_parsed(count: int) -> None:
    dump = {
        "entries": [{"collective_seq_id": number, "process_group": ["0", "default_pg"]} for number in range(count)],
        "version": "2.10",
    }
    document = json.loads(flight_recorder._newest(json.dumps(dump, separators=(",", ":")).encode()))
    assert document == {"entries": dump["entries"][-flight_recorder.MOST :], "version": "2.10"}


def test_last_collective_of_a_rank_is_found(tmp_path: Path) -> None:
    assert collectives.last(tmp_path) is None
    of = {"kind": "all_reduce", "sequence": 7, "group": "0"}
    for rank, began in enumerate([5.0, 9.0]):
        document = {"rank": rank, "number": 1, "groups": {}, "p2p": 0, "arrivals": [], "last": {**of, "began": began}}
        (tmp_path / f"collectives-{rank}.json").write_text(json.dumps(document))
    (tmp_path / "collectives-2.json").write_text("{")
    assert collectives.last(tmp_path) == collectives.Last("all_reduce", 7, "0", 9.0)
    assert [reading.rank for reading in collectives.readings(tmp_path)] == [0, 1]


SCRIPTS = {
    "without torch": "",
    "that replaces the environment": "import os; os.environ.clear(); import torch",
    "that forks": "import os, torch; os.waitpid(os.fork() or os._exit(0), 0)",
    "whose child ends as it does": "import os, sys, torch; pid = os.fork(); pid or sys.exit(); os.waitpid(pid, 0)",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_script_does_not_notice_the_reader(script: str, tmp_path: Path) -> None:
    code = f"{script}\nimport sys, time; time.sleep(0.1); print(sorted(sys.argv))"
    done = subprocess.run(
        [sys.executable, "-c", code, "x"], env=environment(tmp_path), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['-c', 'x']\n", "")


def test_reader_outlasts_a_full_disk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([OSError("No space left on device"), None, AttributeError("_dump_fr_trace_json")])
    looks = []

    def look(self: flight_recorder.Reader, now: float) -> None:
        looks.append(now)
        if error := next(errors):
            raise error

    monkeypatch.setattr(flight_recorder.Reader, "look", look)
    monkeypatch.setattr(flight_recorder, "LOOK_SECONDS", 0.02)
    flight_recorder._run("", threading.Event())
    assert len(looks) == 3


LIMITS = {"MIN_COLLECTIVES": 40, "MIN_SECONDS": 1.0, "MIN_WAITS": 10, "HOLD_SECONDS": 0.0, "LOOK_SECONDS": 0.0}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little evidence is enough."""
    for name, value in LIMITS.items():
        monkeypatch.setattr(slow_ranks, name, value)


# With so little evidence a busy machine has other slow ranks, too.
@pytest.mark.ray  # with the tests that take long
@pytest.mark.usefixtures("short")
def test_slow_rank_of_a_training_is_named(tmp_path: Path) -> None:
    outcome = run("backward", tmp_path, seconds=300, until="rank 1")
    assert outcome.statuses == [0] * 4
    assert "rank 1" in {each["what"].partition(" comes")[0] for each in outcome.times}


@pytest.mark.usefixtures("short")
def test_slow_rank_is_named_by_the_counters_of_nccl(tmp_path: Path) -> None:
    outcome = run("forward", tmp_path, count=3, seconds=300, sampled=True, until="rank 1")
    assert "rank 1" in {each["what"].partition(" comes")[0] for each in outcome.times}
    assert all(last and last.kind == "" for last in outcome.last)
