"""Answers of another program where Ray is expected: every question ends with one error that says so."""

import gc
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import clusters
from ray_on_ecs.cluster import head as cluster_head
from ray_on_ecs.cluster.clusters import HeadCluster
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.errors import NodeError, ResourceError, TrainingError, UsageError
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.node import api, dashboard, head, health, ports, protection, ray_status, worker
from tests.serving import serving

JSON = "Content-Type: application/json\r\n"


def http(body: bytes, headers: str = JSON, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {size}\r\n\r\n".encode() + body


RESET, SILENCE, ENDLESS = b"reset", b"silence", b"endless"
VERSION = json.dumps({"ray_version": version("ray"), "session_name": "session_of_another"}).encode()
# How an error ends: with the way out of a server that may be starting, and of a wrong address.
LATER, ADDRESS = "; try again in a minute", r"; is it the address of a Ray head\?"
NOT_RAYS = rf"\(not an answer of Ray's: .*\){ADDRESS}"
PAGE = b"<html>\n<h1>Bad gateway</h1>\n</html>\n"
HTML = "Content-Type: text/html\r\n"
# Each answer, and the error's text after the address.
ANSWERS = {
    "SSH": (b"SSH-2.0-OpenSSH_9.6\r\n", NOT_RAYS),
    "HTTP/2": (b"\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0\x80\0\x04\0\x01\0\0\0\x05\0\xff\xff\xff", NOT_RAYS),
    "nothing": (b"", rf"\(Remote end closed connection without response\){LATER}"),
    "a reset connection": (RESET, rf"\(.*(reset by peer|closed connection).*\){LATER}"),
    "silence": (SILENCE, rf"\(timed out\){LATER}"),
    "an endless body": (ENDLESS, rf"\(the answer does not end\){LATER}"),
    "a truncated body": (http(VERSION, length=1000), rf"\(the connection ended \d+ bytes before .*\){LATER}"),
    "a length that is too short": (http(VERSION, length=9), NOT_RAYS),
    "a length that is no number": (f"HTTP/1.1 200 OK\r\n{JSON}Content-Length: x\r\n\r\n".encode() + b"{", NOT_RAYS),
    "a broken chunk": (
        f"HTTP/1.1 200 OK\r\n{JSON}Transfer-Encoding: chunked\r\n\r\nx\r\n{{}}\r\n".encode(),
        r"\(.*\);",
    ),
    "a header without an end": (b"HTTP/1.1 200 OK\r\nContent-Type: " + 70_000 * b"x", r"\(.*\);"),
    "HTML": (http(PAGE, HTML), NOT_RAYS),
    "HTML as JSON": (http(PAGE), NOT_RAYS),
    "not UTF-8": (http(b'{"ray_version": "\xff"}'), NOT_RAYS),
    "a list": (http(b'["ray_version"]'), NOT_RAYS),
    "null": (http(b"null"), NOT_RAYS),
    "a number": (http(b"1"), NOT_RAYS),
    "another object": (http(b'{"status": "UP", "data": []}'), NOT_RAYS),
    "nested lists": (http(100_000 * b"["), NOT_RAYS),
    "400": (
        http(b"Traceback\nValueError: a job\n", "", "400 Bad Request"),
        rf"\(400: ValueError: a job\){ADDRESS}",
    ),
    "401": (http(b"no", "", "401 Unauthorized"), ""),
    "403": (http(PAGE, HTML, "403 Forbidden"), ""),
    "404": (http(b"", "", "404 Not Found"), rf"\(404: Not Found\){ADDRESS}"),
    "500": (http(b"{}", status="500 Internal Server Error"), rf"\(500: Internal Server Error\){LATER}"),
    "a page of a proxy": (http(PAGE, HTML, "502 Bad Gateway"), rf"\(502: </html>\){LATER}"),
    "an endless refusal": (http(b"", status="503 Busy", length=9), rf"\(503: Busy\){LATER}"),
    "a redirect": (http(b"", "Location: http://127.0.0.1:9/\r\n", "302 Found"), rf"\(302: Found\){ADDRESS}"),
    "a redirect to no URL": (http(b"", "Location: http://[\xff\r\n", "302 Found"), NOT_RAYS),
}
# One of each kind, for each of the places that ask.
KINDS = ["SSH", "nothing", "a truncated body", "HTML as JSON", "a list", "null", "500", "401", "a redirect"]


class Foreign(ThreadingTCPServer):
    """Another program, which sends an answer to each request.

    Attributes:
        url: Its URL.
        answer: The answer.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answer = b""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client has gone."""


class Handler(StreamRequestHandler):
    """Sends the answer, and closes the connection."""

    def handle(self) -> None:
        server = cast(Foreign, self.server)
        with suppress(OSError):
            self.connection.recv(2**16)
            answer = server.answer
            if answer == RESET:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif answer == SILENCE:
                self.connection.recv(2**16)
            elif answer == ENDLESS:
                self.wfile.write(f"HTTP/1.1 200 OK\r\n{JSON}\r\n[".encode())
                while True:
                    self.wfile.write(b"1,")
                    time.sleep(0.02)
            else:
                self.wfile.write(answer)


# Python's HTTP client does not close the socket of a connection that ends before its answer.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def server() -> Iterator[Foreign]:
    with serving(Foreign()) as server:
        yield server
    gc.collect()  # no later test may have the warnings


@pytest.fixture
def foreign(server: Foreign, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Foreign:
    """The program at the ports and addresses of a Ray head."""
    for module, name in ((protection, "TIMEOUT_SECONDS"), (dashboard, "ANSWER_SECONDS")):
        monkeypatch.setattr(module, name, 0.2)
    monkeypatch.setattr(api.ask, "__defaults__", (0.2, None))
    monkeypatch.setattr(api.check_gcs, "__defaults__", (0.2, None))
    port = server.server_address[1]
    monkeypatch.setattr(ports, "DASHBOARD", port)
    monkeypatch.setattr(ports, "AGENT", port)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(clusters, "DASHBOARD_URL", server.url)
    monkeypatch.setenv("RAY_ON_ECS_CLUSTER", "head")
    monkeypatch.delenv("RAY_HEAD_STATE", raising=False)
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", str(tmp_path / "runs"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return server


def connected(url: str) -> None:
    with HeadCluster().connect_to_ray():
        pytest.fail("this is not Ray")


def supervised(url: str) -> None:
    port = SimpleNamespace(dashboard_port=url.rpartition(":")[2])
    dashboard._answers(cast(Any, SimpleNamespace(_ray_params=port)))


def check_worker(url: str) -> None:
    with patch("sys.argv", ["ray-health", "worker"]):
        health.main()


# Questions, and the errors that their callers expect.
QUESTIONS: dict[str, tuple[Callable[[str], Any], tuple[type[Exception], ...]]] = {
    "a worker joins": (lambda url: worker.join_blocker("127.0.0.1") or pytest.fail("it joins"), (NodeError,)),
    "a head's jobs": (lambda url: head.any_under_way(MachineJobs()), (OSError,)),
    "a worker's health": (check_worker, ()),
    "a hanging dashboard": (supervised, ()),
    "the agent of ECS": (lambda url: protection.put(url, {}), (OSError,)),
    "a version": (lambda url: Head(url).get("/api/version", "ray_version"), (TrainingError,)),
    "nodes": (lambda url: Head(url).nodes(), (TrainingError,)),
    "a status": (lambda url: ray_status.read(), (OSError,)),
    "a connection": (connected, (TrainingError,)),
    "a job": (lambda url: Head(url).job("mine"), (TrainingError,)),
    "a submission": (lambda url: Head(url).submit("mine", "true", {}), (TrainingError,)),
    "a stop": (lambda url: Head(url).stop_job("mine"), (TrainingError,)),
    "a log": (lambda url: Head(url).log("mine"), (TrainingError,)),
    "a GCS": (lambda url: api.check_gcs(url[7:]), (OSError,)),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_foreign_answer_names_address_and_way_out(
    foreign: Foreign, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign.answer, text = ANSWERS[answer]
    if foreign.answer in (SILENCE, ENDLESS):
        monkeypatch.setattr(cluster_head, "REQUEST_SECONDS", 0.2)
    if not text:
        with pytest.raises(UsageError, match="the Ray head refuses the token"):
            Head(foreign.url).get("/api/version", "ray_version")
        return
    with pytest.raises(ResourceError) as caught:
        Head(foreign.url).get("/api/version", "ray_version")
    assert isinstance(caught.value, OSError)
    assert re.fullmatch(rf"[\w' ]+ at {foreign.url}(/api/version)? {text}.*", str(caught.value)), caught.value


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://nobody.invalid", "http://", "http://[", "127.0.0.1:9", "ray:1"]
)
def test_unreachable_address_is_named(url: str) -> None:
    with pytest.raises(ResourceError, match=re.escape(f"at {url}")):
        Head(url).get("", "ray_version")


@pytest.mark.parametrize("answer", KINDS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_foreign_answer_raises_a_documented_error(foreign: Foreign, question: str, answer: str) -> None:
    ask, errors = QUESTIONS[question]
    foreign.answer, _ = ANSWERS[answer]
    with suppress(*errors):
        ask(foreign.url)


COMMANDS = ("status", "stop --all", "stop first", "runs")


@pytest.mark.parametrize("answer", ["SSH", "nothing", "a list", "500"])
@pytest.mark.parametrize("words", COMMANDS)
def test_command_in_the_container_of_a_silent_ray(
    foreign: Foreign, words: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs are the head's own jobs; only the status of its nodes needs Ray."""
    foreign.answer, _ = ANSWERS[answer]
    status = main(words.split())
    output = "".join(capsys.readouterr())
    assert status == {"status": 3, "stop first": 2}.get(words, 0), output
    assert (foreign.url in output) == (words == "status")
