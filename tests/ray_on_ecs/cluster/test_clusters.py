"""The start of Ray for a local run."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ray_on_ecs.cluster import local_head
from ray_on_ecs.cluster.clusters import ComposeCluster, LocalCluster
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.cluster.local_head import LocalHead
from ray_on_ecs.errors import UsageError
from ray_on_ecs.node.api import AnswerError

Local = tuple[LocalCluster, list[dict[str, Any]], list[str]]


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
    monkeypatch.setattr(Head, "list_jobs", lambda _: [])
    first, second = LocalCluster(), LocalCluster()
    first.up(1, print)
    second.up(1, print)
    assert not first.down("first")
    assert not stopped
    assert second.down("second")
    assert stopped == [head]


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Local:
    """A cluster of this machine, its head's jobs, and what is done with its head, which has two CPUs."""
    jobs: list[dict[str, Any]] = []
    done: list[str] = []
    head = LocalHead("http://127.0.0.1:9", "secret", 1, 1.0, "ray", 2)
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", str(tmp_path / "results"))
    monkeypatch.setattr(Head, "list_jobs", lambda _: jobs)
    monkeypatch.setattr(local_head, "find", lambda: head)
    monkeypatch.setattr(local_head, "stop", lambda _: done.append("stop"))
    monkeypatch.setattr(local_head, "start", lambda cpus: done.append(f"start {cpus}"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return LocalCluster(), jobs, done


@pytest.mark.parametrize(
    ("changed", "ends"),
    [
        ({}, True),
        ({"status": "STOPPED", "metadata": {"run_name": "other"}}, True),
        ({"metadata": {"run_name": "mine", "storage_path": "/elsewhere/results"}}, False),
        ({"metadata": {"run_name": "other", "storage_path": "{here}"}}, False),
        ({"metadata": {"run_name": "mine", "storage_path": "jupyterlab"}}, False),
        ({"metadata": None}, False),
        ({"metadata": None, "submission_id": None}, False),
        ({"status": "PENDING", "metadata": {}}, False),
    ],
)
def test_only_the_own_run_is_killed_with_ray(local: Local, changed: dict[str, Any], ends: bool) -> None:
    """A run is its name and its storage path."""
    cluster, jobs, done = local
    metadata = {"run_name": "mine", "storage_path": cluster.storage_path}
    jobs.append({"submission_id": "mine", "job_id": "01", "status": "RUNNING", "metadata": metadata, **changed})
    assert cluster.down("mine") is ends
    assert done == ["stop"] * ends
    if not changed:
        assert not cluster.down()


def test_larger_run_starts_a_larger_ray_in_place_of_an_idle_one(
    local: Local,
) -> None:
    cluster, _, done = local
    assert cluster.up(2, print)
    assert not done
    with pytest.raises(UsageError, match="is in use"):  # by the first command, which has not submitted its run yet
        LocalCluster().up(4, print)
    assert cluster.down()
    assert cluster.up(4, print)
    assert done == ["stop", "stop", "start 4"]


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


@pytest.mark.parametrize("is_silent", [False, True])
def test_larger_run_is_refused_while_ray_is_used(
    local: Local, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    cluster, jobs, done = local
    jobs.append({"submission_id": "mine", "status": "RUNNING", "metadata": {"run_name": "mine"}})
    if is_silent:
        monkeypatch.setattr(Head, "list_jobs", Mock(side_effect=AnswerError("http://127.0.0.1:9", "timed out")))
    cluster.typed = " --local"
    line = "give --num-workers 2, or end its runs first: ray-on-ecs stop --local --all"
    with pytest.raises(UsageError, match=line):
        cluster.up(4, print)
    assert cluster.up(0, print), "without a number the run takes the workers that there are"
    assert not done


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
