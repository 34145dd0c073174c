"""The head that `run --local` starts: its environment, its file, and a start that fails."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from ray_on_ecs.cluster import local_head
from ray_on_ecs.cluster.local_head import LocalHead
from ray_on_ecs.errors import ResourceError

# In the place of `ray start --block`, in the head's folder: its raylet ends, and it waits.
DYING = """
import pathlib, shutil, subprocess, time
logs = pathlib.Path("session_latest", "logs")
logs.mkdir(parents=True)
(logs / "raylet.out").touch()
shutil.copy(shutil.which("sleep"), "raylet")
subprocess.Popen(["./raylet", "1"])
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def running(folder: Path) -> LocalHead:
    """A head with this process in the place of Ray's."""
    folder.mkdir()
    return LocalHead("http://127.0.0.1:1", "secret", os.getpid(), psutil.Process().create_time(), str(folder))


def test_jobs_run_in_this_environment_with_this_ray() -> None:
    given = {"PATH": "/bin", "RAY_ADDRESS": "other:1", "RAY_API_SERVER_ADDRESS": "http://other:2", "HF_HOME": "/models"}
    variables = local_head._environment(given, "127.0.0.1:5", "secret")
    assert variables["PATH"] == f"{Path(sys.executable).parent}:/bin"
    assert (variables["RAY_ADDRESS"], variables["RAY_AUTH_TOKEN"]) == ("127.0.0.1:5", "secret")
    assert variables["HF_HOME"] == "/models"
    assert "RAY_API_SERVER_ADDRESS" not in variables


def test_running_head_is_found_by_its_owner(tmp_path: Path) -> None:
    head = running(tmp_path / "ray")
    with local_head.lock():
        local_head._remember(head)
    assert local_head.find() == head
    [file] = (tmp_path / ".ray-on-ecs").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(json.dumps(asdict(replace(head, created=head.created - 60))))
    assert local_head.find() is None
    file.write_text("{}")
    assert local_head.find() is None


def test_the_folder_of_a_killed_head_is_removed(tmp_path: Path) -> None:
    head = running(tmp_path / "ray")
    with local_head.lock():
        local_head._remember(replace(head, created=1.0))
        local_head.forget()
    assert not Path(head.folder).exists()
    assert not list((tmp_path / ".ray-on-ecs").glob("*.json"))


def test_a_start_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_head, "RAY", (sys.executable, "-c", "import sys; sys.exit('no room for Ray')"))
    folders = iter(tmp_path / f"ray-{number}" for number in range(1, 5))
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(new_folder(next(folders))))
    with local_head.lock(), pytest.raises(ResourceError) as raised:
        local_head.start(2)
    last = tmp_path / "ray-4"
    line = f"Ray did not start on this machine in 4 attempts: no room for Ray; its logs are in {last}"
    assert str(raised.value) == line
    assert list(tmp_path.glob("ray-*")) == [last]
    assert (last / "ray.log").read_text() == "no room for Ray\n"
    assert local_head.find() is None


def test_the_logs_of_a_raylet_that_died_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_head, "START_ATTEMPTS", 1)
    monkeypatch.setattr(local_head, "RAY", (sys.executable, "-c", DYING))
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(new_folder(tmp_path / "ray")))
    with local_head.lock(), pytest.raises(ResourceError) as raised:
        local_head.start(2)
    said = "the raylet has ended"
    assert str(raised.value).endswith(f"{said}; its logs are in {tmp_path}/ray/session_latest/logs")
    assert (tmp_path / "ray" / "session_latest" / "logs" / "raylet.out").exists()


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path
