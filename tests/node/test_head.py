"""A head that is asked to stop stops its jobs first; the health check tells well from ill."""

import pytest

from raynode import head as ray_head
from raynode import health
from tests.node.conftest import Head


@pytest.fixture
def jobs(head: Head, monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setattr(ray_head, "JOBS", f"http://127.0.0.1:{head.server_port}/api/jobs/")
    monkeypatch.setattr(ray_head, "JOBS_SECONDS", 0.1)
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
    assert "could not be stopped" in capsys.readouterr().err


@pytest.mark.parametrize(("token", "status"), [("right", 0), ("wrong", 1)])
def test_a_head_is_well_if_it_takes_its_own_token(
    head: Head, monkeypatch: pytest.MonkeyPatch, token: str, status: int
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setitem(health.URLS, "head", f"http://127.0.0.1:{head.server_port}/api/version")
    monkeypatch.setattr("sys.argv", ["ray-health", "head"])
    assert health.main() == status


def test_the_health_check_knows_two_kinds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ray-health", "heads"])
    assert health.main() == 2
    assert "usage: ray-health head|worker" in capsys.readouterr().err
