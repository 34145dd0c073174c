"""Ray head at an address of this machine: its REST API, its token, and the client of its jobs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ray_on_ecs.errors import ResourceError, UsageError, one_line

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

REQUEST_SECONDS = 20.0
WRONG_TOKEN = "the Ray head refuses the token"


@dataclass
class Head:
    """Ray head at an address of this machine.

    Attributes:
        url: The URL of its dashboard, without a slash at its end.
        token: Ray's token; empty for a cluster without one.
    """

    url: str
    token: str = ""

    def get(self, path: str) -> Any:
        """Return the JSON document at a path of the dashboard.

        Raises:
            UsageError: The head refuses the token.
            ResourceError: The head doesn't answer.
        """
        try:
            return self._get(path).json()
        except ValueError as cause:
            raise _silent(cause) from cause

    def date(self) -> str | None:
        """Return the head's clock, from HTTP's Date header, or None."""
        return self._get("/api/version").headers.get("Date")

    @cached_property
    def jobs(self) -> JobSubmissionClient:
        """Client of Ray's Jobs API."""
        from ray_on_ecs.cluster.jobs import connect  # it imports Ray

        self.export()
        return connect()

    def export(self) -> None:
        """Set the environment variables through which Ray's clients in this process find the head."""
        os.environ["RAY_API_SERVER_ADDRESS"] = self.url
        for name in ("NO_PROXY", "no_proxy"):  # a proxy would read the token, and can't reach this machine
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))
        if self.token:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=self.token)

    def _get(self, path: str) -> Any:
        import requests

        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with requests.Session() as session:
                session.trust_env = False  # a proxy would read the token, and can't reach this machine
                answer = session.get(self.url + path, headers=headers, timeout=REQUEST_SECONDS)
            if answer.status_code in (401, 403):
                raise UsageError(WRONG_TOKEN)
            answer.raise_for_status()
        except requests.RequestException as cause:
            raise _silent(cause) from cause
        return answer

    def runs_under_way(self) -> set[str]:
        """Return the names of the runs that have not ended; empty if the head doesn't answer."""
        try:
            jobs = self.get("/api/jobs/")
        except (ResourceError, UsageError):
            return set()
        active = [job["metadata"] or {} for job in jobs if job["status"] in ("PENDING", "RUNNING")]
        return {metadata["run_name"] for metadata in active if "run_name" in metadata}


def _silent(cause: Exception) -> ResourceError:
    return ResourceError(f"the Ray head doesn't answer ({one_line(cause)})")
