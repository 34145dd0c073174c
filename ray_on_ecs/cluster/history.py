"""Runs of a cluster, from their folders: state, progress and cost.

Times are compared by the storage's clock, because a laptop's may be wrong. Ray's jobs complete the folders: a job whose
run has not written a status yet, and a driver that is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ray_on_ecs.cluster.aws import stack_not_found
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.config import OWNER, RunConfig
from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.jobs.record import RUNNING, STOPPED, Job, goes_on
from ray_on_ecs.rules import finite, is_run_name
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.bucket import NoBucket, StorageFault
from ray_on_ecs.storage.disk import Listing, StoredFile, nearest
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.cost import total_seconds, total_usd
from ray_on_ecs.tracking.end import End, end_in
from ray_on_ecs.tracking.places import Places, of_pool, places_in

# A driver writes its status every 10 s, and refreshes its lock every 15 s.
LOST_SECONDS = 120.0
READERS = 32

# The files that identify a run's folder.
DOCUMENTS = (layout.STATUS, layout.SETTINGS, layout.METRICS, layout.RESULT, layout.ERROR, layout.LOCK)


@dataclass(frozen=True, kw_only=True)
class RunInfo(Places):
    """State of a run and its pools; unknown values are None, times are in UTC (ISO 8601)."""

    name: str
    # That in `status.json` (queued, waiting, training, finished, failed, interrupted, limit), or: starting, a job
    # without a status yet; lost, the driver is gone; unreadable, a document is broken.
    state: str
    owner: str | None = None
    behind: str | None = None
    line: str | None = None  # the pool in whose line it is queued
    step: int | None = None
    end: End | None = None  # how far it is, and its end
    loss: float | None = None
    metrics: dict[str, float] | None = None  # the last value of each
    started: str | None = None  # of the last command
    started_seconds_ago: float | None = None  # by the storage's clock; never negative
    updated: str | None = None  # the driver's last write
    seconds: float | None = None  # of all commands, from the start to the last status of each
    cost_usd: float | None = None  # of its workers over all commands
    workers: int | None = None
    gpu: str | None = None  # that of its pool
    restarts: int | None = None  # over all commands
    job: str | None = None
    url: str | None = None


def find_run(cluster: Cluster, name: str) -> RunStorage:
    """Return the folder of a run; UsageError with the nearest names without one, and errors of `list_folders`."""
    names = sorted(filter(is_run_name, _list(cluster, cluster.storage("")).folders))
    if name in names:
        return replace(cluster.storage(name), flag="RUN")
    similar = get_close_matches(name, names) or [other for other in names if name in other][:3]
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"{cluster.command('runs')} lists the runs"
    raise UsageError(f"run {name!r} not found in {cluster.storage_path}; {hint}")


@dataclass(frozen=True)
class Folders:
    """Documents and locks of runs, by the run's name and the file's, as listed at `now` by the storage's clock."""

    storage: RunStorage
    now: float
    files: dict[str, dict[str, StoredFile]] = field(default_factory=dict)

    def runs(self, jobs: Iterable[Job] | None, limit: int | None = None) -> list[RunInfo]:
        """Return the runs, or those whose folders changed last; the last started one is first.

        The jobs are Ray's, or None if the head can't be reached.
        """
        jobs = list(jobs or ())
        of_runs = under_way(jobs, self.storage.uri)
        ended = {
            job["submission_id"]: job
            for job in jobs
            if not goes_on(job) and is_below(job["metadata"], self.storage.uri)
        }
        new = [name for name in of_runs if name not in self.files]
        changed = sorted(self.files, key=lambda name: _newest(self.files[name].values()), reverse=True)
        with ThreadPoolExecutor(READERS) as readers:
            runs = list(readers.map(lambda name: self._run(name, of_runs.get(name), ended), [*new, *changed][:limit]))
        return sorted(runs, key=lambda run: (run.started or "", run.name), reverse=True)

    def since(self, moment: float, names: Collection[str] = ()) -> Folders:
        """Return those of the runs that have changed since then (Unix time), and the runs of these names."""
        files = {
            name: documents
            for name, documents in self.files.items()
            if name in names or _newest(documents.values()) >= moment
        }
        return replace(self, files=files)

    def is_locked(self, name: str) -> bool:
        """Return True if a driver has recently refreshed the lock of a run, and is not known to have ended."""
        lock = self.files.get(name, {}).get(layout.LOCK)
        return lock is not None and self.now - lock.mtime_ns / 1e9 < LOST_SECONDS and not self._was_killed(name)

    def _was_killed(self, name: str) -> bool:
        from ray_on_ecs.storage.lock import has_dead_owner  # it imports psutil

        return layout.LOCK in self.files.get(name, {}) and has_dead_owner(self.storage.sibling(name))

    def _run(self, name: str, job: Job | None, ended: Mapping[str, Job]) -> RunInfo:
        files = self.files.get(name, {})
        try:
            if job is not None and not files:
                owner = _text((job.get("metadata") or {}).get(OWNER))
                run = RunInfo(name=name, state="starting", owner=owner, started=_iso((job["start_time"] or 0) / 1000))
            else:
                run = self._of_folder(name, files, job, ended)
            seconds = None
            if run.started:
                seconds = max(self.now - datetime.fromisoformat(run.started).timestamp(), 0.0)
        except Exception:  # others may have written the documents; one run's are not the other runs' fault
            last_write = _iso(_newest(files.values()))
            return RunInfo(name=name, state="unreadable", started=last_write, updated=last_write)
        return replace(run, started_seconds_ago=seconds, job=job["submission_id"] if job else run.job)

    def _of_folder(
        self, name: str, files: Mapping[str, StoredFile], job: Job | None, ended: Mapping[str, Job]
    ) -> RunInfo:
        if layout.STATUS in files:
            status = self.storage.sibling(name).read_json(layout.STATUS) or {}
            started = _iso(datetime.fromisoformat(status["started"]).timestamp())
        else:  # a driver may be killed before it writes its status
            status = {"state": "training" if layout.LOCK in files else "interrupted"}
            started = _iso(_newest([files[layout.SETTINGS]] if layout.SETTINGS in files else files.values()))
        own = ended.get(str(status.get("job")))  # its driver is gone, though it may have written a moment ago
        if own and own["status"] == STOPPED and status["state"] in layout.UNDER_WAY:
            status = {**status, "state": "interrupted"}
        last_write = _newest([files[file] for file in (layout.STATUS, layout.LOCK) if file in files] or files.values())
        workers, metrics = finite(status.get("workers")), status.get("metrics")
        if isinstance(metrics, dict):
            metrics = {key: value for key, value in metrics.items() if finite(value) is not None}
        is_silent = own is not None or self.now - last_write > LOST_SECONDS or self._was_killed(name)
        state = _state(status, files, job, is_silent=is_silent)
        end = end_in(status, is_training=state == "training")
        return RunInfo(
            name=name,
            state=state,
            owner=_text(status.get("owner")),
            behind=_text(status.get("behind")),
            line=_text(status.get("line")),
            step=end.step if end else None,
            end=end,
            loss=finite(status.get("loss")),
            metrics=metrics if isinstance(metrics, dict) else None,
            started=started,
            updated=_iso(last_write),
            seconds=_seconds(status),
            cost_usd=finite(total_usd(status, {})),
            workers=None if workers is None else int(workers),
            gpu=of_pool(status, "gpu"),
            **asdict(places_in(status)),
            restarts=len(restarts) if isinstance(restarts := status.get("restarts"), list) else None,
            job=_text(status.get("job")),
            url=layout.page_url(status.get("url")),
        )


def list_folders(cluster: Cluster, storage: RunStorage, names: Collection[str] | None = None) -> Folders:
    """List the folders of all runs below `cluster.storage("")`, or of these, without reading them.

    A folder's own files are listed, and not those below it, which may be a million.
    """
    root = _list(cluster, storage)
    runs = [name for name in root.folders if is_run_name(name) and (names is None or name in names)]
    with ThreadPoolExecutor(READERS) as readers:
        listings = list(readers.map(lambda name: _list(cluster, storage.sibling(name)), runs))
    files: dict[str, dict[str, StoredFile]] = {}
    for name, listing in zip(runs, listings, strict=True):
        documents = {file: listing.files[file] for file in DOCUMENTS if file in listing.files}
        if documents:
            files[name] = documents
    newest = max((_newest(documents.values()) for documents in files.values()), default=0.0)
    return Folders(storage, max(root.now, newest), files)


def _list(cluster: Cluster, storage: RunStorage) -> Listing:
    if storage.is_local and not (there := nearest(Path(storage.path()))).is_dir():
        what = "set it to the folder or bucket with the runs"
        raise UsageError(f"RAY_ON_ECS_STORAGE_PATH: {there} is not a folder; {what}")
    try:
        return storage.listing()
    except NoBucket as cause:
        if cluster.stack:
            raise stack_not_found(cluster.stack) from cause
        raise UsageError(f"{cause}, or set RAY_ON_ECS_STORAGE_PATH to the folder or bucket with the runs") from cause
    except StorageFault as cause:
        raise cause.error from cause
    except OSError as cause:
        raise UsageError(f"the runs in {storage.uri} can't be listed ({one_line(cause)})") from cause


def is_below(metadata: Mapping[str, Any], storage_path: str) -> bool:
    """Return whether the run of a job is below a storage path. A job's metadata has the path if one was typed."""
    path = str(metadata.get("storage_path", storage_path)).rstrip("/")
    return path in (storage_path.rstrip("/"), RunConfig.storage_path)


def elsewhere(jobs: Iterable[Job], storage_path: str) -> list[Job]:
    """Return the jobs whose runs are not below a storage path."""
    return [job for job in jobs if not is_below(job["metadata"], storage_path)]


def under_way(jobs: Iterable[Job] | None, storage_path: str) -> dict[str, Job]:
    """Return the jobs that go on, of the runs below a storage path, by the run's name; a running one first.

    A run of the same name below another storage path is another run.
    """
    of_runs: dict[str, Job] = {}
    for job in jobs or ():
        metadata = job.get("metadata") or {}
        name = metadata.get("run_name")
        is_run = isinstance(name, str) and is_run_name(name) and goes_on(job)
        is_new = name not in of_runs or of_runs[name]["status"] != RUNNING
        if is_run and is_new and is_below(metadata, storage_path):
            of_runs[name] = job
    return of_runs


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


def _seconds(status: Mapping[str, Any]) -> float | None:
    with suppress(Exception):  # others may have written it
        return finite(total_seconds(status, {}))
    return None


def _text(value: Any) -> str | None:
    return one_line(value) if isinstance(value, str) else None


def _newest(files: Iterable[StoredFile]) -> float:
    """Return the time of the newest file (Unix time)."""
    return max((file.mtime_ns / 1e9 for file in files), default=0.0)


def _iso(moment: float) -> str | None:
    """Return a time in the list's format, in which times sort as text."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds") if moment else None
