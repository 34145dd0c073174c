"""The head that `run --local` starts for a Ray program: its file, its end, and a start that fails."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from typing import Any

import pytest

from ray_on_ecs.cluster import local_head
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.cluster.local_head import LocalHead
from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.jobs.driver_parent import identity
from ray_on_ecs.node import ports
from tests.serving import serving

# Replaces `ray start --block`, in the head's folder. The first argument is the status of its dashboard's answer; an
# error ends the raylet. With a second argument the Ray Client server does not start, and Ray ends all other processes.
# If the dashboard's port is taken, Ray runs without a dashboard.
RAY = """
import http.server, json, pathlib, shutil, socket, subprocess, sys, time
[folder] = [pathlib.Path(word.partition("=")[2]) for word in sys.argv if word.startswith("--temp-dir=")]
logs = folder / "session_1" / "logs"
logs.mkdir(parents=True)
folder.chmod(0o777)  # as Ray does
(logs / "raylet.out").touch()
(folder / "session_latest").symlink_to("session_1")
shutil.copy(shutil.which("sleep"), "raylet")
raylet = subprocess.Popen(["./raylet", "600"])
status, without_client, nodes = int(sys.argv[1]), not sys.argv[2].startswith("--"), []

class Dashboard(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if status != 200 or (without_client and len(nodes) > 8):
            raylet.kill()
            raylet.wait()
        self.send_response(status)
        self.end_headers()
        nodes.append({"state": "ALIVE"})
        answer = {"ray_version": "2.60.0", "session_name": "session_1"}
        if "nodes" in self.path:  # the node joins after the dashboard's first answers
            answer = {"data": {"result": {"result": nodes[4:]}}}
        self.wfile.write(json.dumps(answer).encode())

ports = {}
for word in sys.argv:
    name, _, value = word.partition("=")
    if name.endswith("port") and value != "0":
        ports[name] = int(value)
dashboard = ports.pop("--dashboard-port")
if without_client:
    del ports["--ray-client-server-port"]
try:
    servers = [socket.create_server(("127.0.0.1", port)) for port in ports.values()]
    http.server.HTTPServer(("127.0.0.1", dashboard), Dashboard).serve_forever()
except OSError:
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def running(folder: Path) -> LocalHead:
    """A head with this process in the place of Ray's."""
    folder.mkdir()
    return LocalHead("http://127.0.0.1:1", "127.0.0.1:2", "secret", os.getpid(), identity(os.getpid()), str(folder))


def test_running_head_is_found_by_its_owner(tmp_path: Path) -> None:
    head = running(tmp_path / "ray")
    with local_head.lock():
        local_head._remember(head)
    assert local_head.find() == head
    [file] = (tmp_path / ".ray-on-ecs").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(json.dumps(asdict(replace(head, started="before"))))
    assert local_head.find() is None
    file.write_text("{}")
    assert local_head.find() is None


def test_the_folder_of_a_killed_head_is_removed(tmp_path: Path) -> None:
    head = running(tmp_path / "ray")
    with local_head.lock():
        local_head._remember(replace(head, started="before"))
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


def test_start_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_head, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^--local: a Ray program needs Ray, .* pip install '\.\[local\]' "):
        local_head.start(2)


def test_the_logs_of_a_raylet_that_died_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_head, "START_ATTEMPTS", 1)
    monkeypatch.setattr(local_head, "RAY", (sys.executable, "-c", RAY, "503"))
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(new_folder(tmp_path / "ray")))
    with local_head.lock(), pytest.raises(ResourceError) as raised:
        local_head.start(2)
    assert str(raised.value).endswith(f"the raylet has ended; its logs are in {tmp_path}/ray/r/session_latest/logs")
    assert (tmp_path / "ray" / "r" / "session_latest" / "logs" / "raylet.out").exists()


def test_start_whose_client_server_gives_up_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter([(sys.executable, "-c", RAY, "200", "without a client"), (sys.executable, "-c", RAY, "200")])
    launch = local_head._launch

    def next_attempt(*arguments: Any) -> LocalHead:
        monkeypatch.setattr(local_head, "RAY", next(attempts))
        return launch(*arguments)

    monkeypatch.setattr(local_head, "_launch", next_attempt)
    with local_head.lock():
        head = local_head.start(2)
    assert next(attempts, None) is None
    assert len(head.processes) == 2
    local_head.end_unused()


class Foreign(StreamRequestHandler):
    """Another program on the port of the dashboard."""

    answer = b""

    def handle(self) -> None:
        self.connection.recv(2**16)
        self.wfile.write(self.answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 401 Unauthorized\r\n\r\n",
        b'HTTP/1.1 200 OK\r\n\r\n{"ray_version": "2.60.0", "session_name": "session_2"}',
    ],
    ids=["no HTTP", "a Ray with another token", "a Ray without a token"],
)
def test_taken_port_is_replaced_by_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes) -> None:
    monkeypatch.setattr(local_head, "RAY", (sys.executable, "-c", RAY, "200"))
    monkeypatch.setattr(Foreign, "answer", answer)
    with serving(TCPServer(("127.0.0.1", 0), Foreign)) as foreign, local_head.lock():
        taken = foreign.server_address[1]
        attempts = iter([lambda count: [taken] * count, ports.free_ports])
        monkeypatch.setattr(ports, "free_ports", lambda count: next(attempts)(count))
        head = local_head.start(2)
    assert head.url != f"http://127.0.0.1:{taken}"
    assert local_head.find() == head
    assert len(head.processes) == 2
    assert Head(head.url, head.token).nodes(), "Ray gives up if its node does not join"
    assert Path(head.folder).stat().st_mode & 0o777 == 0o700
    local_head.end_unused()
    assert not head.processes


def listed(state: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"data": {"result": {"result": [{"state": state}]}}}).encode()


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (listed("ALIVE"), True),
        (listed("DEAD"), False),
        (b'HTTP/1.1 200 OK\r\n\r\n{"data": {"result": {"result": []}}}', False),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\nthe GCS is gone", False),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", False),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False),
        (b"", False),
    ],
    ids=["alive", "raylet killed", "no node", "GCS killed", "another token", "no HTTP", "silent"],
)
def test_head_that_is_half_dead_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes, wanted: bool
) -> None:
    monkeypatch.setattr(local_head, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(Foreign, "answer", answer)
    head = running(tmp_path / "ray")
    assert not local_head.answers(head), "nothing listens"
    with serving(TCPServer(("127.0.0.1", 0), Foreign)) as dashboard:
        if wanted:
            monkeypatch.setattr(local_head, "ANSWER_SECONDS", 60.0)
        head = replace(head, url=f"http://127.0.0.1:{dashboard.server_address[1]}")
        assert local_head.answers(head) == wanted
        assert not local_head.answers(replace(head, started="before"))


def test_start_ends_the_head_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_head, "RAY", (sys.executable, "-c", RAY, "200"))
    half_dead = subprocess.Popen(["sleep", "600"])
    before = replace(running(tmp_path / "ray"), pid=half_dead.pid, started=identity(half_dead.pid))
    with local_head.lock():
        local_head._remember(before)
        head = local_head.start(2)
    half_dead.wait(60)
    assert not (tmp_path / "ray").exists()
    assert local_head.find() == head
    local_head.end_unused()


@pytest.mark.parametrize("full", ["_remember", "_launch", "new_short"])
def test_full_disk_is_one_line_and_leaves_no_ray(monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    monkeypatch.setattr(local_head, "RAY", (sys.executable, "-c", RAY, "200"))
    started, launch = [], local_head._launch

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_head, "_launch", lambda *words: started.append(launch(*words)) or started[-1])
    monkeypatch.setattr(local_head, full, refuse)
    line = r"^Ray can't start on this machine \(\[Errno 28\] No space left on device\); free some space$"
    with local_head.lock(), pytest.raises(ResourceError, match=line):
        local_head.start(2)
    assert not [head for head in started if head.processes or Path(head.folder).exists()]
    assert local_head.find() is None


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path
