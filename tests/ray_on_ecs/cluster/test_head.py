"""The log of a job as it is written: over connections that break, are refused, or lead nowhere."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from aiohttp import web

from ray_on_ecs.cluster import head
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.errors import ResourceError, UsageError

TOKEN = "right"


class Dashboard:
    """A head's dashboard on a free port, with the log of the job `mine`.

    Attributes:
        parts: The messages of the log.
        is_cut: Whether the connection breaks after them, instead of being closed.
        is_silent: Whether the connection stays open after them, until a second request for the version.
        versions: The number of requests for the version.
        answers_version: Whether it answers them.
    """

    def __init__(self) -> None:
        self.parts = ["a\n", "b\n"]
        self.url = ""
        self.is_cut = self.is_silent = False
        self.versions = 0
        self.answers_version = True
        self.over = asyncio.Event()

    async def version(self, request: web.Request) -> web.Response:
        self.versions += 1
        if not self.answers_version:
            await self.over.wait()
        elif self.versions > 1:
            self.is_silent = False
        return web.json_response({"ray_version": "2"})

    async def log(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=403)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for part in self.parts:
            await socket.send_str(part)
        while self.is_silent and not self.over.is_set():
            await asyncio.sleep(0.01)
        if self.is_cut and request.transport:
            request.transport.abort()
        return socket

    async def serve(self, started: threading.Event) -> None:
        app = web.Application()
        app.add_routes([web.get("/api/version", self.version), web.get("/api/jobs/mine/logs/tail", self.log)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        [(_, port)] = runner.addresses
        self.url = f"http://127.0.0.1:{port}"
        started.set()
        await self.over.wait()
        await runner.cleanup()


@contextmanager
def serving() -> Generator[Dashboard]:
    dashboard, started = Dashboard(), threading.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(dashboard.serve(started)), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield dashboard
    finally:
        loop.call_soon_threadsafe(dashboard.over.set)
        thread.join()
        loop.close()


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Generator[Dashboard]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):  # a proxy would read the token
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving() as dashboard:
        yield dashboard


def shown(dashboard: Dashboard, token: str = TOKEN, job: str = "mine") -> list[str]:
    texts: list[str] = []
    Head(dashboard.url, token).tail(job, texts.append)
    return texts


def test_log_is_shown_without_the_proxy(dashboard: Dashboard) -> None:
    assert shown(dashboard) == ["a\n", "b\n"]
    assert Head(dashboard.url, TOKEN).get("/api/version", "ray_version") == "2"


def test_cut_log_is_an_error_that_passes(dashboard: Dashboard) -> None:
    dashboard.is_cut = True
    with pytest.raises(ResourceError, match=rf"{dashboard.url}/api/jobs/mine/logs/tail \(.*; try again in a minute"):
        shown(dashboard)


def test_wrong_token_for_the_log_is_a_mistake(dashboard: Dashboard) -> None:
    with pytest.raises(UsageError, match="the Ray head refuses the token"):
        shown(dashboard, "another")


def test_log_of_an_unknown_job_is_refused(dashboard: Dashboard) -> None:
    with pytest.raises(ResourceError, match=rf"refused at {dashboard.url}/api/jobs/other/logs/tail \(404"):
        shown(dashboard, job="other")


def test_silent_log_of_a_head_that_answers_continues(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "SILENT_SECONDS", 0.05)
    dashboard.is_silent = True
    assert shown(dashboard) == ["a\n", "b\n"]
    assert dashboard.versions > 1


def test_silent_log_of_a_silent_head_ends(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(head, "REQUEST_SECONDS", 1.0)
    dashboard.is_silent, dashboard.answers_version = True, False
    with pytest.raises(ResourceError, match=r"/api/version \(timed out\)"):
        shown(dashboard)


def test_error_of_the_screen_is_not_a_lost_connection(dashboard: Dashboard) -> None:
    def fail(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Head(dashboard.url, TOKEN).tail("mine", fail)
