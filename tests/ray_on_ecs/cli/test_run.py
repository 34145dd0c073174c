"""`ray-on-ecs run` in the head's container: the job that it submits, and the exit status of the job's end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.cli.run import _earlier_command
from ray_on_ecs.cluster import jobs
from ray_on_ecs.config import RunConfig
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import Job
from ray_on_ecs.storage.run_storage import RunStorage
from tests.ray_on_ecs.cli.folders import job

Run = Callable[..., int]
AGAIN = "nothing is stored yet, so the same command with --run-name gone starts from the beginning\n"


@pytest.fixture
def on_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The script of the commands."""
    monkeypatch.setenv("RAY_ON_ECS_CLUSTER", "head")
    monkeypatch.setenv("RAY_HEAD_STATE", str(tmp_path))
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", str(tmp_path / "runs"))
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").touch()
    return ["--working-dir", str(code), "train.py"]


@pytest.fixture
def submitted() -> list[Job]:
    """The submitted jobs."""
    return []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, on_head: list[str], submitted: list[Job]) -> Run:
    """Return the exit status of the command for a job with this end and an empty log."""

    def run(*words: str, **details: Any) -> int:
        def submit(jobs: MachineJobs, uri: str, metadata: dict[str, str]) -> str:
            submitted.append(job(metadata["run_name"], uri=uri, metadata=metadata, **details))
            return metadata["run_name"]

        replaced: dict[str, Callable[..., Any]] = {
            "list_jobs": lambda jobs: submitted,
            "submit": submit,
            "tail": lambda jobs, job_id, show, offset: None,
            "job": lambda jobs, job_id: submitted[0],
        }
        for name, function in replaced.items():
            monkeypatch.setattr(MachineJobs, name, function)
        monkeypatch.setattr(jobs, "RESUBMISSION_SECONDS", 0.0)
        return main(["run", *words])

    return run


@pytest.mark.parametrize(
    ("details", "status", "line"),
    [
        ({"status": "FAILED", "driver_exit_code": -9}, 137, f"ray-on-ecs: job gone was ended by signal 9; {AGAIN}"),
        (
            {"status": "FAILED", "message": "The actor\ndied."},
            1,
            f"ray-on-ecs: job gone failed (The actor died.); {AGAIN}",
        ),
        ({"status": "STOPPED"}, 130, f"ray-on-ecs: job gone was stopped; {AGAIN}"),
        ({"status": "FAILED", "driver_exit_code": 2}, 2, "code\n"),
        (
            {"status": "SUCCEEDED", "driver_exit_code": 0},
            0,
            "ray-on-ecs open gone shows its report, ray-on-ecs fetch gone copies it to this machine\n",
        ),
        (
            {"status": "FAILED", "driver_exit_code": 5},
            5,
            "ray-on-ecs open gone shows its report, ray-on-ecs fetch gone copies it to this machine\n",
        ),
    ],
    ids=["signal", "no driver", "stopped", "refused", "finished", "without EFA"],
)
def test_exit_status_and_last_line_name_the_end(
    run: Run,
    on_head: list[str],
    capsys: pytest.CaptureFixture[str],
    details: dict[str, Any],
    status: int,
    line: str,
) -> None:
    assert run("--run-name", "gone", *on_head, **details) == status
    assert capsys.readouterr().err.endswith(line)


def test_generated_run_name_can_be_given_again(
    run: Run, on_head: list[str], submitted: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    run(*on_head, "--epochs", "0", status="SUCCEEDED", driver_exit_code=0)
    name = capsys.readouterr().out.split()[1]
    assert name.startswith("train-")
    [found] = submitted
    assert (found["submission_id"], found["metadata"]["run_name"]) == (name, name)
    assert found["uri"].endswith(f"/{name}")


@pytest.mark.parametrize("number", [["-1"], ["x"], ["1.5"], []], ids=["negative", "text", "fraction", "nothing"])
def test_wrong_number_of_resubmissions_is_one_line(number: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--max-resubmissions", *number]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ray-on-ecs: "), err
    assert "--max-resubmissions" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "environment", "allowed"),
    [([], None, "3"), (["--max-resubmissions", "0"], "5", "0"), (["--max-resubmissions=7"], None, "7"), ([], "5", "5")],
    ids=["the default", "none", "another number", "of the environment"],
)
def test_job_has_its_limit_of_resubmissions(
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    on_head: list[str],
    submitted: list[Job],
    words: list[str],
    environment: str | None,
    allowed: str,
) -> None:
    monkeypatch.delenv("RAY_ON_ECS_MAX_RESUBMISSIONS", raising=False)
    if environment:
        monkeypatch.setenv("RAY_ON_ECS_MAX_RESUBMISSIONS", environment)
    run(*words, *on_head, status="SUCCEEDED", driver_exit_code=0)
    [found] = submitted
    assert found["metadata"]["max_resubmissions"] == allowed


@pytest.mark.parametrize(("words", "stops"), [([], None), (["--then-stop"], "true")])
def test_job_says_that_its_workers_stop(
    run: Run, on_head: list[str], submitted: list[Job], monkeypatch: pytest.MonkeyPatch, words: list[str], stops: str
) -> None:
    monkeypatch.setenv("CLUSTER_INFO", "info")  # the head of a stack
    run(*words, *on_head, status="SUCCEEDED", driver_exit_code=0)
    [found] = submitted
    assert found["metadata"].get("then_stop") == stops


@pytest.mark.parametrize(
    ("earlier", "says"),
    [
        (
            ["old.py", "--lr", "1"],
            "run first ran old.py before, and train.py gets its files; another --run-name keeps them",
        ),
        (["train.py", "--lr", "1"], ""),
        (["./train.py"], ""),
        ([], ""),
        (None, ""),
        (5, ""),
    ],
)
def test_another_script_under_the_name_of_a_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], earlier: object, says: str
) -> None:
    storage = RunStorage.open(str(tmp_path), "first")
    storage.write_json("run.json", {"format": 1, "settings": {"command": earlier}})
    _earlier_command(storage, storage, RunConfig(command=("train.py",), run_name="first"), "")
    output = capsys.readouterr().err
    assert output.startswith(says)
    assert bool(output) == bool(says)
