"""The command of a run's job, its submission to a Jobs API that fails, and its log over broken connections."""

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any

import pytest

from ray_on_ecs.cluster import head, jobs
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.cluster.jobs import UnreadLog
from ray_on_ecs.errors import ResourceError
from ray_on_ecs.node.api import AnswerError, Job
from tests.serving import serving

MINE = jobs.Submission(jobs.run_of("mine", "/runs"), "/runs/my run")


def upload() -> Callable[[], dict[str, str]]:
    return dict


def test_driver_gets_the_folder_of_the_run() -> None:
    assert MINE.entrypoint == "exec python -P -m ray_on_ecs.run '/runs/my run'"


def refusal(text: str) -> AnswerError:
    return AnswerError("http://127.0.0.1:9/api/jobs/", f"500: {text}", 500)


class Refusing(Head):
    """A head that refuses the first jobs for these reasons, and takes the next one."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("http://127.0.0.1:9")
        self.reasons = list(reasons)
        self.submitted: list[str] = []

    def list_jobs(self) -> list[Job]:
        return [{"submission_id": job, "metadata": MINE.run, "status": "RUNNING"} for job in self.submitted]

    def submit(self, job_id: str, entrypoint: str, metadata: dict[str, str], **options: Any) -> None:
        if self.reasons:
            raise refusal(self.reasons.pop(0))
        self.submitted.append(job_id)


def test_submission_is_repeated_until_the_agent_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    refusing = Refusing(*["No available agent to submit job, please try again later."] * 5)
    assert jobs.find_or_submit(refusing, MINE, upload) == "mine"
    assert refusing.submitted == ["mine"]


@pytest.mark.parametrize("is_taken", [False, True])
def test_lost_response_submits_no_second_job(monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)

    class Losing(Refusing):
        def submit(self, *job: Any, **options: Any) -> None:
            lost, self.lost = self.lost, False
            if is_taken or not lost:
                super().submit(*job, **options)
            if lost:
                raise AnswerError(self.url, "Remote end closed connection without response", is_passing=True)

        lost = True

    refusing = Losing()
    assert jobs.find_or_submit(refusing, MINE, upload) == "mine"
    assert refusing.submitted == ["mine"]


def test_lost_race_is_repeated_with_a_limit() -> None:
    refusing = Refusing(*["Job with submission_id mine already exists."] * jobs.SUBMIT_ATTEMPTS)
    with pytest.raises(ResourceError, match="the Ray head did not accept the job"):
        jobs.find_or_submit(refusing, MINE, upload)


def shown(*connections: list[str]) -> str:
    """The text that is shown of a log over these connections, each of which sends it from its start."""
    log, text = UnreadLog(), ""
    for parts in connections:
        log.connect()
        text += "".join(map(log.rest, parts))
    return text


def test_log_over_several_connections_is_shown_once() -> None:
    log = "epoch 1\nepoch 2\nepoch 3\n"
    assert shown([], ["epo"], ["epoch", " 1\nepo"], ["e", "poch 1\nepoch 2\n", "epoch 3\n"]) == log
    long = log * 1000
    assert shown([long[:10]], [long[:900], long[900:3000]], [long[:2000], long[2000:]]) == long


def test_silent_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "AGENT_SECONDS", 0.0)
    monkeypatch.setattr(head, "REQUEST_SECONDS", 0.2)
    with silent_about_jobs() as url:
        with pytest.raises(OSError, match="timed out"):
            Head(url).submitted_jobs()
        with pytest.raises(ResourceError, match="the Ray head did not accept the job"):
            jobs.find_or_submit(Head(url), MINE, upload)


@contextmanager
def silent_about_jobs() -> Generator[str]:
    """The URL of a head that answers requests for its version, and accepts others without an answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/api/version":
                over.wait()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"ray_version": version("ray")}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}"
        over.set()
