"""A head that is asked to stop stops its jobs first; the health check tells well from ill."""

import pytest

from raynode import api, health, ports
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


@pytest.mark.parametrize("kind", ["head", "worker"])
@pytest.mark.parametrize(("token", "status"), [("right", 0), ("wrong", 1)])
def test_a_node_is_well_if_all_that_is_asked_answers(
    head: Head, monkeypatch: pytest.MonkeyPatch, kind: str, token: str, status: int
) -> None:
    monkeypatch.setattr(ports, "AGENT", head.server_port)
    monkeypatch.setenv("RAY_HEAD_HOST", "127.0.0.1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setattr("sys.argv", ["ray-health", kind])
    assert health.main() == status


def test_a_worker_whose_head_does_not_answer_is_ill(
    head: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ports, "AGENT", head.server_port)
    monkeypatch.setenv("RAY_HEAD_HOST", "nobody.invalid")
    monkeypatch.setattr("sys.argv", ["ray-health", "worker"])
    assert health.main() == 1
    assert "nobody.invalid" in capsys.readouterr().err


def test_no_proxy_reads_the_token(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert api.get(f"http://127.0.0.1:{head.server_port}/api/version") == head.answer


def test_the_health_check_knows_two_kinds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ray-health", "heads"])
    assert health.main() == 2
    assert "usage: ray-health head|worker" in capsys.readouterr().err
