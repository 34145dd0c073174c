"""The command of a run's job, its submission to a Jobs API that fails, and its log over broken connections."""

import asyncio
import json
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_on_ecs.cluster import jobs
from ray_on_ecs.cluster.jobs import MAX_COMMAND_BYTES, UnreadLogs, submission_of_script
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ResourceError, UsageError
from tests.serving import serving

# The rest of the command has less.
REST = 1000


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return "train.py"


def test_longest_command_is_accepted(script: str) -> None:
    submission = submission_of_script([script, "x" * (MAX_COMMAND_BYTES - REST)])
    done = subprocess.run(["/bin/sh", "-c", f"if false; then {submission.entrypoint}; fi"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("given", ["pip/gpu.txt", "./pip/../pip/gpu.txt", "{folder}/pip/gpu.txt"])
def test_requirements_file_is_relative_to_the_folder(script: str, given: str) -> None:
    Path("pip").mkdir()
    Path("pip/gpu.txt").touch()
    submission = submission_of_script(["--requirements", given.format(folder=Path.cwd()), script])
    assert " --requirements pip/gpu.txt " in submission.entrypoint


@pytest.mark.parametrize("arguments", [["x" * MAX_COMMAND_BYTES], ["a b"] * (MAX_COMMAND_BYTES // 6)])
def test_too_long_command_is_refused(script: str, arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=r"SCRIPT: the command has 12\d KiB, .* put the arguments into a file"):
        submission_of_script([script, *arguments])


MINE = jobs.Submission({"run_name": "mine", "storage_path": "runs"}, RunConfig(command=("train.py",)))


class Refusing:
    """A Jobs API that refuses the first jobs for these reasons, and takes the next one."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)
        self.submitted: list[str] = []

    def list_jobs(self) -> list[Any]:
        running = SimpleNamespace(is_terminal=lambda: False)
        return [SimpleNamespace(submission_id=job, metadata=MINE.run, status=running) for job in self.submitted]

    def submit_job(self, *, submission_id: str, **_: Any) -> None:
        if self.reasons:
            raise RuntimeError(self.reasons.pop(0))
        self.submitted.append(submission_id)


def test_submission_is_repeated_until_the_agent_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    api: Any = Refusing(*["No available agent to submit job, please try again later."] * 5)
    assert jobs.find_or_submit(api, MINE, {}) == "mine"
    assert api.submitted == ["mine"]


@pytest.mark.parametrize("is_taken", [False, True])
def test_lost_response_submits_no_second_job(monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)

    class Losing(Refusing):
        def submit_job(self, **job: Any) -> None:
            lost, self.lost = self.lost, False
            if is_taken or not lost:
                super().submit_job(**job)
            if lost:
                raise ConnectionError("Remote end closed connection without response")

        lost = True

    api: Any = Losing()
    assert jobs.find_or_submit(api, MINE, {}) == "mine"
    assert api.submitted == ["mine"]


def test_lost_race_is_repeated_with_a_limit() -> None:
    api: Any = Refusing(*["Job with submission_id mine already exists."] * jobs.SUBMIT_ATTEMPTS)
    with pytest.raises(ResourceError, match="the Ray head did not accept the job"):
        jobs.find_or_submit(api, MINE, {})


class Cut:
    """A Jobs API whose connection breaks after each part of a log; each connection sends the log from its start."""

    def __init__(self, *connections: list[str]) -> None:
        self.connections = list(connections)

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        for part in self.connections.pop(0):
            yield part
        if self.connections:
            raise ConnectionError


def test_log_over_several_connections_is_shown_once() -> None:
    client: Any = Cut([], ["epo"], ["epoch", " 1\nepo"], ["e", "poch 1\nepoch 2\n", "epoch 3\n"])
    logs, shown = UnreadLogs(), []

    async def read() -> None:
        async for text in logs.read(client, "mine"):
            shown.append(text)

    while client.connections:
        with suppress(ConnectionError):
            asyncio.run(read())
    assert "".join(shown) == "epoch 1\nepoch 2\nepoch 3\n"


def test_silent_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own client would wait for ever."""
    monkeypatch.setattr(jobs, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(jobs, "AGENT_SECONDS", 0.0)
    with silent_after(1) as url:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", url)
        client = jobs.connect()
        with pytest.raises(OSError, match="timed out"):
            client.list_jobs()
        with pytest.raises(ResourceError, match="the Ray head did not accept the job"):
            jobs.find_or_submit(client, MINE, MINE.run)


@contextmanager
def silent_after(number: int) -> Iterator[str]:
    """The URL of a head that answers this number of requests, and then accepts connections without an answer."""
    answers = iter([{"ray_version": version("ray")}] * number)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (answer := next(answers, None)) is None:
                over.wait()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}"
        over.set()
