"""Lock of a run: real processes, on a disk and in an S3 with conditional writes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.private_folder import place
from ray_on_ecs.storage import lock
from ray_on_ecs.storage.disk import part_of
from ray_on_ecs.storage.lock import RunLock
from ray_on_ecs.storage.run_storage import RunStorage
from tests.aws import BUCKET
from tests.flaky_s3 import FlakyProxy, flaky_proxy

# Of boto3's standard mode.
ATTEMPTS = 3
ROOT = Path(__file__).parents[3]
OWNER = """
import sys
from ray_on_ecs.storage.lock import RunLock
from ray_on_ecs.storage.run_storage import RunStorage
RunLock(RunStorage.open(sys.argv[1], "mine")).__enter__()
print("locked", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(params=["disk", "S3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, s3: Any) -> RunStorage:
    path = str(tmp_path) if request.param == "disk" else f"s3://{BUCKET}/{tmp_path.name}"
    return RunStorage.open(path, "mine")


@pytest.fixture
def line(aws_server: str) -> Iterator[FlakyProxy]:
    with flaky_proxy(aws_server, 0.0) as line:
        yield line


@pytest.fixture
def bucket(s3: Any, line: FlakyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStorage:
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
    return RunStorage.open(f"s3://{BUCKET}/{tmp_path.name}", "mine")


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
    storage.write("run.lock", json.dumps({**owner, "host": "elsewhere", "machine": "elsewhere"}))


def test_lock_exists_only_while_held(storage: RunStorage) -> None:
    with RunLock(storage) as held:
        assert storage.exists("run.lock")
        assert held.refresh()
        assert held.refresh()
    assert not storage.exists("run.lock")
    with RunLock(storage):
        pass


def test_refreshed_lock_refuses_a_second_owner(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(storage) as held:

        def refresh_instead(seconds: float) -> None:
            assert held.refresh()

        monkeypatch.setattr(lock, "time", SimpleNamespace(**{**vars(time), "sleep": refresh_instead}))
        with pytest.raises(UsageError, match=r"--run-name: run 'mine' is being trained by another command \(process"):
            RunLock(storage).__enter__()
        assert held.refresh(), "the first one keeps it"


def test_lock_of_killed_local_process_is_taken_over(
    storage: RunStorage, owner: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    owner.kill()
    owner.wait()
    with RunLock(storage):
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("machine", ["another boot", "another PID namespace", ""])
def test_machine_of_the_same_name_is_another(
    storage: RunStorage, owner: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    owner.kill()  # which the other machine does not see
    document = json.loads(storage.read("run.lock"))
    storage.write("run.lock", json.dumps({**document, "machine": machine}))

    def refresh(seconds: float) -> None:
        storage.write("run.lock", json.dumps({**document, "machine": machine, "refreshed": 2}))

    monkeypatch.setattr(lock, "time", SimpleNamespace(**{**vars(time), "sleep": refresh}))
    with pytest.raises(lock.HeldError, match="is being trained by another command"):
        RunLock(storage).__enter__()


# From the view of the other command, while the owner lives.
SEEN = {
    "the clock was set": lambda patch: (
        patch.setattr(psutil, "boot_time", lambda: BOOT + 3600.0),
        patch.setattr(psutil.Process, "create_time", lambda process: CREATED + 3600.0),
    ),
    "/proc hides it": lambda patch: (
        patch.setattr(lock.psutil, "Process", hidden),
        patch.setattr(lock.os, "kill", lambda *_: (_ for _ in ()).throw(PermissionError)),
    ),
    "it may not be read": lambda patch: patch.setattr(lock, "_created", lambda process: refused(process.pid)),
    "another PID namespace": lambda patch: patch.setattr(lock, "place", lambda: f"{place()[:-3]}0]"),
    "another boot": lambda patch: patch.setattr(lock, "place", lambda: f"x{place()}"),
    "nothing": lambda patch: None,
}
BOOT, CREATED = psutil.boot_time(), psutil.Process().create_time()


def hidden(pid: int) -> psutil.Process:
    raise psutil.NoSuchProcess(pid)


def refused(pid: int) -> float:
    raise psutil.AccessDenied(pid)


@pytest.mark.parametrize("seen", SEEN)
def test_living_owner_is_never_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    with RunLock(RunStorage.open(str(tmp_path), "mine")):
        owner = json.loads((tmp_path / "mine" / "run.lock").read_text())
    if "hides" in seen:
        owner = {**owner, "pid": 2**22 + 1}
    SEEN[seen](monkeypatch)
    assert not lock._is_dead(owner)


@pytest.mark.parametrize(
    "owner",
    [
        {"pid": 2**22 + 1},  # it has ended
        {"pid": 2**80},
        {"created": 1.0},  # its ID is reused, as after a container's restart
    ],
)
def test_owner_that_has_ended_is_dead(tmp_path: Path, owner: dict[str, Any]) -> None:
    with RunLock(RunStorage.open(str(tmp_path), "mine")):
        known = json.loads((tmp_path / "mine" / "run.lock").read_text())
    assert lock._is_dead({**known, **owner})


@pytest.mark.usefixtures("quick")
def test_refresh_notices_a_take_over(storage: RunStorage, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(storage) as first:
        elsewhere(storage)
        with RunLock(storage) as second:
            assert "on elsewhere) still trains this run" in capsys.readouterr().out
            assert not first.refresh(), "two would write the same checkpoints"
            assert second.refresh()


def test_a_lock_that_was_deleted_is_written_again(storage: RunStorage) -> None:
    with RunLock(storage) as held:
        storage.delete("run.lock")
        assert held.refresh()
        assert storage.exists("run.lock")
        assert held.refresh()


def test_a_refresh_after_the_end_does_nothing(storage: RunStorage) -> None:
    with RunLock(storage) as held:
        pass
    assert held.refresh(), "as of a thread that was interrupted"
    assert not storage.exists("run.lock")


@pytest.mark.usefixtures("quick")
def test_missing_stale_lock_counts_as_taken_over(storage: RunStorage) -> None:
    with RunLock(storage) as first:
        elsewhere(storage)
        with RunLock(storage):
            pass
        assert not storage.exists("run.lock"), "the other command has trained the run and ended"
        assert not first.refresh()
        assert not first.is_held
    assert not storage.exists("run.lock")


LOCK = "PUT .*/run.lock"


def test_a_lost_answer_to_the_first_write_holds(bucket: RunStorage, line: FlakyProxy) -> None:
    line.decide("lose", LOCK)
    with RunLock(bucket, pytest.fail) as held:
        assert line.lost == 1
        assert held.refresh()


@pytest.mark.parametrize("count", [1, 2, ATTEMPTS])
def test_lost_answers_to_a_refresh_end_nothing(bucket: RunStorage, line: FlakyProxy, count: int) -> None:
    with RunLock(bucket) as held:
        line.decide("lose", LOCK, count)
        assert held.refresh()
        assert line.lost == count
        assert held.refresh()
        assert held.is_held
    assert not bucket.exists("run.lock")


def test_an_unanswered_last_refresh_leaves_no_lock(bucket: RunStorage, line: FlakyProxy) -> None:
    with RunLock(bucket) as held:
        line.decide("lose", LOCK, ATTEMPTS)
        assert held.refresh()
        line.decide("lose", "DELETE")
    assert line.lost == ATTEMPTS + 1
    assert not bucket.exists("run.lock")


def test_lost_response_to_a_take_over(bucket: RunStorage, line: FlakyProxy) -> None:
    bucket.write("run.lock", json.dumps({"machine": place(), "pid": 2**22 + 1, "created": 0.0}))
    line.decide("pass", LOCK)
    line.decide("lose", LOCK)
    with RunLock(bucket) as held:
        assert line.lost == 1
        assert held.refresh()


def test_owner_without_responses_notices_the_takeover(
    bucket: RunStorage, line: FlakyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(bucket) as first:
        line.decide("lose", LOCK, ATTEMPTS)
        assert first.refresh()
        elsewhere(bucket)
        monkeypatch.setattr(lock, "STALE_SECONDS", 0.0)
        monkeypatch.setattr(lock, "POLL_SECONDS", 0.01)
        with RunLock(bucket) as second:
            assert not first.refresh()
            assert second.refresh()


@pytest.mark.usefixtures("quick")
def test_a_conflict_of_requests_is_tried_again(bucket: RunStorage, line: FlakyProxy) -> None:
    line.decide("conflict", LOCK, 2)
    with RunLock(bucket, pytest.fail) as held:
        line.decide("conflict", LOCK, 2)
        assert held.refresh()
        line.decide("conflict", LOCK, lock.WRITE_ATTEMPTS)
        assert held.refresh(), "a storage that does not answer is not another command"
        assert held.refresh()


def test_a_rename_that_reports_an_error_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(path: Path, target: Path) -> None:  # as over NFS, whose answers get lost, too
        os.replace(path, target)
        raise FileNotFoundError

    with RunLock(RunStorage.open(str(tmp_path), "mine")) as held:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            assert held.refresh()
        assert held.refresh()


def test_files_of_killed_commands_go_with_the_lock(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "mine")
    with RunLock(storage):
        old, new = (part_of(Path(storage.path("metrics.jsonl"))) for _ in range(2))
        for part in (old, new):
            part.touch()
        os.utime(old, (1, 1))
    assert list((tmp_path / "mine").iterdir()) == [new]
    with RunLock(storage):
        os.utime(new, (1, 1))
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
@pytest.mark.usefixtures("quick")
def test_a_broken_lock_does_not_lock_for_ever(storage: RunStorage, content: str) -> None:
    storage.write("run.lock", content)
    with RunLock(storage) as held:
        assert held.refresh()
