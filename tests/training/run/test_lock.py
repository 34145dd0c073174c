"""Who may train a run: real processes, on a disk and in an S3 with conditional writes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.aws import BUCKET
from training.errors import UsageError
from training.run import lock
from training.run.lock import RunLock
from training.run.storage import RunStorage

ROOT = Path(__file__).parents[3]
OWNER = """
import sys
from training.run.lock import RunLock
from training.run.storage import RunStorage
RunLock(RunStorage.open(sys.argv[1], "mine")).__enter__()
print("locked", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(params=["disk", "S3"])
def storage(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    s3_client: Any,
    aws_variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> RunStorage:
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)
    path = str(tmp_path) if request.param == "disk" else f"s3://{BUCKET}/{tmp_path.name}"
    return RunStorage.open(path, "mine")


@pytest.fixture
def owner(storage: RunStorage) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    path = storage.uri.removesuffix("/mine")
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.01)


def elsewhere(storage: RunStorage) -> None:
    """Let the lock look as if its owner were on another machine."""
    owner = json.loads(storage.read("run.lock"))
    storage.write("run.lock", json.dumps({**owner, "host": "elsewhere"}))


def test_the_lock_is_there_while_it_is_held_and_gone_afterwards(storage: RunStorage) -> None:
    with RunLock(storage) as held:
        assert storage.exists("run.lock")
        assert held.refresh()
        assert held.refresh()
    assert not storage.exists("run.lock")
    with RunLock(storage):
        pass


def test_an_owner_that_refreshes_it_is_alive_and_the_second_is_refused(
    storage: RunStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(storage) as held:

        def refresh_instead(seconds: float) -> None:
            assert held.refresh()

        monkeypatch.setattr(lock, "time", SimpleNamespace(**{**vars(time), "sleep": refresh_instead}))
        with pytest.raises(UsageError, match=r"--run-name: run 'mine' is being trained by another command \(process"):
            RunLock(storage).__enter__()
        assert held.refresh(), "the first one keeps it"


def test_a_process_of_this_machine_that_was_killed_is_followed_at_once(
    storage: RunStorage, owner: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    owner.kill()
    owner.wait()
    with RunLock(storage):
        assert capsys.readouterr().out == "", "nobody waits"


@pytest.mark.usefixtures("quick")
def test_a_machine_that_is_gone_is_followed_after_a_while(
    storage: RunStorage, owner: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere(storage)
    with RunLock(storage) as held:
        assert "on elsewhere) still trains this run" in capsys.readouterr().out
        assert held.refresh()


@pytest.mark.usefixtures("quick")
def test_who_was_taken_for_dead_hears_of_it(storage: RunStorage) -> None:
    with RunLock(storage) as first:
        elsewhere(storage)
        with RunLock(storage) as second:
            assert not first.refresh(), "two would write the same checkpoints"
            assert second.refresh()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
@pytest.mark.usefixtures("quick")
def test_a_broken_lock_does_not_lock_for_ever(storage: RunStorage, content: str) -> None:
    storage.write("run.lock", content)
    with RunLock(storage) as held:
        assert held.refresh()
