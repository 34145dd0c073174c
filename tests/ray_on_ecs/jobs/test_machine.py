"""Jobs of a machine: real drivers, whose ends are known however they and the commands around them end."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs import private_folder, secrets
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import jobs, local_head
from ray_on_ecs.cluster.local_head import LocalHead
from ray_on_ecs.config import LOCAL_VARIABLE
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError
from ray_on_ecs.jobs import driver_parent, machine
from ray_on_ecs.jobs import processes as job_processes
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import ENDED, SECRETS, Job
from ray_on_ecs.storage.run_storage import RunStorage
from tests.local_cluster import have_ended
from tests.waiting import until

# A driver in the place of ours.
WAITS = "import time; print('begins', flush=True); time.sleep(600)"
Submit = Callable[..., MachineJobs]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray-on-ecs" / "jobs"


@pytest.fixture
def submit(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    """Submit a job `mine` whose driver runs this code; it ends with the test."""

    def submit(code: str, job_id: str = "mine", ray: LocalHead | None = None, **metadata: str) -> MachineJobs:
        local = MachineJobs(ray=ray.variables if ray else None, ends_ray=True)
        monkeypatch.setattr(machine, "DRIVER", ("-c", code))
        with local.submitting():
            local.submit("/runs/mine", {"run_name": job_id, **metadata}, job_id)
        return local

    yield submit
    local = MachineJobs()
    for job in local.list_jobs():
        if job["status"] not in ENDED:
            local.kill_job(job["submission_id"])


def ended(local: MachineJobs, job_id: str = "mine") -> Job:
    until(lambda: local.job(job_id)["status"] in ENDED, between=0.01)
    return local.job(job_id)


def listed(local: MachineJobs) -> dict[str, str]:
    """The states of the jobs, in the order of their start."""
    return {job["submission_id"]: job["status"] for job in local.list_jobs()}


def processes(home: Path) -> dict[str, psutil.Process]:
    """The driver and its parent, once they run."""
    [folder] = until(lambda: list(home.glob("*/*/processes.json")), between=0.01)
    return {name: psutil.Process(pid) for name, (pid, _) in json.loads(folder.read_text()).items()}


@pytest.mark.parametrize("status", [0, 1, 2, 130])
def test_exit_status_of_a_driver_is_kept(submit: Submit, status: int) -> None:
    job = ended(submit(f"import sys; sys.exit({status})"))
    assert (job["status"], job["driver_exit_code"]) == ("FAILED" if status else "SUCCEEDED", status)
    assert job["end_time"] >= job["start_time"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_signal_that_ends_a_driver_is_kept(submit: Submit, home: Path, number: int) -> None:
    local = submit(WAITS)
    processes(home)["driver"].send_signal(number)
    job = ended(local)
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", -number)


def test_stop_asks_a_driver_that_has_just_been_submitted(submit: Submit) -> None:
    saves = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); time.sleep(600)"
    local = submit(saves)
    local.stop_job("mine")
    assert ended(local)["driver_exit_code"] in (130, -signal.SIGTERM)
    local.stop_job("mine")


def test_driver_that_does_not_stop_is_killed(
    submit: Submit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MachineJobs, "stop_seconds", 0.0)
    local = submit(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}")
    until(lambda: local.log("mine"), between=0.01)
    assert main(["stop", "--local", "mine"]) == 0
    assert ended(local)["driver_exit_code"] == -signal.SIGKILL
    assert capsys.readouterr().err.startswith("run mine is stopped; ")


# In a separate session, as scripts are.
SEPARATE = 'exec python -c \'import os; os.setsid(); os.execlp("sleep", "sleep", "600")\''


def starts(*sleeps: str) -> str:
    """A driver that starts processes by these shell commands, and prints their IDs."""
    lines = ("import subprocess, time", "from subprocess import PIPE")
    start = "print(subprocess.Popen({!r}, shell=True, stdout=PIPE, text=True).stdout.readline(), end='', flush=True)"
    return "; ".join((*lines, *(start.format(f"{sleep} >/dev/null & echo $!") for sleep in sleeps), "time.sleep(600)"))


def started(local: MachineJobs, count: int) -> list[psutil.Process]:
    until(lambda: local.log("mine").count("\n") == count, between=0.01)
    return [psutil.Process(int(pid)) for pid in local.log("mine").split()]


def test_kill_ends_a_driver_with_all_that_it_has_started(submit: Submit, home: Path) -> None:
    local = submit(starts("sleep 600", SEPARATE))
    family = started(local, 2)
    until(lambda: os.getsid(family[1].pid) == family[1].pid, between=0.01)
    assert local.kill_job("mine")
    assert have_ended(family), "once it returns"
    assert ended(local)["driver_exit_code"] == -signal.SIGKILL


def test_kill_ends_a_driver_that_has_just_been_submitted(submit: Submit) -> None:
    local = submit(WAITS)
    assert local.kill_job("mine")
    assert ended(local)["driver_exit_code"] == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_pip_ends_with_its_driver_and_scripts_have_time(submit: Submit, home: Path, number: int) -> None:
    local = submit(starts("sleep 600", SEPARATE))
    pip, script = started(local, 2)
    until(lambda: os.getsid(script.pid) == script.pid, between=0.01)
    processes(home)["driver"].send_signal(number)
    ended(local)
    until(lambda: have_ended([pip]), between=0.01)
    assert not have_ended([script])
    local.kill_job("mine")
    assert have_ended([script])


def with_secret(home: Path) -> dict[str, str]:
    """Store a secret; return the metadata of a job of its run."""
    uri = str(home.parent.parent / "runs" / "mine")
    secrets.store(uri).put({"TOKEN": "hf_12345"})
    return {SECRETS: json.dumps([uri, "TOKEN"])}


def secret_files(home: Path) -> list[Path]:
    return [file for file in home.parent.rglob("*") if file.is_file() and b"hf_12345" in file.read_bytes()]


@pytest.mark.parametrize("end", [0, 1, 3, 129, 130, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGSEGV, -signal.SIGKILL])
def test_secrets_end_with_their_driver_however_it_ends(submit: Submit, home: Path, end: int) -> None:
    code = f"import os; os._exit({end})" if end >= 0 else f"import os; os.kill(os.getpid(), {-end})"
    local = submit(code, **with_secret(home))
    assert ended(local)["driver_exit_code"] == end
    assert not secret_files(home)


def test_secrets_stay_for_another_command_of_the_run(submit: Submit, home: Path) -> None:
    ended(submit("import sys; sys.exit(2)", **with_secret(home)))
    assert secret_files(home), "the driver has deleted them, or another command trains the run"


def test_next_command_deletes_the_secrets_of_a_lost_job(submit: Submit, home: Path) -> None:
    local = submit(WAITS, **with_secret(home))
    both = processes(home)
    both["parent"].kill()
    both["driver"].kill()
    until(lambda: have_ended([*both.values()]))
    with MachineJobs().submitting():  # a command that stores the secrets of the run again
        assert local.job("mine")["status"] == "FAILED"
        assert secret_files(home)
    with local.submitting():  # it looks before it stores them
        assert local.job("mine")["status"] == "FAILED"
        assert not secret_files(home)
        with_secret(home)
    assert local.job("mine")["status"] == "FAILED"
    assert secret_files(home)


def test_driver_goes_on_after_its_command_and_its_parent(submit: Submit, home: Path) -> None:
    code = (
        "from ray_on_ecs.jobs import machine\n"
        f"machine.DRIVER = ('-c', {WAITS!r})\n"
        "machine.MachineJobs().submit('/runs/mine', {'run_name': 'mine'})\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    both, local = processes(home), MachineJobs()
    assert os.getsid(both["driver"].pid) == both["parent"].pid, "a separate session"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as at the end of a login session
        both["parent"].send_signal(number)
    assert local.job("mine")["status"] == "RUNNING"
    both["parent"].kill()
    until(lambda: have_ended([both["parent"]]))
    assert local.job("mine")["status"] == "RUNNING"
    both["driver"].kill()
    job = ended(local)
    assert job["driver_exit_code"] is None
    assert job["message"] == "it was killed with its parent, the machine went down, or its disk was full"
    assert local.job("mine") == job, "its end is kept"


def test_job_of_another_container_is_left_alone(submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = submit(WAITS, **with_secret(home))
    with monkeypatch.context() as patch:  # of the same host name and home
        patch.setattr(machine, "place", lambda: "another")
        patch.setattr(machine, "identity", lambda pid: "")
        assert local.job("mine")["status"] == "RUNNING"
        assert secret_files(home)
        for stop in (local.stop_job, local.kill_job):
            with pytest.raises(ResourceError, match=r"^job mine runs in another container, or on another machine"):
                stop("mine")
    assert local.job("mine")["status"] == "RUNNING"
    both = processes(home)
    both["parent"].kill()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "place", lambda: "another")
        patch.setattr(machine, "identity", lambda pid: "")
        assert local.job("mine")["status"] == "RUNNING", "the driver goes on"
        both["driver"].kill()
        until(lambda: have_ended([*both.values()]))
        assert local.job("mine")["status"] == "FAILED"
    assert not secret_files(home)


@pytest.mark.parametrize("known", ["another boot 5", ""])
def test_process_with_a_reused_id_is_not_the_driver(submit: Submit, home: Path, known: str) -> None:
    local = submit("pass")
    ended(local)
    for file in home.glob("*/*/end.json"):
        file.unlink()  # as if both were killed, or the machine was rebooted
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        [file] = home.glob("*/*/processes.json")
        file.write_text(json.dumps({name: [bystander.pid, known] for name in ("driver", "parent")}))
        local = MachineJobs()  # which has not read the end
        assert local.job("mine")["status"] == "FAILED"
        local.stop_job("mine")
        local.kill_job("mine")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_ended_process_has_no_identity() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert driver_parent.identity(process.pid) == driver_parent.identity(process.pid) != ""
    process.kill()
    until(lambda: not driver_parent.identity(process.pid), between=0.01)  # a zombie
    process.communicate()
    assert driver_parent.identity(process.pid) == ""


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"id": "mine"}', '{"status": "x", "start": "y"}'])
@pytest.mark.parametrize("name", ["job", "processes", "end"])
def test_broken_record_is_not_the_other_jobs_fault(submit: Submit, home: Path, name: str, content: str) -> None:
    local = submit("pass")
    ended(local)
    pid, known = json.loads(next(home.glob("*/*/processes.json")).read_text())["parent"]
    until(lambda: driver_parent.identity(pid) != known)  # it ends after its record
    [file] = home.glob(f"*/*/{name}.json")
    file.write_text(content)
    submit("pass", "other")
    assert ended(local, "other")["status"] == "SUCCEEDED"
    assert listed(local).get("mine", "FAILED") in ENDED
    assert listed(submit("pass", "third")).keys() >= {"other", "third"}


def test_driver_that_never_starts_has_ended(submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = submit("pass")
    ended(local)
    for name in ("processes", "end"):
        next(home.glob(f"*/*/{name}.json")).unlink()
    local = MachineJobs()  # which has not read the end
    assert local.job("mine")["status"] == "PENDING"
    monkeypatch.setattr(machine, "START_SECONDS", 0.0)
    assert local.job("mine")["status"] == "FAILED"


def test_driver_knows_its_job_and_no_other_cluster(submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in job_processes.OTHERS:
        monkeypatch.setenv(name, "of another cluster")
    monkeypatch.setenv("PATH", "/bin")
    shows = "import json, os, sys; print(json.dumps([dict(os.environ), sys.executable, os.getcwd()]))"
    local = submit(shows, owner="me")
    ended(local)
    variables, executable, folder = json.loads(local.log("mine"))
    metadata = {"run_name": "mine", "owner": "me", "job_submission_id": "mine"}
    assert json.loads(variables["RAY_JOB_CONFIG_JSON_ENV_VAR"]) == {"metadata": metadata}
    assert variables["RAY_ON_ECS_JOB"] == folder, "by which its processes are known"
    assert variables[LOCAL_VARIABLE]
    assert not set(job_processes.OTHERS) & variables.keys()
    assert (executable, variables["PATH"]) == (sys.executable, f"{Path(sys.executable).parent}:/bin")
    assert Path(folder).parent.parent == home
    assert not list(home.glob("*/*/*.new"))
    assert Path(folder).stat().st_mode & 0o777 == 0o700


def follow(local: MachineJobs) -> str:
    parts: list[bytes] = []
    local.tail("mine", parts.append)
    return b"".join(parts).decode()


def test_log_is_followed_to_the_end_of_the_driver(submit: Submit) -> None:
    code = "import time\nfor n in range(5): print('epoch', n, flush=True); time.sleep(0.1)"
    local = submit(f"{code}\nprint('last', end='')")
    assert follow(local) == local.log("mine") == "".join(f"epoch {n}\n" for n in range(5)) + "last"
    assert ended(local)["end_time"] / 1000 > time.time() - 1, "its end is seen within a second"


@pytest.mark.parametrize(("code", "says"), [("import sys; sys.exit(1)", True), ("pass", False), ("exit('why')", False)])
def test_failure_without_a_word_is_explained(submit: Submit, code: str, says: bool) -> None:
    assert follow(submit(code)).endswith("; its disk may be full\n") == says


@pytest.mark.parametrize("kind", ["renamed", "emptied"])
def test_rotated_log_is_followed(submit: Submit, home: Path, kind: str) -> None:
    go = home.parent.parent / "go"
    code = (
        "import pathlib, time\nprint('first' * 100, flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nprint('second')"
    )
    local, parts = submit(code), []
    thread = threading.Thread(target=local.tail, args=("mine", parts.append))
    thread.start()
    until(lambda: b"first" in b"".join(parts), between=0.01)
    [log] = home.glob("*/*/log")
    log.rename(log.with_name("log.1")) if kind == "renamed" else os.truncate(log, 0)
    go.touch()
    thread.join(60)
    assert b"".join(parts).endswith(b"second\n")


def test_deleted_log_is_empty(submit: Submit, home: Path) -> None:
    local = submit(WAITS)
    processes(home)
    next(home.glob("*/*/log")).unlink()
    assert local.log("mine") == ""
    local.kill_job("mine")
    assert follow(local) == ""


@pytest.mark.parametrize("full", ["job.json", "log", "processes.json"])
def test_full_disk_is_one_line_and_leaves_nothing(
    submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    make = tempfile.mkdtemp

    def new_folder(**options: Any) -> str:
        folder = make(**options)
        name = full if full == "log" else f"{full}.new"
        Path(folder, name).symlink_to("/dev/full" if full != "log" else "/proc/absent")
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", new_folder)
    with pytest.raises(ResourceError) as raised:
        submit("print('begins')", **with_secret(home))
    reason = r"\[Errno 2\] No such file .*" if full == "log" else r".*No space left on device"
    way_out = "free some space, or set HOME to another folder"
    assert re.fullmatch(rf"the driver can't be started in {home}/.* \({reason}\); {way_out}", str(raised.value))
    assert not MachineJobs().list_jobs()
    assert [entry.name for entry in home.glob("*/*")] == ["lock"]
    assert not secret_files(home)


def test_driver_that_does_not_start_in_time_is_one_line(
    submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "START_SECONDS", -1.0)
    line = r"the driver can't be started in .* \(it has not started within .*\); try again on a less busy machine$"
    with pytest.raises(ResourceError, match=line):
        submit("print('begins')", **with_secret(home))
    assert not MachineJobs().list_jobs()
    assert not secret_files(home)


def test_lock_that_can_not_be_written_is_one_line(home: Path) -> None:
    local = MachineJobs()
    [folder] = home.iterdir()
    (folder / "lock").mkdir()
    line = r"/lock can't be written \(.*\); free some space, or set HOME to another folder$"
    with pytest.raises(ResourceError, match=line), local.submitting():
        pass


def test_wait_for_another_command_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(private_folder, "QUIET_SECONDS", 0.0)
    text = "waiting: another command on this machine {}\n"
    for lock, what in ((lambda: MachineJobs().submitting(), "submits a run"), (local_head.lock, "starts or ends Ray")):
        entered = threading.Event()

        def wait(lock: Callable[[], Any] = lock, entered: threading.Event = entered) -> None:
            with lock():
                entered.set()

        thread = threading.Thread(target=wait)
        with lock():
            thread.start()
            until(lambda what=what: capsys.readouterr().err == text.format(what), between=0.01)
            assert not entered.is_set()
        thread.join(60)
        assert entered.is_set()


def test_second_command_follows_the_job_of_the_first(
    submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found that the run is not under way, and store its code."""
    both, found, written = threading.Barrier(2), [], []

    monkeypatch.setattr(machine, "DRIVER", ("-c", WAITS))

    def upload() -> Callable[[], dict[str, str]]:
        both.wait(60)
        return lambda: written.append("document") or {}

    def command() -> None:
        run = {"run_name": "mine", "storage_path": "/runs"}
        found.append(jobs.find_or_submit(MachineJobs(), run, "/runs/mine", upload))

    threads = [threading.Thread(target=command) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (found, written) == (["mine", "mine"], ["document"])
    assert len(MachineJobs().list_jobs()) == 1


def test_old_jobs_are_deleted_with_their_logs(submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "KEPT_JOBS", 2)
    local = submit(WAITS, "long")
    for n in range(4):
        ended(submit("pass", f"short-{n}"), f"short-{n}")
    submit("pass", "last")
    assert list(listed(local)) == ["long", "short-2", "short-3", "last"]
    assert len(list(home.glob("*/*/log"))) == 4
    with pytest.raises(ResourceError, match="no longer lists job short-0"):
        local.job("short-0")


def test_folder_of_another_user_is_not_read(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    local = submit("pass")
    ended(local)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not local.list_jobs()


@pytest.mark.parametrize("home", ["{}/file", "{}/file/below", "/proc", "/dev/null", "relative", "."])
def test_home_that_can_not_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", home.format(tmp_path))
    with pytest.raises(UsageError, match=r"^HOME: ~/.ray-on-ecs, .*; set HOME to a folder of yours$"):
        MachineJobs()


@pytest.mark.parametrize(
    ("code", "state", "wanted"),
    [
        (-9, {"state": "finished"}, 0),
        (-9, {"state": "training", "job": "mine"}, 137),
        (None, {"state": "finished"}, 0),
        (None, {"state": "failed", "job": "mine"}, 1),
        (None, {"state": "interrupted", "job": "mine"}, 130),
        (None, {"state": "failed", "job": "another"}, "job mine failed (killed); and on"),
        (None, {"state": "training", "job": "mine"}, "job mine failed (killed); and on"),
        (None, None, "job mine failed (killed); and on"),
        (1, {"state": "finished"}, 1),
    ],
)
def test_folder_of_the_run_says_how_a_killed_job_ended(
    tmp_path: Path, code: int | None, state: dict[str, str] | None, wanted: int | str
) -> None:
    storage = RunStorage.open(str(tmp_path), "mine")
    if state and state["state"] == "finished":
        storage.write_json("result.json", {})
    elif state:
        storage.write_json("status.json", state)
    job = {"status": "FAILED", "driver_exit_code": code, "message": "killed"}
    try:
        text: int | str = jobs.driver_exit_status("mine", job, storage, lambda: "and on")
    except TrainingError as error:
        text = str(error)
    assert text == wanted


def test_ray_ends_with_the_last_ray_program(submit: Submit, tmp_path: Path) -> None:
    """The parent of a driver ends Ray, also if the command is gone."""
    (tmp_path / "ray").mkdir()
    ray = subprocess.Popen(["sleep", "600"])
    started = driver_parent.identity(ray.pid)
    head = LocalHead("http://127.0.0.1:1", "127.0.0.1:6379", "secret", ray.pid, started, str(tmp_path / "ray"))
    with local_head.lock():
        local_head._remember(head)
    stop = tmp_path / "stop"
    waits = f"import os, pathlib, time\nwhile not pathlib.Path({str(stop)!r}).exists(): time.sleep(0.01)"
    shows = "import os; print(*(os.environ[f'RAY_{name}'] for name in ('ADDRESS', 'AUTH_MODE', 'AUTH_TOKEN')))"
    submit(waits, "first", head)
    local = submit(shows, "second", head)
    ended(local, "second")
    assert local.log("second") == "127.0.0.1:6379 token secret\n"
    with local_head.lock():
        local_head.end_unused()
    assert local_head.find() == head
    stop.touch()
    assert ray.wait(60) == -signal.SIGKILL
    until(lambda: not (tmp_path / "ray").exists())
