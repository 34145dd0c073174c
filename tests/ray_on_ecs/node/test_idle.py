"""The idle time of a head: everything that keeps it awake, and what must not."""

import os
import pty
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from ray_on_ecs.contract import CLOUDWATCH_NAMESPACE_VARIABLE, SLEEP_VARIABLE
from ray_on_ecs.jobs.documents import Wake
from ray_on_ecs.node import idle, ports
from ray_on_ecs.node.idle import DESK, MACHINE, Idle
from tests.waiting import until


class Clock:
    """Monotonic time in seconds, which passes by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def noted(clock: Clock, minutes: float, *, desk: str = "", machine: str = "") -> Idle:
    """The idle time of a head that both threads have found idle for some minutes, and then perhaps busy."""
    idle_time = Idle(now=clock)
    for _ in range(round(minutes * 6)):
        clock.now += 10
        idle_time.note(DESK, "")
        idle_time.note(MACHINE, "")
    idle_time.note(DESK, desk)
    idle_time.note(MACHINE, machine)
    return idle_time


def test_idle_time_grows_while_both_threads_find_nothing(clock: Clock) -> None:
    assert noted(clock, 0).minutes == 0
    assert noted(clock, 90).minutes == 90


@pytest.mark.parametrize("busy", [{"desk": "a run"}, {"machine": "a shell"}])
def test_work_begins_the_idle_time_anew(clock: Clock, busy: dict[str, str]) -> None:
    idle_time = noted(clock, 90, **busy)
    assert idle_time.minutes == 0
    clock.now += 30
    idle_time.note(DESK, "")
    idle_time.note(MACHINE, "")
    assert idle_time.minutes == 0.5


@pytest.mark.parametrize("silent", [DESK, MACHINE])
def test_thread_that_hangs_counts_as_busy(clock: Clock, silent: str, caplog: pytest.LogCaptureFixture) -> None:
    idle_time = noted(clock, 90)
    for _ in range(30):
        clock.now += 10
        idle_time.note({DESK: MACHINE, MACHINE: DESK}[silent], "")
        idle_time.minutes  # noqa: B018 # as the threads read it
    assert idle_time.minutes == 0
    [record] = caplog.records
    assert f"the thread of the {silent} hangs" in record.message


@pytest.mark.parametrize("known", [DESK, MACHINE])
def test_head_is_busy_until_both_threads_have_looked(clock: Clock, known: str) -> None:
    idle_time = Idle(now=clock)
    for _ in range(100):
        clock.now += 10
        idle_time.note(known, "")
    assert idle_time.minutes == 0


# The machine


def lines(*connections: tuple[str, str, str]) -> str:
    """A table of /proc/net, with connections as local and remote endpoint and state."""
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    rest = "00000000:00000000 00:00000000 00000000  1000        0 12345 1 0000000000000000 20 4 30 10 -1"
    return header + "".join(f"   {n}: {a} {b} {c} {rest}\n" for n, (a, b, c) in enumerate(connections))


HEAD, LAPTOP = "0500000A", "0900000A"  # 10.0.0.5, and 10.0.0.9
MAPPED = "0000000000000000FFFF0000"
LOOPBACK_6 = "00000000000000000000000001000000"
GLOBAL_6, OWN_6 = "B80D0120000000000000000001000000", "B80D0120000000000000000002000000"
DASHBOARD, NOTEBOOK, GCS = "2049", "22B8", "18EB"


@pytest.mark.parametrize(
    ("connection", "visitor"),
    [
        ((f"{HEAD}:{DASHBOARD}", f"{LAPTOP}:D431", "01"), "10.0.0.9"),
        ((f"{HEAD}:{NOTEBOOK}", f"{LAPTOP}:D431", "01"), "10.0.0.9"),
        ((f"{HEAD}:{DASHBOARD}", f"{LAPTOP}:D431", "06"), "10.0.0.9"),
        ((f"{MAPPED}{HEAD}:{DASHBOARD}", f"{MAPPED}{LAPTOP}:D431", "01"), "10.0.0.9"),
        ((f"{OWN_6}:{NOTEBOOK}", f"{GLOBAL_6}:D431", "01"), "2001:db8::1"),
        ((f"{HEAD}:{DASHBOARD}", f"{HEAD}:D431", "01"), None),
        (("0100007F:2049", "0100007F:D431", "01"), None),
        ((f"{LOOPBACK_6}:{DASHBOARD}", f"{LOOPBACK_6}:D431", "01"), None),
        ((f"{MAPPED}0100007F:{DASHBOARD}", f"{MAPPED}0100007F:D431", "01"), None),
        ((f"{OWN_6}:{NOTEBOOK}", f"{OWN_6}:D431", "01"), None),
        (("00000000:2049", "00000000:0000", "0A"), None),
        ((f"{HEAD}:{DASHBOARD}", f"{LAPTOP}:D431", "08"), None),
        ((f"{HEAD}:{GCS}", f"{LAPTOP}:D431", "01"), None),
        ((f"{HEAD}:D431", f"{LAPTOP}:{DASHBOARD}", "01"), None),
    ],
)
def test_connection_of_another_machine_keeps_awake(connection: tuple[str, str, str], visitor: str | None) -> None:
    addresses = list(idle.visitors(lines(connection), (ports.DASHBOARD, idle.NOTEBOOK_PORT)))
    assert addresses == ([visitor] if visitor else [])


def test_table_of_this_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernel's own format: a connection over loopback, which is then made another machine's."""
    with socket.create_server(("127.0.0.1", 0)) as server, closing(socket.create_connection(server.getsockname())):
        port = server.getsockname()[1]
        monkeypatch.setattr(ports, "DASHBOARD", port)
        assert idle.connection(idle.PROC) == ""
        table = (idle.PROC / "net" / "tcp").read_text()
    changed = table.replace(f"0100007F:{port:04X} 0100007F:", f"{HEAD}:{port:04X} {LAPTOP}:")
    assert list(idle.visitors(changed, (port,))) == ["10.0.0.9"]


def stat(pid: int, parent: int, name: str = "python", state: str = "S", terminal: int = 0, started: int = 500) -> str:
    rest = f"-1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 {started} 1 2"
    return f"{pid} ({name}) {state} {parent} {pid} {pid} {terminal} {rest}"


def put_process(proc: Path, line: str, command: str) -> None:
    folder = proc / line.split()[0]
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_bytes(line.encode("latin-1"))
    (folder / "cmdline").write_text(command.replace(" ", "\0"))


@pytest.mark.parametrize(
    ("line", "command", "counts"),
    [
        (stat(50, 0, "bash", terminal=34816), "bash", True),
        (stat(50, 0, "bash"), "bash", True),
        (stat(50, 0), "/usr/bin/python /usr/bin/ray-on-ecs run image_classifier.py", True),
        (stat(50, 0, "tail"), "tail -f ray-health", True),
        (stat(50, 49, "bash", terminal=34817), "bash", True),
        (stat(50, 0, "a ) S 1 (b"), "a ) S 1 (b", True),
        (stat(50, 0, "sleep", state="T"), "sleep 60", True),
        (stat(50, 0, "entra\xc3"), "bash", True),
        (stat(1, 0, "docker-init"), "/sbin/docker-init -- ray-head", False),
        (stat(50, 0, "ray-health"), "/usr/bin/python /usr/bin/ray-health head", False),
        (stat(50, 0, "ray-health"), "/usr/bin/ray-health head", False),
        (stat(50, 0, "bash", state="Z"), "", False),
        (stat(50, 0, "bash", state="X"), "", False),
        (stat(7, 1, "ray-head"), "/usr/bin/python /usr/bin/ray-head", False),
        (stat(50, 7, "gcs_server"), "gcs_server --port=6379", False),
        (stat(50, 1, "a 0 (x)"), "a 0 (x)", False),
    ],
)
def test_process_from_outside_keeps_awake(tmp_path: Path, line: str, command: str, counts: bool) -> None:
    put_process(tmp_path, line, command)
    (tmp_path / "60").mkdir()  # a process that has just ended
    (tmp_path / "net").mkdir()
    processes = idle.Processes(tmp_path)
    assert processes.reason() == ""
    assert bool(processes.reason()) == counts


HEALTH = (stat(50, 0, "ray-health"), "/usr/bin/python /usr/bin/ray-health head")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((stat(50, 0, "runc:[2:INIT]"), "runc init"), HEALTH),
        ((stat(50, 0, "runc:[2:INIT]"), ""), HEALTH),
        ((stat(50, 0, "ray-health"), ""), HEALTH),
        ((stat(50, 0, "runc:[2:INIT]"), ""), (stat(50, 0, "runc:[2:INIT]", started=4000), "")),
        ((stat(50, 0, "runc:[2:INIT]"), ""), (stat(53, 0, "runc:[2:INIT]"), "")),
        (HEALTH, (stat(50, 0, "bash", started=4000), "bash")),
    ],
)
def test_process_of_one_look_keeps_nothing_awake(
    tmp_path: Path, first: tuple[str, str], second: tuple[str, str]
) -> None:
    processes = idle.Processes(tmp_path)
    put_process(tmp_path, *first)
    assert processes.reason() == ""
    shutil.rmtree(tmp_path / first[0].split()[0])
    put_process(tmp_path, *second)
    assert processes.reason() == ""


def test_terminal_of_this_machine_is_found() -> None:
    own, other = pty.openpty()
    opens = "import os, sys; os.open(sys.argv[1], os.O_RDWR); print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", opens, os.ttyname(other)]
    with Popen(words, stdin=PIPE, stdout=PIPE, start_new_session=True) as process:  # which gets the terminal
        assert process.stdout
        process.stdout.readline()
        pids = {pid for pid, _ in idle.from_outside(idle.PROC)}
        process.communicate()
    os.close(own)
    os.close(other)
    assert str(process.pid) in pids
    assert str(process.pid) not in {pid for pid, _ in idle.from_outside(idle.PROC)}


@pytest.mark.parametrize(("count", "reason"), [(1, ""), (2, "Ray has workers"), (9, "Ray has workers")])
def test_ray_node_beside_the_head_keeps_awake(count: int, reason: str) -> None:
    assert idle.beside_the_head([object()] * count) == reason


def test_head_that_ray_does_not_list_is_not_known() -> None:
    with pytest.raises(ValueError, match="Ray does not list the head"):
        idle.beside_the_head([])


def fail() -> str:
    raise OSError("does not answer")


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ({}, ("", "")),
        ({"a": lambda: "", "b": lambda: ""}, ("", "")),
        ({"a": lambda: "", "b": lambda: "work"}, ("work", "")),
        ({"a": lambda: "work", "b": fail}, ("work", "")),
        ({"a": fail, "b": lambda: "work"}, ("", "a can't be read: OSError: does not answer")),
        ({"a": lambda: "", "b": lambda: str(1 / 0)}, ("", "b can't be read: ZeroDivisionError: division by zero")),
    ],
    ids=["no checks", "idle", "busy", "busy before a failure", "failure before work", "failure"],
)
def test_check_that_fails_keeps_awake(checks: Mapping[str, Callable[[], str]], expected: tuple[str, str]) -> None:
    assert idle.look(checks) == expected


@pytest.mark.parametrize("table", ["a b c 01\n", "   0: 2049 D431 01\n", "   0: 0500000A:XX 0900000A:D431 01\n"])
def test_broken_table_is_a_failure(tmp_path: Path, table: str) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(table)
    assert "can't be read" in idle.look({"the connections": lambda: idle.connection(tmp_path)})[1]
    assert "can't be read" in idle.look({"the connections": lambda: idle.connection(tmp_path / "missing")})[1]


def test_check_that_hangs_keeps_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed by the one who asks for the idle time."""
    monkeypatch.setattr(idle, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(idle, "HANG_SECONDS", 0.3)
    hangs, goes_on, is_up = threading.Event(), threading.Event(), threading.Event()
    idle_time = Idle([MACHINE])

    def check() -> str:
        if hangs.is_set():
            goes_on.wait()
        return ""

    threading.Thread(target=idle.watch, args=(idle_time, {"a": check}, is_up), daemon=True).start()
    time.sleep(0.1)
    assert idle_time.minutes == 0, "Ray is starting"
    is_up.set()
    until(lambda: idle_time.minutes > 0, between=0.1)
    hangs.set()
    until(lambda: idle_time.minutes == 0, between=0.1)
    goes_on.set()
    hangs.clear()
    until(lambda: idle_time.minutes > 0, between=0.1)


VARIABLES = {CLOUDWATCH_NAMESPACE_VARIABLE: "ray-on-ecs/c", "AWS_REGION": "us-west-2", SLEEP_VARIABLE: "60"}


@pytest.mark.parametrize(
    ("changed", "sleeps"),
    [
        ({}, True),
        ({SLEEP_VARIABLE: "0"}, False),
        ({SLEEP_VARIABLE: ""}, False),
        ({SLEEP_VARIABLE: "an hour"}, False),
        ({SLEEP_VARIABLE: "-1"}, False),
        ({CLOUDWATCH_NAMESPACE_VARIABLE: ""}, False),
        ({"AWS_REGION": ""}, False),
    ],
)
def test_head_sleeps_by_its_variables(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], sleeps: bool) -> None:
    for name, value in (VARIABLES | changed).items():
        monkeypatch.setenv(name, value)
    assert idle.wake_of_environment() == (Wake("ray-on-ecs/c", "us-west-2", 60.0) if sleeps else None)
