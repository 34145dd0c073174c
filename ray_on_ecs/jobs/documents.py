"""Documents by which a cluster's head and its users reach each other, below `clusters/CLUSTER` in the stack's bucket.

    head.json                   the head's state: its jobs, its nodes, what it has refused
    requests/USERID/ID.json     a request, which IAM lets only this user write; the head deletes it
    bell                        its version tells the head that there is a request
    logs/LOG/OFFSET             part of a job's log that begins at this byte

The head is the only writer of its state. It claims a request by recording its job there, on the condition that no other
head has written since. Times are S3's: clocks of laptops and heads are not compared.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ray_on_ecs.errors import one_line
from ray_on_ecs.jobs.record import Job, is_job
from ray_on_ecs.rules import finite, is_run_name
from ray_on_ecs.storage.bucket import Bucket
from ray_on_ecs.storage.disk import Disk

FORMAT = 1
HEAD, REQUESTS, BELL, LOGS = "head.json", "requests", "bell", "logs"
RUN, STOP, STACKS = "run", "stop", "stacks"
# Of all partitions, as us-gov-west-1 and eusc-de-east-1.
REGION = r"[a-z]{2,4}(-[a-z]{1,20}){1,3}-[0-9]"
MAX_REQUEST_BYTES = 2**18  # metadata alone: code and settings are in the run's folder


@dataclass(frozen=True)
class Wake:
    """Means to wake a head that sleeps, for users who know only the bucket."""

    namespace: str  # CloudWatch namespace of the cluster's metrics, in which users publish a request for the head
    region: str
    after_minutes: float  # idle time after which the head sleeps


@dataclass(frozen=True)
class HeadState:
    """The head's state."""

    # Its jobs and those of the heads before it, in the order of their start.
    jobs: list[Job] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # reasons by the IDs of the requests
    # Ray's version, nodes and GPUs (node/ray_status.py); empty while Ray does not answer.
    ray: dict[str, Any] = field(default_factory=dict)
    code: str = ""  # fingerprint of its code (node/labels.py)
    head: str = ""  # ID of the head
    secrets_key: str = ""  # KMS key of the runs' secrets; empty for AWS's
    wake: Wake | None = None  # means to wake it; None if it does not sleep
    idle_minutes: float = 0.0  # its idle time (node/idle.py)

    def to_json(self) -> bytes:
        """Return the document."""
        wake = asdict(self.wake) if self.wake else None
        return json.dumps({"format": FORMAT, **self.__dict__, "wake": wake}).encode()


@dataclass(frozen=True)
class Request:
    """A user's request."""

    id: str
    user: str  # the user's ID, `aws:userid`, which is part of its path
    kind: str  # RUN, STOP or STACKS
    content: Mapping[str, Any]  # the document
    time: float  # of the write (Unix time), and the age in seconds, both by the storage's clock
    age: float
    path: str

    @property
    def owner(self) -> str:
        """The user's name: IAM Identity Center's and a role's session name are part of the ID, a user's is not."""
        label = self.content.get("metadata", {}).get("owner", "") if self.kind == RUN else ""
        return self.user.partition(":")[2] or str(label) or self.user


class BrokenError(ValueError):
    """A document can't be used: `is_other_format` if another version has written it; `version`, of the head's state."""

    version: str | None = None

    def __init__(self, reason: str, *, is_other_format: bool = False) -> None:
        super().__init__(reason)
        self.is_other_format = is_other_format


@dataclass(frozen=True)
class Documents:
    """The documents of one cluster. Methods raise OSError if the storage does not answer."""

    store: Bucket | Disk
    root: str  # path of the folder, `bucket/clusters/CLUSTER`

    def path(self, *names: str) -> str:
        """Return the path of a document."""
        return "/".join([self.root, *names])

    def head_age(self) -> tuple[str, float]:
        """Return the version of the head's state, and the seconds since it was written; "" and 0 without one."""
        return self.store.age(self.path(HEAD))

    def read_head(self) -> tuple[str | None, HeadState]:
        """Return the version of the head's state, None without one, and the state; BrokenError if it can't be used."""
        version, content = self.store.read_version(self.path(HEAD))
        if version is None:
            return None, HeadState()
        try:
            return version, _head_state(_document(content))
        except BrokenError as cause:
            cause.version = version
            raise

    def write_head(self, state: HeadState, version: str | None) -> str | None:
        """Write the head's state if it has this version; return the new one.

        None if it had another version, also if the answer to a successful write was lost.
        """
        return self.store.write_if(self.path(HEAD), state.to_json(), version)

    def write_request(self, user: str, kind: str, request: str = "", **content: Any) -> str:
        """Write a request under this ID or a new one, and ring; return the ID."""
        request = request or uuid.uuid4().hex
        document = {"format": FORMAT, "kind": kind, **content}
        self._write(self.path(REQUESTS, user, f"{request}.json"), json.dumps(document).encode())
        self.ring()
        return request

    def ring(self) -> None:
        """Tell the head that there is a request, which it would otherwise see within a minute."""
        self._write(self.path(BELL), uuid.uuid4().hex.encode())

    def requests(self) -> list[Request | tuple[str, BrokenError]]:
        """Return the requests, the oldest first; a broken one as its path and the error.

        S3's times are whole seconds. Of one time, a run comes before its stop.
        """
        listing = self.store.listing(self.path(REQUESTS), recursive=True)
        found: list[Request | tuple[str, BrokenError]] = []
        for name, file in sorted(listing.files.items(), key=lambda item: item[1].mtime_ns):
            user, _, last = name.rpartition("/")
            try:
                if file.size > MAX_REQUEST_BYTES or "/" in user:
                    raise BrokenError("it is not a request")
                content = _document(self.store.read(file.path))
                _check_request(content)
            except FileNotFoundError:  # withdrawn
                continue
            except BrokenError as cause:
                found.append((file.path, cause))
                continue
            moment = file.mtime_ns / 1e9
            own = last.removesuffix(".json"), user, content["kind"], content
            found.append(Request(*own, moment, listing.now - moment, file.path))
        return sorted(
            found, key=lambda each: (each.time, each.kind != RUN) if isinstance(each, Request) else (0.0, False)
        )

    def is_open(self, user: str, request: str) -> bool:
        """Return True if a request is there, which the head has not answered yet."""
        return self.store.find(self.path(REQUESTS, user, f"{request}.json")) is not None

    def withdraw(self, user: str, request: str) -> None:
        """Delete a request."""
        self.store.delete(self.path(REQUESTS, user, f"{request}.json"))

    def write_log(self, log: str, offset: int, content: bytes) -> None:
        """Write a part of a log. The part at an offset only grows: a reader may have read it already."""
        self._write(self.path(LOGS, log, f"{offset:015d}"), content)

    def read_log(self, log: str, offset: int) -> bytes:
        """Return the part of a log that begins at an offset; empty if it is not there yet."""
        try:
            return self.store.read(self.path(LOGS, log, f"{offset:015d}"))
        except FileNotFoundError:
            return b""

    def log_size(self, log: str) -> int:
        """Return the end of the last part of a log."""
        parts = self.store.listing(self.path(LOGS, log)).files
        return max((int(name) + file.size for name, file in parts.items() if name.isdecimal()), default=0)

    def _write(self, path: str, content: bytes) -> None:
        with self.store.writing(path) as file:
            file.write(content)


def _document(content: bytes) -> dict[str, Any]:
    """Return a document of this version; BrokenError if it is another one's, or not a document."""
    try:
        document = json.loads(content)
        found = document["format"]
    except (ValueError, LookupError, TypeError, RecursionError) as cause:
        raise BrokenError("it is not such a document") from cause
    if found != FORMAT:
        raise BrokenError(
            f"its format is {one_line(str(found))[:20]}, and this version's is {FORMAT}", is_other_format=True
        )
    return document


def _head_state(document: Mapping[str, Any]) -> HeadState:
    """Return the head's state in a document, without what has another type."""
    jobs, refused, ray = document.get("jobs"), document.get("refused"), document.get("ray")
    return HeadState(
        jobs=[job for job in jobs if is_job(job)] if isinstance(jobs, list) else [],
        refused={key: str(reason) for key, reason in refused.items()} if isinstance(refused, dict) else {},
        ray=ray if isinstance(ray, dict) else {},
        code=str(document.get("code", "")),
        head=str(document.get("head", "")),
        secrets_key=str(document.get("secrets_key", "")),
        wake=_wake(document.get("wake")),
        idle_minutes=finite(document.get("idle_minutes")) or 0.0,
    )


def _wake(value: Any) -> Wake | None:
    """Return the means to wake a head; None if they are broken. Users send a signed request to what they name."""
    match value:
        case {"namespace": str(namespace), "region": str(region), "after_minutes": minutes} if (
            finite(minutes) or 0
        ) > 0:
            if re.fullmatch(r"ray-on-ecs/[\w.-]+", namespace) and re.fullmatch(REGION, region):
                return Wake(namespace, region, float(minutes))
    return None


def _check_request(content: Mapping[str, Any]) -> None:
    """Raise BrokenError unless a request has all that its kind needs: others may have written it."""
    match content:
        case {"kind": "stop" | "stacks", "jobs": [*jobs]} if all(isinstance(job, str) for job in jobs):
            return
        case {"kind": "run", "uri": str(), "metadata": {"run_name": str(name), "storage_path": str()} as metadata}:
            if is_run_name(name) and all(isinstance(value, str) for value in metadata.values()):
                return
    raise BrokenError("it is not a request")
