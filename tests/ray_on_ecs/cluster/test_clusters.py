"""The start of Ray for a local run."""

import os
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cluster import local_head
from ray_on_ecs.cluster.clusters import ComposeCluster, LocalCluster
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.cluster.local_head import LocalHead
from ray_on_ecs.errors import UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("workers", "started_with", "line"),
    [
        (0, 4, "starting Ray on this machine"),
        (4, 4, "starting Ray on this machine"),
        (8, 8, "starting Ray on this machine; 8 workers share 4 CPUs"),
    ],
)
def test_workers_that_share_cpus_are_announced(
    monkeypatch: pytest.MonkeyPatch, workers: int, started_with: int, line: str
) -> None:
    started: list[int] = []
    replaced: dict[str, Any] = {"find": lambda: None, "start": started.append}
    for name, function in replaced.items():
        monkeypatch.setattr(local_head, name, function)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    lines: list[str] = []
    assert LocalCluster().up(workers, lines.append)
    assert (started, lines) == ([started_with], [line])


def test_ray_stays_until_the_last_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command has not submitted its run yet, so Ray has no job."""
    stopped: list[LocalHead] = []
    head = LocalHead("http://127.0.0.1:1", "secret", 1, 1.0, "ray", 4)
    monkeypatch.setattr(local_head, "find", lambda: head)
    monkeypatch.setattr(local_head, "stop", stopped.append)
    monkeypatch.setattr(Head, "runs_under_way", lambda _: set())
    first, second = LocalCluster(), LocalCluster()
    first.up(1, print)
    second.up(1, print)
    assert not first.down("first")
    assert not stopped
    assert second.down("second")
    assert stopped == [head]


def test_hints_repeat_a_typed_storage_path() -> None:
    cluster = LocalCluster()
    cluster.typed = " --local"
    assert cluster.command("fetch first") == "ray-on-ecs fetch --local first"
    cluster.typed_path = "/mnt/my runs"
    assert cluster.command("fetch first") == "RAY_ON_ECS_STORAGE_PATH='/mnt/my runs' ray-on-ecs fetch --local first"


def test_silent_head_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    head = LocalHead("http://127.0.0.1:9", "secret", 1, 1.0, "ray", 4)
    monkeypatch.setattr(local_head, "find", lambda: head)
    monkeypatch.setattr(local_head, "stop", lambda _: pytest.fail("a run may be under way"))
    cluster = LocalCluster()
    cluster.up(1, print)
    assert not cluster.down("first")


def test_more_workers_than_the_running_head_has_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head = LocalHead("http://127.0.0.1:9", "secret", 1, 1.0, "ray", 2)
    monkeypatch.setattr(local_head, "find", lambda: head)
    cluster = LocalCluster()
    with pytest.raises(UsageError, match="has been started for 2 workers, and not for 4; run them once its runs have"):
        cluster.up(4, print)


@pytest.mark.parametrize(
    ("content", "variable", "token"),
    [
        ("RAY_AUTH_TOKEN=abc\n", "", "abc"),
        ("A=1\nRAY_AUTH_TOKEN=a=b", "", "a=b"),
        ("RAY_AUTH_TOKEN=abc\n", "other", "other"),
        ("A=1\n", "", ""),
        (None, "", ""),
    ],
)
def test_token_of_compose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, variable: str, token: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN", variable)
    if content is not None:
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker/.env").write_text(content)
    with ComposeCluster()._reach() as head:
        assert head.token == token
