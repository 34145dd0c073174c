"""Ray head at an address of this machine: its REST API, with its token."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ray_on_ecs.node import api
from ray_on_ecs.node.api import AnswerError, Job, TokenError

# A request ends after so much silence. A head that starts a job may be silent for ten seconds, or longer if it is busy.
REQUEST_SECONDS, JOB_SECONDS = 20.0, 60.0
# The whole log of a job has to come in this time, also through a slow connection.
LOG_SECONDS = 900.0
# After this time without a new line of a log the head has to answer a request: the connection may lead nowhere.
SILENT_SECONDS = 30.0
ALIVE = "ALIVE"


@dataclass
class Head:
    """Ray head at the URL of its dashboard, without a slash at its end. Each method raises as `api.ask` does."""

    url: str
    token: str = ""  # empty for a cluster without one

    stop_seconds = 180.0  # for a stopped job, whose driver writes a last checkpoint

    def get(self, path: str, *keys: str) -> Any:
        """Return the JSON document at a path of the dashboard, or what it has below these keys."""
        return api.below(self.url, api.get(f"{self.url}{path}", REQUEST_SECONDS, self.token), *keys)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes, dead ones included."""
        path = "/api/v0/nodes?detail=1&limit=1000"
        return api.items_in(self.url, self.get(path, "data", "result", "result"), api.NODE)

    def list_jobs(self) -> list[Job]:
        """Return the jobs, also drivers that were started by hand."""
        return api.items_in(self.url, self.get("/api/jobs/"), api.JOB)

    def submitted_jobs(self) -> dict[str, Job]:
        """Return the submitted jobs by ID, in the order of their start; drivers started by hand have no ID."""
        jobs = [job for job in self.list_jobs() if job["submission_id"]]
        return {job["submission_id"]: job for job in sorted(jobs, key=lambda job: job.get("start_time") or 0)}

    def job(self, job_id: str) -> Job:
        """Return Ray's details of a job."""
        return api.items_in(self.url, [self.get(f"/api/jobs/{quote(job_id)}")], api.JOB)[0]

    @contextmanager
    def submitting(self) -> Generator[None]:
        """Do nothing: Ray refuses an ID that another command has submitted meanwhile."""
        yield

    def submit(self, job_id: str, entrypoint: str, metadata: dict[str, str], **options: Any) -> None:
        """Submit a job; the options are those of Ray's Jobs API."""
        job = {"submission_id": job_id, "entrypoint": entrypoint, "metadata": metadata, **options}
        answer = api.post(f"{self.url}/api/jobs/", job, JOB_SECONDS, self.token)
        api.below(self.url, answer, "submission_id")

    def stop_job(self, job_id: str) -> None:
        """Ask a job to stop."""
        answer = api.post(f"{self.url}/api/jobs/{quote(job_id)}/stop", None, JOB_SECONDS, self.token)
        api.below(self.url, answer, "stopped")

    def kill_job(self, job_id: str) -> bool:
        """Return False: Ray itself kills a job that does not stop."""
        return False

    def log(self, job_id: str) -> str:
        """Return the log of a job so far."""
        url = f"{self.url}/api/jobs/{quote(job_id)}/logs"
        document = api.ask(url, JOB_SECONDS, self.token, longest=LOG_SECONDS)
        return str(api.below(self.url, document, "logs"))

    def tail(self, job_id: str, show: Callable[[str], None]) -> None:
        """Show a job's log, from its start, as it is written, until the job has ended."""
        import asyncio  # other commands don't need it

        asyncio.run(self._tail(job_id, show))

    async def _tail(self, job_id: str, show: Callable[[str], None]) -> None:
        import asyncio

        import aiohttp

        url = f"{self.url}/api/jobs/{quote(job_id)}/logs/tail"
        async with aiohttp.ClientSession(headers=api.bearer(self.token)) as session:
            try:
                messages = await asyncio.wait_for(session.ws_connect(url), REQUEST_SECONDS)
            except aiohttp.WSServerHandshakeError as refusal:
                if refusal.status in (401, 403):
                    raise TokenError from refusal
                raise AnswerError(url, f"{refusal.status}: {refusal.message}", refusal.status) from refusal
            except (aiohttp.ClientError, OSError) as cause:
                raise AnswerError(url, str(cause) or repr(cause), is_passing=True) from cause
            async with messages:
                while True:
                    try:
                        message = await messages.receive(SILENT_SECONDS)
                    except TimeoutError:
                        self.get("/api/version", "ray_version")
                        continue
                    if message.type is aiohttp.WSMsgType.TEXT:
                        show(message.data)
                    elif message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.OK:
                        return
                    else:
                        raise AnswerError(url, "the connection has ended", is_passing=True)
