"""Ray head at an address of this machine: its REST API, its token, and the client of its jobs."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.node import api
from ray_on_ecs.node.jobs import ENDED

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

    def get(self, path: str, *keys: str) -> Any:
        """Return the JSON document at a path of the dashboard, or what it has below these keys.

        Raises:
            UsageError: The head refuses the token.
            ResourceError: The head doesn't answer, or what answers is not Ray.
        """
        document, _ = self._ask(path)
        with self._answering():
            for key in keys:
                document = document[key]
        return document

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return the jobs, also drivers that were started by hand; raise as `get` does."""
        document, _ = self._ask("/api/jobs/")
        with self._answering():
            return api.jobs_in(document, "status")

    def clock(self) -> float | None:
        """Return the head's time (Unix time), or None if HTTP's Date header is missing."""
        with suppress(TypeError, ValueError):
            return parsedate_to_datetime(self._ask("/api/version")[1]["Date"]).timestamp()
        return None

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

    def _ask(self, path: str) -> tuple[Any, Mapping[str, str]]:
        with self._answering():
            return api.ask(self.url + path, REQUEST_SECONDS, self.token)

    @contextmanager
    def _answering(self) -> Generator[None]:
        """Turn each failure of an answer into the error that `get` documents."""
        try:
            yield
        except (LookupError, OSError, TypeError) as cause:
            if isinstance(cause, HTTPError) and cause.code in (401, 403):
                raise UsageError(WRONG_TOKEN) from cause
            what = one_line(cause) if isinstance(cause, OSError) else f"not an answer of Ray's: {cause!r}"
            raise ResourceError(f"the Ray head doesn't answer at {self.url} ({what})") from cause

    def runs_under_way(self) -> set[tuple[str, str]] | None:
        """Return the runs that have not ended, or None if the head doesn't answer.

        A run is its name and its storage path. A job without them, such as a driver that was started by hand, has its
        ID as the name.
        """
        try:
            jobs = self.list_jobs()
        except (ResourceError, UsageError):
            return None
        runs = set()
        for job in jobs:
            if job["status"] not in ENDED:
                metadata = job.get("metadata") or {}
                name = metadata.get("run_name") or job.get("submission_id") or job.get("job_id")
                runs.add((str(name), str(metadata.get("storage_path") or "").rstrip("/")))
        return runs
