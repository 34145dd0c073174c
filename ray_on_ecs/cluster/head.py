"""Ray head at an address of this machine: its REST API, with its token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ray_on_ecs.node import api
from ray_on_ecs.node.api import Job

# A request ends after so much silence. A head that starts a job may be silent for ten seconds, or longer if it is busy.
REQUEST_SECONDS, JOB_SECONDS = 20.0, 60.0
# The whole log of a job has to come in this time, also through a slow connection.
LOG_SECONDS = 900.0


@dataclass
class Head:
    """Ray head at the URL of its dashboard, without a slash at its end. Each method raises as `api.ask` does."""

    url: str
    token: str = ""  # empty for a cluster without one

    def get(self, path: str, *keys: str) -> Any:
        """Return the JSON document at a path of the dashboard, or what it has below these keys."""
        return api.below(self.url, api.ask(f"{self.url}{path}", REQUEST_SECONDS, self.token), *keys)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes, dead ones included."""
        path = "/api/v0/nodes?detail=1&limit=1000"
        return api.items_in(self.url, self.get(path, "data", "result", "result"), api.NODE)

    def job(self, job_id: str) -> Job:
        """Return Ray's details of a job."""
        return api.items_in(self.url, [self.get(f"/api/jobs/{quote(job_id)}")], api.JOB)[0]

    def submit(self, job_id: str, entrypoint: str, metadata: dict[str, str], **options: Any) -> None:
        """Submit a job; the options are those of Ray's Jobs API."""
        job = {"submission_id": job_id, "entrypoint": entrypoint, "metadata": metadata, **options}
        answer = api.ask(f"{self.url}/api/jobs/", JOB_SECONDS, self.token, method="POST", body=job)
        api.below(self.url, answer, "submission_id")

    def stop_job(self, job_id: str) -> None:
        """Ask a job to stop."""
        answer = api.ask(f"{self.url}/api/jobs/{quote(job_id)}/stop", JOB_SECONDS, self.token, method="POST")
        api.below(self.url, answer, "stopped")

    def log(self, job_id: str) -> str:
        """Return the log of a job so far."""
        url = f"{self.url}/api/jobs/{quote(job_id)}/logs"
        document = api.ask(url, JOB_SECONDS, self.token, longest=LOG_SECONDS)
        return str(api.below(self.url, document, "logs"))
