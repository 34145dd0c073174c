"""`ray-on-ecs logs` of runs whose jobs are gone."""

from collections.abc import Callable
from typing import Any

import pytest

from ray_on_ecs.cli.follow import progress_words
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.clusters import LocalCluster
from tests.ray_on_ecs.cli.folders import Folders, Jobs, job, jobs_here

JOB_LOG = "*** SIGTERM received at time=1795616332 on cpu 1 ***\nrun      mine\n\x1b[31mred\x1b[0m\n"


@pytest.fixture
def folders(folders: Folders) -> Folders:
    """A storage path with the log of the run `mine`."""
    folders.of("mine").write("logs/20261125T141834Z.txt", JOB_LOG.encode())
    return folders


@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("failed", 1), ("interrupted", 130), ("training", 3)])
def test_follow_ends_with_status_of_ended_run(
    folders: Folders, capsys: pytest.CaptureFixture[str], state: str, status: int
) -> None:
    folders.status("mine", state)
    assert main(["logs", "--local", "--follow", "mine"]) == status
    assert capsys.readouterr().out == "run      mine\nred\n"
    assert main(["logs", "--local", "mine"]) == 0


def test_log_of_an_unknown_run_is_one_line(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--local", "absent"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ray-on-ecs: ")
    assert "run 'absent' not found in" in err
    assert err.count("\n") == 1


def test_stored_log_of_a_run_whose_name_is_used_elsewhere(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.status("mine", "failed")
    with jobs_here(job("mine", metadata={"run_name": "mine", "storage_path": "/elsewhere"})):
        assert main(["logs", "--local", "--follow", "mine"]) == 1
    assert capsys.readouterr().out == "run      mine\nred\n"


LOGS = {"mine": "a\nb\n", "mine.2": "[rank 0] c\n[rank 1] d\r\n\N{LATIN SMALL LETTER E WITH ACUTE}\nhalf"}
LINES = ["a", "b", "[rank 0] c", "[rank 1] d", "\N{LATIN SMALL LETTER E WITH ACUTE}"]


class Growing(Jobs):
    """Jobs of which the last one prints more while it is followed, and ends."""

    def log(self, job_id: str) -> str:
        return LOGS[job_id]

    def tail(self, job_id: str, show: Callable[[bytes], None], offset: int = 0) -> None:
        text = f"{LOGS[job_id]} end\nnext\nlast\n".encode()
        for part in (text[:14], text[14:]):
            show(part)
        self.jobs[job_id] |= {"status": "SUCCEEDED", "driver_exit_code": 0}


@pytest.mark.parametrize("tail", [None, 0, 1, 2, 3, 4, 5, 99])
@pytest.mark.parametrize("is_under_way", [True, False])
def test_tail_is_the_end_of_the_log_and_what_follows(
    folders: Folders,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tail: int | None,
    is_under_way: bool,
) -> None:
    second = job("mine.2", "RUNNING", metadata={"run_name": "mine", "storage_path": folders.path})
    jobs = Growing(job("mine", "FAILED", driver_exit_code=1), second)
    monkeypatch.setattr(LocalCluster, "jobs", lambda *_: jobs)
    lines, following = LINES, ["half end", "next", "last"]
    if not is_under_way:
        second |= {"status": "SUCCEEDED", "driver_exit_code": 0}
        lines, following = [*LINES, "half"], []
    words = [] if tail is None else ["--tail", str(tail)]
    assert main(["logs", "--local", "--follow", *words, "mine"]) == 0
    kept = lines if tail is None else lines[max(len(lines) - tail, 0) :]
    assert capsys.readouterr().out.splitlines() == [*kept, *following]


@pytest.mark.parametrize("number", ["-1", "x", "1.5", ""])
def test_wrong_number_of_lines_is_one_line(folders: Folders, capsys: pytest.CaptureFixture[str], number: str) -> None:
    assert main(["logs", "--local", f"--tail={number}", "mine"]) == 2
    assert "--tail" in capsys.readouterr().err


END = {"step": 1200, "total": 10_000, "seconds_left": 11_400.0, "usd": 12.4, "usd_at_end": 41.3}


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (
            {"state": "training", "end": END, "loss": 0.5, "workers": 2, "cost_usd": 7.4},
            "training · step 1,200 of 10,000, 3 h 10 min left · loss 0.5000 · 2 workers · "
            "12.40 USD so far, about 41 at the end",
        ),
        ({"state": "waiting", "end": END}, "waiting · step 1,200 of 10,000 · 12.40 USD so far"),
        ({"state": "training", "step": 7, "end": None, "cost_usd": 7.4}, "training · step 7 · 7.40 USD"),
        ({"state": "waiting", "cost_usd": 0.0}, "waiting · 0.00 USD"),
        ({"state": "queued", "behind": "first", "line": "l4"}, "queued behind first in pool l4"),
    ],
)
def test_last_line_on_a_terminal(status: dict[str, Any], line: str) -> None:
    assert progress_words(status) == line
