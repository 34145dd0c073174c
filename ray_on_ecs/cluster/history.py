"""The runs of a cluster, from their folders: how far each is, and whether its driver is still there.

Times are compared by the storage's clock: that of a laptop may be wrong. Ray's jobs decide what the folders leave open.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ray_on_ecs.cluster.s3_access import S3Access
from ray_on_ecs.config import OWNER
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.totals import total_usd

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

    from ray_on_ecs.cluster.clusters import Cluster, Head
    from ray_on_ecs.tracking.storage import RunStorage

# A driver writes its status every 10 s, and refreshes its lock every 15 s.
LOST_SECONDS = 120.0
READERS = 32
NEAREST_NAMES = 3

PENDING, RUNNING = "PENDING", "RUNNING"
# The documents that a folder is known by, beside its lock.
DOCUMENTS = (layout.STATUS, layout.SETTINGS, layout.METRICS, layout.RESULT, layout.ERROR)

Job = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """How a run is doing; what is not known is None.

    Attributes:
        name: The run.
        state: That of `status.json` (queued, waiting, training, finished, failed, interrupted), or starting: its job
            is, and its folder doesn't know yet; lost: its driver vanished; unreadable: a document is broken.
        owner: The user who started it.
        behind: The run that it is queued behind.
        step: Steps done.
        loss: The last loss that its script logged.
        started: When its last command began, in UTC (ISO 8601).
        started_seconds_ago: How long ago that was by the storage's clock; never negative.
        updated: When its folder last heard of its driver, likewise.
        cost_usd: What its workers have cost, over all its commands.
        workers: How many there are.
        job: The ID of its Ray job.
        url: The page that an experiment tracker has for it.
    """

    name: str
    state: str
    owner: str | None = None
    behind: str | None = None
    step: int | None = None
    loss: float | None = None
    started: str | None = None
    started_seconds_ago: float | None = None
    updated: str | None = None
    cost_usd: float | None = None
    workers: int | None = None
    job: str | None = None
    url: str | None = None


def ray_jobs(head: Head) -> list[Job]:
    """Return the jobs that were submitted to Ray, as its REST API has them; that needs no import of Ray.

    Raises:
        TrainingError: The head doesn't answer.
    """
    return [job for job in head.get("/api/jobs/") if job.get("submission_id")]


def find_run(cluster: Cluster, name: str) -> RunStorage:
    """Return the folder of a run.

    Raises:
        UsageError: There is no such run; the message has the nearest names. Or see `list_folders`.
        ResourceError: The storage can't be reached.
    """
    from difflib import get_close_matches

    everything = cluster.storage("")
    _now(cluster, everything)
    names = sorted(each.base_name for each in _list(everything) if not each.is_file and each.base_name[0] != ".")
    if name in names:
        return cluster.storage(name)
    nearest = (
        get_close_matches(name, names, n=NEAREST_NAMES) or [each for each in names if name in each][:NEAREST_NAMES]
    )
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"{cluster.command('runs')} lists what is there"
    raise UsageError(f"there is no run {name!r} in {cluster.storage_path}; {hint}")


@dataclass(frozen=True)
class Folders:
    """What the storage path held at one moment.

    Attributes:
        storage: The storage path.
        now: That moment, by the storage's clock (Unix time).
        files: The documents and the lock of each folder of a run, by its name and theirs.
    """

    storage: RunStorage
    now: float
    files: dict[str, dict[str, FileInfo]] = field(default_factory=dict)

    def runs(self, jobs: Sequence[Job] | None, limit: int | None = None) -> list[RunInfo]:
        """Return the runs, the one that began last first.

        Args:
            jobs: What `ray_jobs` returned, or None if the head can't be reached.
            limit: How many of them, those whose folders changed last; None for all.
        """
        mine = self.jobs_under_way(jobs)
        changed = sorted(self.files, key=lambda name: _newest(self.files[name]), reverse=True)
        names = [*(name for name in mine if name not in self.files), *changed][:limit]
        with ThreadPoolExecutor(READERS) as readers:
            found = list(readers.map(lambda name: self._run(name, mine.get(name)), names))
        return sorted(found, key=lambda run: (run.started or "", run.name), reverse=True)

    def jobs_under_way(self, jobs: Sequence[Job] | None) -> dict[str, Job]:
        """Return the jobs that are pending or running, by the name of their run.

        Args:
            jobs: What `ray_jobs` returned, or None if the head can't be reached.
        """
        return _under_way(jobs or (), self.storage.uri.rstrip("/"))

    def is_locked(self, name: str) -> bool:
        """Return whether a driver has refreshed the lock of a run lately."""
        lock = self.files.get(name, {}).get(layout.LOCK)
        return lock is not None and self.now - _modified(lock) < LOST_SECONDS

    def _run(self, name: str, job: Job | None) -> RunInfo:
        files = self.files.get(name)
        try:
            if files is None and job is not None:
                found = RunInfo(
                    name=name, state="starting", owner=_owner(job), started=_iso(_number(job["start_time"], 1000))
                )
            else:
                found = self._of_folder(name, files or {}, job)
            seconds = max(self.now - datetime.fromisoformat(found.started).timestamp(), 0.0) if found.started else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            heard = _newest(files or {})
            return RunInfo(name=name, state="unreadable", started=_iso(heard), updated=_iso(heard))
        return replace(found, started_seconds_ago=seconds, job=job["submission_id"] if job else found.job)

    def _of_folder(self, name: str, files: Mapping[str, FileInfo], job: Job | None) -> RunInfo:
        if layout.STATUS in files:
            status = self.read(name, layout.STATUS)
        else:  # a driver may be killed before it writes one
            state = "training" if layout.LOCK in files else "interrupted"
            status = {"state": state, "started": _iso(_newest(files, layout.SETTINGS)) or ""}
        heard = _newest({each: files[each] for each in (layout.STATUS, layout.LOCK) if each in files} or files)
        return RunInfo(
            name=name,
            state=_state(status, files, job, is_silent=self.now - heard > LOST_SECONDS),
            owner=status.get("owner"),
            behind=status.get("behind"),
            step=_integer(status.get("step")),
            loss=_number(status.get("loss")),
            started=_utc(status["started"]),
            updated=_iso(heard),
            cost_usd=_number(total_usd(status, {})),
            workers=_integer(status.get("workers")),
            job=status.get("job"),
            url=status.get("url"),
        )

    def read(self, name: str, document_name: str) -> dict[str, Any]:
        """Return a document of a run's folder.

        Raises:
            OSError: It can't be read.
            ValueError: It is not a JSON object.
        """
        with self.storage.filesystem.open_input_file(f"{self.storage.base}/{name}/{document_name}") as stream:
            document = json.loads(stream.read())
        if not isinstance(document, dict):
            raise ValueError("it is no object")
        return document


def list_folders(cluster: Cluster, storage: RunStorage) -> Folders:
    """List the folders of all runs, without reading them.

    Args:
        cluster: Whose they are.
        storage: Its storage path, as `cluster.storage("")` opens it: that writes the environment, so it is not for the
            thread that this may be in.

    Raises:
        UsageError: There is no such bucket, or no credentials for it.
        ResourceError: It can't be reached.
    """
    now = _now(cluster, storage)
    files: dict[str, dict[str, FileInfo]] = {}
    newest = 0.0
    start = len(storage.base) + 1
    for each in _list_all(storage):
        name, _, file = each.path[start:].partition("/")
        if each.is_file:
            newest = max(newest, _modified(each))
        if file in (*DOCUMENTS, layout.LOCK):
            files.setdefault(name, {})[file] = each
    return Folders(storage, max(now, newest), files)


def _now(cluster: Cluster, storage: RunStorage) -> float:
    """Return the time by the storage's clock (Unix time)."""
    return time.time() if storage.is_local else _bucket_time(cluster, storage)


def _bucket_time(cluster: Cluster, storage: RunStorage) -> float:
    """Ask S3 what time it is there. This also finds out soon that there is no bucket, or that S3 can't be reached.

    Pyarrow lists a bucket that isn't there as an empty one, and tries for minutes to reach one that doesn't answer.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    access = cluster.s3_access() or S3Access(region=getattr(storage.filesystem, "region", None))
    bucket = storage.base.partition("/")[0]
    try:
        answer = access.client().head_bucket(Bucket=bucket)
    except ClientError as cause:
        answer = cause.response
        if answer["Error"]["Code"] == "404":
            raise _no_bucket(cluster, bucket) from cause
    except NoCredentialsError as cause:
        raise UsageError("no AWS credentials that work (there are none here); log in, or set AWS_PROFILE") from cause
    except BotoCoreError as cause:
        raise ResourceError(f"the runs in {cluster.storage_path} can't be reached ({one_line(cause)})") from cause
    said = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(said).timestamp() if said else 0.0


def _no_bucket(cluster: Cluster, bucket: str) -> Exception:
    if cluster.stack:
        from ray_on_ecs.cluster.aws import gone

        return gone(cluster.stack)
    return UsageError(f"there is no bucket {bucket}; set RAY_ON_ECS_STORAGE_PATH to the folder or bucket with the runs")


def _list_all(storage: RunStorage) -> Iterator[FileInfo]:
    """List the files of all runs; on a disk those alone that are not below their folders, which scripts fill."""
    if not storage.is_local:
        yield from _list(storage, recursive=True)
        return
    for each in _list(storage):
        if not each.is_file:
            yield from _list(replace(storage, base=each.path))


def _list(storage: RunStorage, *, recursive: bool = False) -> Iterable[FileInfo]:
    from pyarrow import fs

    from ray_on_ecs.filesystem import short_reason

    try:
        return storage.filesystem.get_file_info(
            fs.FileSelector(storage.base, allow_not_found=True, recursive=recursive)
        )
    except OSError as cause:
        raise UsageError(f"the runs in {storage.uri.rstrip('/')} can't be listed ({short_reason(cause)})") from cause


def _under_way(jobs: Iterable[Job], storage_path: str) -> dict[str, Job]:
    """Return the jobs that are pending or running, by the name of their run.

    A job says which storage path was typed, if one was: elsewhere, a run of the same name is another one.
    """
    from ray_on_ecs.config import RunConfig

    mine = {storage_path, RunConfig.storage_path}
    found: dict[str, Job] = {}
    for job in jobs:
        metadata = job.get("metadata") or {}
        is_mine = metadata.get("storage_path", storage_path).rstrip("/") in mine
        if job["status"] in (PENDING, RUNNING) and is_mine and (name := metadata.get("run_name")):
            found[name] = job if found.get(name, {}).get("status") != RUNNING else found[name]
    return found


def _state(status: Mapping[str, Any], files: Mapping[str, FileInfo], job: Job | None, *, is_silent: bool) -> str:
    """Return a run's state: that of its status, unless this is older than its job or its driver has vanished."""
    written = str(status["state"])
    if layout.RESULT in files:
        return "finished"
    is_of_job = job is not None and status.get("job") == job["submission_id"]
    is_over = written not in layout.UNDER_WAY
    if job is not None and not is_of_job and (is_over or is_silent):
        return "starting"
    if job is None and is_silent and not is_over:
        return "failed" if written == "training" and layout.ERROR in files else "lost"
    return written


def _owner(job: Job) -> str | None:
    return (job.get("metadata") or {}).get(OWNER)


def _newest(files: Mapping[str, FileInfo], preferred: str | None = None) -> float:
    """Return when the newest of these files was written, or the preferred one if it is there (Unix time)."""
    chosen = [files[preferred]] if preferred is not None and preferred in files else files.values()
    return max(map(_modified, chosen), default=0.0)


def _modified(file: FileInfo) -> float:
    return (file.mtime_ns or 0) / 1e9


def _number(value: Any, divisor: float = 1) -> float | None:
    return value / divisor if isinstance(value, int | float) and math.isfinite(value) else None


def _integer(value: Any) -> int | None:
    return None if (number := _number(value)) is None else int(number)


def _utc(text: str) -> str:
    """Return a time in the form that all times of a list have, so that they sort."""
    return _iso(datetime.fromisoformat(text).timestamp()) or ""


def _iso(moment: float | None) -> str | None:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds") if moment else None
