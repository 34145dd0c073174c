"""The health check tells a healthy node from another one, and no request leaks the token."""

import pytest

from raynode import api, health, ports
from tests.raynode.conftest import Head


@pytest.mark.parametrize("kind", ["head", "worker"])
@pytest.mark.parametrize(("token", "status"), [("right", 0), ("wrong", 1)])
def test_a_node_is_healthy_if_all_its_urls_answer(
    head: Head, monkeypatch: pytest.MonkeyPatch, kind: str, token: str, status: int
) -> None:
    monkeypatch.setattr(ports, "AGENT", head.server_port)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setattr("sys.argv", ["ray-health", kind])
    assert health.main() == status


def test_a_worker_whose_head_does_not_answer_is_healthy(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
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
