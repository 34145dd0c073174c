"""A head that is asked to stop stops its jobs first; the health check tells well from ill."""

from pathlib import Path

import pytest

from raynode import api, health, ports, state
from raynode import head as ray_head
from tests.node.conftest import Head


@pytest.fixture
def jobs(head: Head, monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setattr(ray_head, "JOBS", f"http://127.0.0.1:{head.server_port}/api/jobs/")
    monkeypatch.setattr(ray_head, "JOBS_SECONDS", 0.1)
    monkeypatch.setattr(ray_head, "LAST_LINE_SECONDS", 0.0)
    return head


def test_running_jobs_are_stopped(jobs: Head) -> None:
    jobs.answer = [
        {"submission_id": "raysubmit_1", "status": "RUNNING"},
        {"submission_id": "raysubmit_2", "status": "SUCCEEDED"},
        {"submission_id": None, "status": "RUNNING"},  # a driver that is no job: it has nobody to stop it
    ]
    ray_head.stop_jobs()
    assert jobs.posted == ["/api/jobs/raysubmit_1/stop"]


def test_a_head_that_no_longer_answers_stops_all_the_same(jobs: Head, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.failing = True
    ray_head.stop_jobs()
    assert "the jobs are not known" in capsys.readouterr().err


def test_one_job_that_cannot_be_stopped_does_not_keep_the_others(jobs: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.answer = [{"submission_id": name, "status": "RUNNING"} for name in ("first", "second")]
    asked: list[str] = []

    def refuse(url: str) -> None:
        asked.append(url.split("/")[-2])
        raise OSError("500")

    monkeypatch.setattr(api, "post", refuse)
    ray_head.stop_jobs()
    assert asked == ["first", "second"]


def test_jobs_from_before_the_head_are_ended_until_ray_says_so(
    jobs: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_head, "LOST_SECONDS_BETWEEN", 0.0)
    old = {"submission_id": "old", "status": "RUNNING", "start_time": 9_000}
    new = {"submission_id": "new", "status": "RUNNING", "start_time": 11_000}
    jobs.answer = [old, new]
    asked: list[str] = []

    def stop(url: str) -> None:
        asked.append(url.split("/")[-2])
        if len(asked) == 1:
            raise OSError("500: the agent is not up yet")
        old["status"] = "FAILED"

    monkeypatch.setattr(api, "post", stop)
    ray_head.end_lost_jobs(began=10.0)
    assert asked == ["old", "old"], "a job that was submitted to this head goes on"
    assert capsys.readouterr().out == "ray-head: job old has ended with the head that it ran on\n"


def test_state_is_sound_when_the_head_is_well_with_its_jobs(
    jobs: Head, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = state.State(tmp_path / "2.60.0")
    kept.begin()
    asked: list[str] = []
    monkeypatch.setattr(ray_head, "end_lost_jobs", lambda began: asked.append("jobs"))
    monkeypatch.setattr(api, "get", lambda url: asked.append(url.rpartition("/")[2]))
    ray_head.take_up(kept, began=0.0)
    assert asked == ["version", "gcs_healthz", "jobs", "version", "gcs_healthz"], "a jobs' table can be damaged, too"
    assert not list(tmp_path.iterdir()), "the start doesn't count"


@pytest.mark.parametrize("kind", ["head", "worker"])
@pytest.mark.parametrize(("token", "status"), [("right", 0), ("wrong", 1)])
def test_a_node_is_well_if_all_that_is_asked_answers(
    head: Head, monkeypatch: pytest.MonkeyPatch, kind: str, token: str, status: int
) -> None:
    monkeypatch.setattr(ports, "AGENT", head.server_port)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setattr("sys.argv", ["ray-health", kind])
    assert health.main() == status


def test_a_worker_whose_head_does_not_answer_is_well(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "AGENT", head.server_port)
    monkeypatch.setenv("RAY_HEAD_HOST", "nobody.invalid")
    monkeypatch.setattr("sys.argv", ["ray-health", "worker"])
    assert health.main() == 0, "it would be replaced just when the head comes back"


def test_no_proxy_reads_the_token(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert api.get(f"http://127.0.0.1:{head.server_port}/api/version") == head.answer


def test_the_health_check_knows_two_kinds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ray-health", "heads"])
    assert health.main() == 2
    assert "usage: ray-health head|worker" in capsys.readouterr().err
