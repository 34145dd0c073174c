"""`ray-on-ecs rm`: ended runs are deleted, by name or age, and active runs stay."""

import fcntl
import io
import os
import re
import time
from pathlib import Path

import pytest

from ray_on_ecs import secrets
from ray_on_ecs.cli import rm
from ray_on_ecs.cli.main import main
from ray_on_ecs.run import process, supervisor
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from tests.ray_on_ecs.cli.account import Laptop
from tests.ray_on_ecs.cli.folders import Folders, job, jobs_here

OLD = 10 * 86400


def make(folders: Folders, name: str, *, age: float = 0, code: str = "", state: str = "finished") -> Path:
    """A run whose folder was last written this many seconds ago."""
    folders.status(name, state)
    folders.of(name).write_json("run.json", {"format": 1, "code": {"archive": f"/x/.code/{code}.tar.gz"}})
    folders.of(name).write("checkpoints/step-000000001/rank-0", "weights")
    folder = Path(folders.path) / name
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - age, time.time() - age))
    return folder


def test_run_is_deleted_with_all_its_files(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make(folders, "first"), make(folders, "second")
    assert main(["rm", "--local", "first"]) == 0
    assert capsys.readouterr().err.endswith("run first is deleted\n")
    assert (first.exists(), second.exists()) == (False, True)


def test_secrets_are_deleted_with_the_run(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = make(folders, "first")
    folders.of("first").write_json("run.json", {"format": 1, "settings": {"secret": ["HF_TOKEN"]}})
    store = secrets.store(folders.of("first").uri)
    store.put({"HF_TOKEN": "hf_1234"})
    assert main(["rm", "--local", "first"]) == 0
    assert store.read(["HF_TOKEN"]) == {}
    assert not folder.exists()


def test_active_run_is_not_deleted(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    ended, busy = make(folders, "ended"), make(folders, "busy", state="training")
    with jobs_here(job("busy")):
        assert main(["rm", "--local", "ended", "busy"]) == 2
    line = "ray-on-ecs: run busy is under way; ray-on-ecs stop --local busy ends it\n"
    assert capsys.readouterr().err.endswith(line)
    assert ended.exists()
    assert busy.exists()


def test_lost_run_stays_while_the_head_of_its_stack_is_silent(stack: Laptop) -> None:
    stack.head.is_up = False
    stack.put_run("lost", "training", silent_seconds=OLD)
    done = stack.run("rm", "lost")
    assert done.returncode == 2
    assert "run lost is under way as far as is known" in done.stderr
    assert stack.run("rm", "--older-than", "7", "--yes").returncode == 0
    assert "lost" in stack.run("runs").stdout
    stack.head.is_up = True
    assert stack.run("rm", "lost").returncode == 0
    assert "lost" not in stack.run("runs").stdout


@pytest.mark.parametrize("words", [["lost"], ["--older-than", "7", "--yes"]])
@pytest.mark.parametrize("ends", [True, False])
def test_lost_run_is_deleted_after_its_scripts_have_ended(
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    ends: bool,
) -> None:
    """They have 30 s once their driver was killed."""
    lost = make(folders, "lost", age=OLD, state="training")
    held = process.hold(process.scripts_lock(folders.of("lost").uri), fcntl.LOCK_SH)  # as their supervisor does
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 60.0 if ends else 0.0)
    monkeypatch.setattr(supervisor, "KILL_SECONDS", 0.0)

    def say(line: str) -> None:
        if "waiting" in line:
            assert lost.exists()
            assert line.endswith("s for the scripts of run lost, whose driver was killed")
            if ends:
                os.close(held)

    monkeypatch.setattr(rm, "note", say)
    assert main(["rm", "--local", *words]) == (0 if ends else 3)
    assert lost.exists() != ends
    if not ends:
        os.close(held)
        assert "as its scripts have not ended; try again" in capsys.readouterr().err


def test_run_whose_driver_was_killed_can_be_deleted_later(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    killed = make(folders, "killed", state="training")
    assert main(["rm", "--local", "killed"]) == 2
    assert capsys.readouterr().err.endswith("stop --local killed ends it; if it was killed, try again in 120 s\n")
    assert killed.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("frist",), "run 'frist' not found in"),
        ((), "RUN...: give the names of runs, or --older-than DAYS alone"),
        (("first", "--older-than", "0"), "RUN...: give the names of runs, or --older-than DAYS alone"),
        (("--older-than", "-1"), "--older-than"),
        (("--older-than", "week"), "--older-than"),
        (("--yes",), "RUN...: give the names of runs, or --older-than DAYS alone"),
    ],
)
def test_user_error_deletes_nothing(
    folders: Folders, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    first = make(folders, "first")
    assert main(["rm", "--local", *words]) == 2
    assert says in capsys.readouterr().err
    assert first.exists()


def test_run_with_a_held_lock_stays(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(folders, "resumed", state="interrupted")
    folders.of("resumed").write("run.lock", "of a driver")
    assert main(["rm", "--local", "resumed"]) == 2
    assert "run resumed is under way" in capsys.readouterr().err
    os.utime(folder / "status.json", (time.time() - OLD, time.time() - OLD))
    assert main(["rm", "--local", "--older-than", "0", "--yes"]) == 0
    assert folder.exists()


def test_folder_without_a_run_stays(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(folders.path) / "llama"
    folders.of("llama").write_json("config.json", {"hidden_size": 8})
    os.utime(model / "config.json", (time.time() - OLD, time.time() - OLD))
    assert main(["rm", "--local", "llama"]) == 2
    assert "llama: is a folder without a run" in capsys.readouterr().err
    assert main(["rm", "--local", "--older-than", "7", "--yes"]) == 0
    assert model.exists()


def code_of(folders: Folders, name: str) -> Path:
    archive = Path(folders.path) / ".code" / f"{name}.tar.gz"
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(b"code")
    os.utime(archive, (time.time() - OLD, time.time() - OLD))
    return archive


def test_old_runs_and_their_code_are_deleted(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = make(folders, "old", age=OLD, code="aa"), make(folders, "new", code="bb")
    lost = make(folders, "lost", age=OLD, state="training")
    unused, used = code_of(folders, "aa"), code_of(folders, "bb")
    assert main(["rm", "--local", "--older-than", "7", "--yes"]) == 0
    shown = capsys.readouterr()
    assert "2 runs deleted, and 1 archive of code" in shown.err
    assert [each.exists() for each in (old, lost, unused)] == [False] * 3
    assert [each.exists() for each in (new, used)] == [True] * 2


REFUSED = "ray-on-ecs: nothing is deleted; --yes deletes these runs without asking"


@pytest.mark.parametrize(
    ("answer", "status", "line"),
    [
        ("n\n", 1, "nothing is deleted"),
        ("No\n", 1, "nothing is deleted"),
        ("\n", 1, "nothing is deleted"),
        ("what\nno\n", 1, "nothing is deleted"),
        ("", 2, REFUSED),
        ("what\n", 2, REFUSED),
        ("y\n", 0, "1 run deleted, and 0 archives of code"),
        ("yes\n", 0, "1 run deleted, and 0 archives of code"),
    ],
    ids=["n", "No", "empty", "unclear, then no", "end of input", "unclear", "y", "yes"],
)
def test_deletion_by_age_asks_first(
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    status: int,
    line: str,
) -> None:
    name = "a-run-with-a-name-that-is-longer-than-a-terminal-of-sixty-columns"
    old = make(folders, name, age=OLD)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["rm", "--local", "--older-than", "7"]) == status
    assert old.exists() == (status > 0)
    shown = capsys.readouterr()
    assert re.fullmatch(rf"{name}, finished, \d+ \w+ ago\n", shown.out)
    assert shown.err.splitlines()[-1].endswith(line)


def test_ctrl_c_at_the_question_deletes_nothing(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(io.StringIO):
        def readline(self, *_: object) -> str:
            raise KeyboardInterrupt

    old = make(folders, "old", age=OLD)
    monkeypatch.setattr("sys.stdin", Interrupted())
    assert main(["rm", "--local", "--older-than", "7"]) == 130
    assert capsys.readouterr().err.endswith("\nray-on-ecs: interrupted\n")
    assert old.exists()


def test_deletion_without_old_runs_asks_nothing(folders: Folders) -> None:
    make(folders, "new")
    assert main(["rm", "--local", "--older-than", "7"]) == 0


def test_active_runs_are_never_too_old(folders: Folders) -> None:
    busy = make(folders, "busy", age=OLD, state="interrupted")
    with jobs_here(job("busy")):
        assert main(["rm", "--local", "--older-than", "7", "--yes"]) == 0
    assert busy.exists()


# Settings that others who can write to the storage may leave; `healthy` is another run.
BROKEN = {
    "cut off": "{",
    "empty": "",
    "a list": "[1]",
    "a text": '"settings"',
    "a number": "7",
    "null": "null",
    "not UTF-8": b"\xff",
    "settings are a list": '{"settings": ["secret"]}',
    "settings are text": '{"settings": "secret"}',
    "a secret is a number": '{"settings": {"secret": 7}}',
    "a secret is text": '{"settings": {"secret": "TOKEN"}}',
    "secrets are numbers": '{"settings": {"secret": [7, null, ["TOKEN"], {"TOKEN": 1}]}}',
    "a secret is a path": '{"settings": {"secret": ["../../healthy/status.json", "/etc/passwd", "A/../../B"]}}',
    "a secret has NUL": '{"settings": {"secret": ["A\\u0000B", "\\ud800", ""]}}',
    "code is a list": '{"settings": {"code": ["x"], "secret": {}}}',
    "nested": "[" * 100_000,
    "nested settings": '{"settings": {"secret": ' + "[" * 900 + "]" * 900 + "}}",
    "numbers": '{"settings": {"secret": [1e999, NaN, -Infinity, 1' + "0" * 5000 + "]}}",
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("words", [("broken",), ("--older-than", "7", "--yes")], ids=["name", "age"])
def test_broken_settings_of_a_run_stop_no_command(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], kind: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    broken, old, healthy = make(folders, "broken", age=OLD), make(folders, "old", age=OLD), make(folders, "healthy")
    content = BROKEN[kind]
    for folder in (broken, healthy):
        (folder / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["rm", "--local", *words]) == 0
    assert [each.exists() for each in (broken, old, healthy)] == [False, words == ("broken",), True]
    assert (healthy / "status.json").exists()


@pytest.mark.parametrize("settings", ['{"settings": {"code": "/x/.code/%s"', '["%s"]', '{"settings": {"code": "%s"}}'])
def test_code_that_broken_settings_name_stays(
    folders: Folders, capsys: pytest.CaptureFixture[str], settings: str
) -> None:
    make(folders, "old", age=OLD)
    broken = make(folders, "broken")
    used, unused = code_of(folders, "aa"), code_of(folders, "bb")
    (broken / "run.json").write_text(settings % used.name)
    assert main(["rm", "--local", "--older-than", "7", "--yes"]) == 0
    assert "1 run deleted, and 1 archive of code" in capsys.readouterr().err
    assert [each.exists() for each in (used, unused)] == [True, False]


def test_code_stays_with_an_unreadable_run(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folders, "old", age=OLD)
    make(folders, "silent")
    code = code_of(folders, "aa")
    read = RunStorage.read

    def fail(storage: RunStorage, name: str) -> bytes:
        if name == layout.SETTINGS and storage.run_name == "silent":
            raise OSError("the storage does not answer")
        return read(storage, name)

    monkeypatch.setattr(RunStorage, "read", fail)
    assert main(["rm", "--local", "--older-than", "7", "--yes"]) == 3
    assert "code that no run needs can't be deleted" in capsys.readouterr().err
    assert code.exists()
