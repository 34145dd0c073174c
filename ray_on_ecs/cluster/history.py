"""Runs of a cluster, from their folders: state, progress and cost.

Times are compared by the storage's clock, because a laptop's may be wrong. Ray's jobs complete the folders: a job whose
run has not written a status yet, and a driver that is gone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ray_on_ecs.config import OWNER
from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.tracking.cost import total_usd

if TYPE_CHECKING:
    from ray_on_ecs.cluster.clusters import Cluster
    from ray_on_ecs.cluster.local_jobs import Jobs
    from ray_on_ecs.storage.disk import Listing, StoredFile
    from ray_on_ecs.storage.run_storage import RunStorage

# A driver writes its status every 10 s, and refreshes its lock every 15 s.
LOST_SECONDS = 120.0
READERS = 32
NEAREST_NAMES = 3

PENDING, RUNNING = "PENDING", "RUNNING"
# The documents that identify a run's folder, in addition to its lock.
DOCUMENTS = (layout.STATUS, layout.SETTINGS, layout.METRICS, layout.RESULT, layout.ERROR)

Job = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """State of a run; unknown values are None.

    Attributes:
        state: The state in `status.json` (queued, waiting, training, finished, failed, interrupted), or: starting, a
            job without a status yet; lost, the driver is gone; unreadable, a document is broken.
        owner: The user who started the run.
        behind: The run that it is queued behind.
        step: Steps done.
        loss: The last loss that its script logged.
        metrics: The last value of each metric that it logged.
        started: The start of the last command, in UTC (ISO 8601).
        started_seconds_ago: The time since then by the storage's clock; never negative.
        updated: The driver's last write, in UTC (ISO 8601).
        cost_usd: The cost of its workers over all commands.
        workers: The number of workers.
        job: The submission ID of its Ray job.
        url: The run's page at an experiment tracker.
    """

    name: str
    state: str
    owner: str | None = None
    behind: str | None = None
    step: int | None = None
    loss: float | None = None
    metrics: dict[str, float] | None = None
    started: str | None = None
    started_seconds_ago: float | None = None
    updated: str | None = None
    cost_usd: float | None = None
    workers: int | None = None
    job: str | None = None
    url: str | None = None


def ray_jobs(head: Jobs) -> list[Job]:
    """Return the submitted jobs, by Ray's REST API or of this machine, without the slow import of Ray.

    Raises:
        TrainingError: The head doesn't answer.
    """
    return [job for job in head.list_jobs() if job.get("submission_id")]


def find_run(cluster: Cluster, name: str) -> RunStorage:
    """Return the folder of a run.

    Raises:
        UsageError: The run does not exist; the message has the nearest names. Or see `list_folders`.
        ResourceError: The storage can't be reached.
    """
    from difflib import get_close_matches

    from ray_on_ecs.rules import is_run_name

    names = sorted(filter(is_run_name, _list(cluster, cluster.storage("")).folders))
    if name in names:
        return cluster.storage(name)
    nearest = get_close_matches(name, names, n=NEAREST_NAMES)
    if not nearest:
        nearest = [other for other in names if name in other][:NEAREST_NAMES]
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"{cluster.command('runs')} lists the runs"
    raise UsageError(f"run {name!r} not found in {cluster.storage_path}; {hint}")


@dataclass(frozen=True)
class Folders:
    """Listing of the storage path at one moment.

    Attributes:
        storage: The storage path.
        now: The moment, by the storage's clock (Unix time).
        files: The documents and the lock of each run, by the run's name and the file's.
    """

    storage: RunStorage
    now: float
    files: dict[str, dict[str, StoredFile]] = field(default_factory=dict)

    def runs(self, jobs: Sequence[Job] | None, limit: int | None = None) -> list[RunInfo]:
        """Return the runs, with the last started one first.

        Args:
            jobs: The result of `ray_jobs`, or None if the head can't be reached.
            limit: Only the runs whose folders changed last; None for all.
        """
        jobs_of_runs = self.jobs_under_way(jobs)
        new = [name for name in jobs_of_runs if name not in self.files]
        changed = sorted(self.files, key=lambda name: _newest(self.files[name]), reverse=True)
        with ThreadPoolExecutor(READERS) as readers:
            runs = list(readers.map(lambda name: self._run(name, jobs_of_runs.get(name)), [*new, *changed][:limit]))
        return sorted(runs, key=lambda run: (run.started or "", run.name), reverse=True)

    def jobs_under_way(self, jobs: Sequence[Job] | None) -> dict[str, Job]:
        """Return the pending and running jobs by the name of their run.

        Args:
            jobs: The result of `ray_jobs`, or None if the head can't be reached.
        """
        return under_way(jobs or (), self.storage.uri)

    def is_locked(self, name: str) -> bool:
        """Return True if a driver has recently refreshed the lock of a run."""
        lock = self.files.get(name, {}).get(layout.LOCK)
        return lock is not None and self.now - _modified(lock) < LOST_SECONDS

    def _run(self, name: str, job: Job | None) -> RunInfo:
        files = self.files.get(name)
        try:
            if files is None and job is not None:
                started = _iso(_number(job["start_time"], 1000))
                run = RunInfo(name=name, state="starting", owner=_owner(job), started=started)
            else:
                run = self._of_folder(name, files or {}, job)
            seconds = None
            if run.started:
                seconds = max(self.now - datetime.fromisoformat(run.started).timestamp(), 0.0)
        except Exception:  # others may have written the documents; one run's are not the other runs' fault
            last_write = _iso(_newest(files or {}))
            return RunInfo(name=name, state="unreadable", started=last_write, updated=last_write)
        return replace(run, started_seconds_ago=seconds, job=job["submission_id"] if job else run.job)

    def _of_folder(self, name: str, files: Mapping[str, StoredFile], job: Job | None) -> RunInfo:
        if layout.STATUS in files:
            status = self.storage.sibling(name).read_json(layout.STATUS) or {}
        else:  # a driver may be killed before it writes its status
            state = "training" if layout.LOCK in files else "interrupted"
            status = {"state": state, "started": _iso(_newest(files, layout.SETTINGS)) or ""}
        of_driver = {file: files[file] for file in (layout.STATUS, layout.LOCK) if file in files}
        last_write = _newest(of_driver or files)
        return RunInfo(
            name=name,
            state=_state(status, files, job, is_silent=self.now - last_write > LOST_SECONDS),
            owner=_text(status.get("owner")),
            behind=_text(status.get("behind")),
            step=_integer(status.get("step")),
            loss=_number(status.get("loss")),
            metrics=_numbers(status.get("metrics")),
            started=_utc(status["started"]),
            updated=_iso(last_write),
            cost_usd=_number(total_usd(status, {})),
            workers=_integer(status.get("workers")),
            job=_text(status.get("job")),
            url=layout.page_url(status.get("url")),
        )


def list_folders(cluster: Cluster, storage: RunStorage, names: Collection[str] | None = None) -> Folders:
    """List the folders of all runs, or of these, without reading them.

    A folder's own files are listed, and not those below it, which may be a million.

    Args:
        cluster: The cluster.
        storage: `cluster.storage("")`.
        names: The runs; None for all.

    Raises:
        UsageError: The bucket does not exist, or credentials are missing.
        ResourceError: It can't be reached.
    """
    from ray_on_ecs.rules import is_run_name

    root = _list(cluster, storage)
    runs = [name for name in root.folders if is_run_name(name) and (names is None or name in names)]
    with ThreadPoolExecutor(READERS) as readers:
        listings = list(readers.map(lambda name: _list(cluster, storage.sibling(name)), runs))
    files: dict[str, dict[str, StoredFile]] = {}
    for name, listing in zip(runs, listings, strict=True):
        documents = {file: info for file, info in listing.files.items() if file in (*DOCUMENTS, layout.LOCK)}
        if documents:
            files[name] = documents
    newest = max((_newest(documents) for documents in files.values()), default=0.0)
    return Folders(storage, max(root.now, newest), files)


def _list(cluster: Cluster, storage: RunStorage) -> Listing:
    """List the storage path."""
    from ray_on_ecs.storage.bucket import NoBucket, StorageFault

    try:
        return storage.listing()
    except NoBucket as cause:
        if cluster.stack:
            from ray_on_ecs.cluster.aws import stack_not_found

            raise stack_not_found(cluster.stack) from cause
        raise UsageError(f"{cause}, or set RAY_ON_ECS_STORAGE_PATH to the folder or bucket with the runs") from cause
    except StorageFault as cause:
        raise cause.error from cause
    except OSError as cause:
        raise UsageError(f"the runs in {storage.uri} can't be listed ({one_line(cause)})") from cause


def is_below(metadata: Mapping[str, Any], storage_path: str) -> bool:
    """Return whether the run of a job is below a storage path. A job's metadata has the path if one was typed."""
    from ray_on_ecs.config import RunConfig

    path = str(metadata.get("storage_path", storage_path)).rstrip("/")
    return path in (storage_path.rstrip("/"), RunConfig.storage_path)


def under_way(jobs: Iterable[Job], storage_path: str) -> dict[str, Job]:
    """Return the pending and running jobs of the runs below a storage path, by the run's name; a running one first.

    A job's metadata has the storage path if one was typed: a run of the same name elsewhere is another run.
    """
    from ray_on_ecs.rules import is_run_name

    jobs_of_runs: dict[str, Job] = {}
    for job in jobs:
        metadata = job.get("metadata") or {}
        name = metadata.get("run_name")
        if not (isinstance(name, str) and is_run_name(name)) or job["status"] not in (PENDING, RUNNING):
            continue
        if not is_below(metadata, storage_path):
            continue
        if name not in jobs_of_runs or jobs_of_runs[name]["status"] != RUNNING:
            jobs_of_runs[name] = job
    return jobs_of_runs


def _state(status: Mapping[str, Any], files: Mapping[str, StoredFile], job: Job | None, *, is_silent: bool) -> str:
    """Return the state in a run's status, unless the status is older than its job or its driver is gone."""
    if layout.RESULT in files:
        return "finished"
    state = one_line(status["state"])
    is_over = state not in layout.UNDER_WAY
    if job is not None:
        is_of_job = status.get("job") == job["submission_id"]
        return "starting" if not is_of_job and (is_over or is_silent) else state
    if is_over or not is_silent:
        return state
    return "failed" if state == "training" and layout.ERROR in files else "lost"


def _owner(job: Job) -> str | None:
    return _text((job.get("metadata") or {}).get(OWNER))


def _text(value: Any) -> str | None:
    return one_line(value) if isinstance(value, str) else None


def _newest(files: Mapping[str, StoredFile], preferred: str | None = None) -> float:
    """Return the modification time of the newest file, or of the preferred one if it exists (Unix time)."""
    if preferred is not None and preferred in files:
        return _modified(files[preferred])
    return max(map(_modified, files.values()), default=0.0)


def _modified(file: StoredFile) -> float:
    return file.mtime_ns / 1e9


def _number(value: Any, divisor: float = 1) -> float | None:
    return value / divisor if isinstance(value, int | float) and math.isfinite(value) else None


def _numbers(values: Any) -> dict[str, float] | None:
    if not isinstance(values, dict):
        return None
    return {name: number for name, value in values.items() if (number := _number(value)) is not None}


def _integer(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _utc(text: str) -> str:
    """Return a time in the list's format, in which times sort as text."""
    return _iso(datetime.fromisoformat(text).timestamp()) or ""


def _iso(moment: float | None) -> str | None:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds") if moment else None
