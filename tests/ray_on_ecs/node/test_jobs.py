"""A head stops its jobs before it stops, and submits again those that lost their driver or their head.

tests/commands/test_resubmission.py has the same with a real Ray.
"""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs import secrets
from ray_on_ecs.node import api, jobs
from ray_on_ecs.node.jobs import PROGRESS_SECONDS, JobRecovery
from ray_on_ecs.node.state import State
from tests.ray_on_ecs.node.conftest import Head

COMMAND_NAME = "ray-head"

RUNNING = {"status": "RUNNING"}
# What Ray reports of jobs that have ended.
DIED = {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED"}
ENDED_WITH = {"status": "FAILED", "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}
KILLED = {**ENDED_WITH, "driver_exit_code": -signal.SIGKILL}
STOPPED = {"status": "STOPPED"}


@pytest.fixture
def ray(head: Head, monkeypatch: pytest.MonkeyPatch) -> Head:
    """A head that doesn't keep a test waiting."""
    monkeypatch.setattr(jobs, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "LAST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "ORPHANS_POLL_SECONDS", 0.0)
    return head


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "2.60.0")


def a_job(
    ended: Mapping[str, object] = RUNNING,
    submission_id: str = "mine",
    resubmissions: int = 0,
    maximum: int = 3,
    **details: Any,
) -> dict[str, Any]:
    """Return a job of the run `mine` as the Jobs API lists it."""
    metadata = {"run_name": "mine", "storage_path": "s3://b/runs", "max_resubmissions": str(maximum)}
    counted = {"resubmissions": str(resubmissions)} if resubmissions else {}
    return {
        "submission_id": submission_id,
        "entrypoint": "python -P -m ray_on_ecs.run --run-name mine train.py",
        "metadata": {**metadata, **counted},
        "runtime_env": {"env_vars": {"A": "1"}},
        "start_time": 1_000_000,
        "end_time": 1_060_000,
        **ended,
        **details,
    }


def test_running_jobs_are_stopped(ray: Head) -> None:
    ray.answer = [
        {"submission_id": "raysubmit_1", "status": "RUNNING"},
        {"submission_id": "raysubmit_2", "status": "SUCCEEDED"},
        {"submission_id": None, "status": "RUNNING"},  # a driver that was not submitted can't be stopped either
    ]
    JobRecovery(None).stop_jobs()
    assert ray.posted == ["/api/jobs/raysubmit_1/stop"]


def test_silent_head_is_stopped(ray: Head, capsys: pytest.CaptureFixture[str]) -> None:
    ray.failing = True
    assert JobRecovery(None).stop_jobs() is signal.SIGTERM
    assert "the jobs are not known" in capsys.readouterr().err


def test_failed_stop_does_not_keep_other_jobs(ray: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.answer = [{"submission_id": name, "status": "RUNNING"} for name in ("first", "second")]
    requested: list[str] = []

    def refuse(url: str) -> None:
        requested.append(url.split("/")[-2])
        raise OSError("500")

    monkeypatch.setattr(api, "post", refuse)
    JobRecovery(None).stop_jobs()
    assert requested == ["first", "second"]


def test_orphaned_jobs_become_failed(
    ray: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recovery = JobRecovery(None)
    old = {"submission_id": "old", "status": "RUNNING", "start_time": 9_000}
    new = {"submission_id": "new", "status": "RUNNING", "start_time": 1e15}
    failures = [OSError("the dashboard is busy")]
    requested: list[str] = []

    def get(url: str) -> list[dict[str, Any]]:
        if failures:
            raise failures.pop()
        return [old, new]

    def stop(url: str) -> None:
        requested.append(url.split("/")[-2])
        if len(requested) == 1:
            raise OSError("500: the agent is not up yet")
        old["status"] = "FAILED"

    monkeypatch.setattr(api, "get", get)
    monkeypatch.setattr(api, "post", stop)
    recovery.fail_orphaned_jobs()
    assert requested == ["old", "old"]
    assert capsys.readouterr().out == "ray-head: job old has ended with the head that it ran on\n"


def test_state_is_healthy_once_jobs_are_read(ray: Head, monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    state.record_start()
    requested: list[str] = []
    recovery = JobRecovery(state)
    monkeypatch.setattr(recovery, "fail_orphaned_jobs", lambda: requested.append("orphans"))
    monkeypatch.setattr(recovery, "resubmit_lost_jobs", lambda: requested.append("lost"))
    monkeypatch.setattr(api, "get", lambda url: requested.append(url.rpartition("/")[2]))
    recovery.stop_jobs()
    requested.clear()
    recovery.run()
    healthy = ["version", "gcs_healthz"]
    assert requested == [*healthy, "orphans", "lost", *healthy]
    assert not list(state.folder.parent.iterdir()), "the start doesn't count"


@pytest.mark.parametrize(
    "ended",
    [
        DIED,
        {**DIED, "error_type": "JOB_SUPERVISOR_ACTOR_START_FAILURE"},
        KILLED,
        {**ENDED_WITH, "driver_exit_code": -signal.SIGSEGV},
        {**ENDED_WITH, "driver_exit_code": 128 + signal.SIGKILL},
    ],
    ids=["the head was lost", "its supervisor is unknown", "killed", "crashed", "killed below a shell"],
)
def test_job_without_a_driver_is_resubmitted(
    ray: Head, capsys: pytest.CaptureFixture[str], ended: dict[str, Any]
) -> None:
    lost = a_job(ended)
    ray.answer = [lost]
    JobRecovery(None).resubmit_lost_jobs()
    assert ray.posted == ["/api/jobs/"]
    assert ray.bodies == [
        {
            "submission_id": "mine.2",
            "entrypoint": lost["entrypoint"],
            "runtime_env": lost["runtime_env"],
            "metadata": {**lost["metadata"], "resubmissions": "1"},
        }
    ]
    assert capsys.readouterr().out == "ray-head: job mine was lost; submitted again as mine.2 (1 of 3)\n"


@pytest.mark.parametrize(
    "job",
    [
        a_job(),
        a_job({"status": "SUCCEEDED"}),
        a_job(STOPPED),
        *(a_job(ENDED_WITH, driver_exit_code=code) for code in (1, 2, 3, 130, 143, -signal.SIGTERM, -signal.SIGINT)),
        a_job({**DIED, "error_type": "RUNTIME_ENV_SETUP_FAILURE"}),
        a_job({**DIED, "error_type": "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"}),
        a_job(DIED, maximum=0),
        a_job(DIED, metadata={"max_resubmissions": "3"}),
        a_job(DIED, metadata={"run_name": "mine"}),
        a_job(DIED, metadata=None),
    ],
    ids=lambda job: f"{job['status']}-{job.get('driver_exit_code', job.get('error_type'))}-{job['metadata']}"[:60],
)
def test_other_jobs_are_left_alone(ray: Head, capsys: pytest.CaptureFixture[str], job: dict[str, Any]) -> None:
    ray.answer = [job]
    JobRecovery(None).resubmit_lost_jobs()
    assert ray.posted == []
    assert capsys.readouterr().out == ""


def test_only_the_last_job_of_a_run_counts(ray: Head) -> None:
    elsewhere = a_job(DIED, "other", start_time=3_000_000)
    elsewhere["metadata"] = {**elsewhere["metadata"], "storage_path": "results"}
    ray.answer = [a_job(RUNNING, "mine.2", start_time=2_000_000), a_job(DIED), elsewhere]
    JobRecovery(None).resubmit_lost_jobs()
    assert [body["metadata"]["storage_path"] for body in ray.bodies] == ["results"]
    assert ray.bodies[0]["submission_id"] == "mine.3"


def refused(**details: Any) -> dict[str, Any]:
    """A second job of the run, which the run's lock refuses a few seconds after its start."""
    return a_job(ENDED_WITH, "mine.2", driver_exit_code=2, start_time=1_010_000, end_time=1_014_000, **details)


def test_job_refused_by_the_lock_is_ignored(ray: Head) -> None:
    ray.answer = [refused(), a_job(DIED)]
    JobRecovery(None).resubmit_lost_jobs()
    assert [body["submission_id"] for body in ray.bodies] == ["mine.3"]


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        ([a_job(RUNNING), refused()], "the first one trains"),
        ([a_job({"status": "SUCCEEDED"}), refused()], "its run is done"),
        ([a_job(STOPPED), refused()], "its user stopped it"),
        ([a_job(DIED, end_time=1_005_000), refused()], "it was the run's only one then, and would end so again"),
        ([a_job(DIED), a_job(RUNNING, "mine.2", start_time=1_010_000, end_time=None)], "it took the run over"),
        ([a_job(RUNNING, end_time=None), a_job(RUNNING, "mine.2", start_time=1_010_000)], "both run for a moment"),
    ],
    ids=lambda value: value if isinstance(value, str) else "jobs",
)
def test_run_with_an_active_job_is_not_resubmitted(ray: Head, jobs: list[Any], why: str) -> None:
    ray.answer = jobs
    JobRecovery(None).resubmit_lost_jobs()
    assert ray.bodies == [], why


def test_run_without_resubmissions_loses_its_secrets(
    ray: Head, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = secrets.store("s3://b/runs/mine")
    store.put({"TOKEN": "value", "OTHER": "of another"})
    metadata = {**a_job()["metadata"], jobs.SECRETS: json.dumps(["s3://b/runs/mine", "TOKEN"])}
    recovery = JobRecovery(None)
    ray.answer = [a_job(KILLED, metadata=metadata)]
    recovery.resubmit_lost_jobs()
    assert store.read(["TOKEN"]), "it goes on"
    ray.answer = [a_job(KILLED, "mine.4", metadata={**metadata, jobs.RESUBMISSIONS: "3"})]
    for _ in range(2):
        recovery.resubmit_lost_jobs()
        assert store.read(["TOKEN", "OTHER"]) == {"OTHER": "of another"}


def test_resubmissions_in_a_row_are_limited(ray: Head, capsys: pytest.CaptureFixture[str]) -> None:
    ray.answer = [a_job(KILLED, "mine.4", resubmissions=3)]
    recovery = JobRecovery(None)
    for _ in range(2):
        recovery.resubmit_lost_jobs()
    assert ray.bodies == []
    said = "ray-head: job mine.4 is not submitted again: its run was lost 4 times in a row\n"
    assert capsys.readouterr().out == said


def test_progress_resets_resubmissions(ray: Head) -> None:
    end = 1_000_000 + 1000 * PROGRESS_SECONDS
    ray.answer = [a_job(KILLED, "mine.4", resubmissions=3, end_time=end)]
    JobRecovery(None).resubmit_lost_jobs()
    assert ray.bodies[0]["metadata"]["resubmissions"] == "1"


def test_next_head_resubmits_jobs_that_a_head_stopped(ray: Head, state: State) -> None:
    running = a_job()
    ray.answer = [running, a_job(STOPPED, "by-user", metadata={"run_name": "by-user", "max_resubmissions": "3"})]
    state.folder.mkdir()
    JobRecovery(state).stop_jobs()
    running.update(STOPPED)
    ray.bodies.clear()
    next_head = JobRecovery(state)
    next_head.resubmit_lost_jobs()
    assert [body["submission_id"] for body in ray.bodies] == ["mine.2"]
    state.mark_healthy()
    assert state.interrupted_jobs == set()


def test_nothing_is_submitted_while_the_head_stops(ray: Head) -> None:
    ray.answer = [a_job(KILLED)]
    recovery = JobRecovery(None)
    recovery.stop_jobs()
    recovery.resubmit_lost_jobs()
    assert ray.bodies == []


def test_jobs_are_stopped_without_writable_state(ray: Head, state: State, capsys: pytest.CaptureFixture[str]) -> None:
    ray.answer = [a_job()]
    JobRecovery(State(state.folder / "missing" / "2.60.0")).stop_jobs()
    assert ray.posted == ["/api/jobs/mine/stop"]
    assert "the next head will not submit the jobs again" in capsys.readouterr().err


def test_refused_resubmission_costs_one_line(
    ray: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.answer = [a_job(KILLED)]

    def refuse(url: str, body: object, timeout: float) -> None:
        raise OSError("500")

    monkeypatch.setattr(api, "post", refuse)
    recovery = JobRecovery(None)
    for _ in range(2):
        recovery.resubmit_lost_jobs()
    assert capsys.readouterr().out == "ray-head: job mine could not be submitted again (500)\n"


@pytest.mark.parametrize("answer", [{"of": "another server"}, "text", [1], None, [None], [{}], [[]]])
def test_wrong_list_of_jobs_is_an_error(ray: Head, answer: object) -> None:
    ray.answer = answer
    with pytest.raises(OSError, match="not what Ray lists"):
        jobs._submitted_jobs()


@pytest.mark.parametrize(
    ("statuses", "under_way"),
    [([], False), (["SUCCEEDED", "FAILED", "STOPPED"], False), (["PENDING"], True), (["SUCCEEDED", "RUNNING"], True)],
)
def test_head_is_in_use_during_a_job(ray: Head, statuses: list[str], under_way: bool) -> None:
    ray.answer = [a_job({"status": status}, f"job-{status}") for status in statuses]
    assert jobs.any_under_way() is under_way


def test_driver_started_by_hand_counts(ray: Head) -> None:
    ray.answer = [{"submission_id": None, "type": "DRIVER", "status": "RUNNING"}]
    assert jobs.any_under_way()


def test_silent_head_is_not_idle(ray: Head) -> None:
    ray.failing = True
    with pytest.raises(OSError, match="500"):
        jobs.any_under_way()


def test_next_job_id_is_free() -> None:
    assert jobs.next_id("mine", {"mine", "mine.2", "other"}) == "mine.3"


@pytest.mark.parametrize(
    "metadata",
    [
        *[{"secrets": text} for text in ("not json", "5", "[]", "[5,6]", "null", "[" * 9000)],
        *[{"max_resubmissions": text} for text in ("9" * 5000, "-1", "1e3", "\u0663", "", " 3", "0x3")],
        *[{"resubmissions": text} for text in ("9" * 5000, "x")],
        {"run_name": "a/../b"},
        {"storage_path": None},
        {"run_name": ["a"]},
    ],
)
def test_broken_metadata_of_a_job_cost_no_other_run(ray: Head, metadata: dict[str, Any]) -> None:
    broken = a_job(KILLED, "other")
    broken["metadata"] = {**broken["metadata"], "run_name": "other", **metadata}
    ray.answer = [broken, a_job(KILLED)]
    recovery = JobRecovery(None)
    for _ in range(2):
        recovery.resubmit_lost_jobs()
    assert "mine.2" in [body["submission_id"] for body in ray.bodies]
