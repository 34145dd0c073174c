"""Jobs of this machine, a user's with `--local` or a cluster's head: drivers as processes.

A driver is in a separate session, and outlives the command that started it. Each job has a folder below the user's
`~/.ray-on-ecs`, or below the head's state:

    job.json         its ID, metadata and start
    processes.json   its driver and the driver's parent, as soon as they run
    log              the driver's output
    stopped          exists once a user has stopped it
    interrupted      exists once the head has stopped it because it is itself being stopped
    end.json         the driver's exit status, which its parent writes

A head's folder also has `taken.json`, the IDs of jobs of earlier heads.

A local driver that was killed is not started again: the same command resumes its run. If its parent was killed, too,
the next command that reads the job deletes the secrets of its run, and writes an end without an exit status. A head
submits a job that has lost its driver again, and keeps its secrets until then (node/desk.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ray_on_ecs.config import JOB_VARIABLE, LOCAL_VARIABLE
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.jobs import driver_parent, processes
from ray_on_ecs.jobs.driver_parent import END, JOB, PROCESSES, identity, write
from ray_on_ecs.jobs.processes import LOG
from ray_on_ecs.jobs.record import (
    ENDED,
    FAILED,
    PENDING,
    RUNNING,
    STACKS_REQUEST,
    STOPPED,
    SUCCEEDED,
    Job,
    delete_secrets,
    is_lost,
    next_id,
)
from ray_on_ecs.private_folder import at_home, held, machine, place

# Arguments of Python; -P keeps the driver's working directory off sys.path.
DRIVER = ("-P", "-m", "ray_on_ecs.run")
STOP, INTERRUPT = "stopped", "interrupted"
TAKEN = "taken.json"
# Jobs that have ended, of which the records and logs are kept.
KEPT_JOBS = 100
# A job without a driver after this time counts as failed.
START_SECONDS = 60.0
WAYS_OUT = "free some space, or set HOME to another folder"
POLL_SECONDS = 0.1
CHUNK_BYTES = 2**20


class MachineJobs:
    """Jobs of this machine, with their records in a folder, by default the user's; UsageError if it can't be made.

    `ray` has the variables by which drivers join Ray; a script needs none. With `ends_ray` Ray ends with the last
    driver that uses it. A cluster's head submits jobs again, and then needs their secrets.
    """

    # Until `kill_job`: a driver that is asked to end gives its scripts 30 s, and its workers as long to store files.
    stop_seconds = 70.0

    def __init__(
        self,
        folder: Path | None = None,
        ray: Mapping[str, str] | None = None,
        *,
        ends_ray: bool = False,
        is_head: bool = False,
    ) -> None:
        self._ray, self._ends_ray, self._is_head = ray or {}, ends_ray, is_head
        try:
            self._folder = folder or at_home() / "jobs" / machine()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError) as cause:
            line = f"HOME: ~/.ray-on-ecs, with the jobs of this machine, can't be used ({one_line(cause)})"
            raise UsageError(f"{line}; set HOME to a folder of yours") from cause
        self._ended: dict[Path, Job] = {}
        self._parents: list[int] = []  # of drivers; a process that ends is a zombie until it is waited for
        self._lock = FileLock(self._folder / "lock")  # one, which its holder can take again

    @contextmanager
    def submitting(self, seconds: float = -1) -> Generator[None]:
        """Keep other commands from submitting a job until the block ends; raise as `held` does."""
        with held(self._lock, "submits a run", seconds):
            yield

    def is_away(self) -> bool:
        """Return False: a command in the head's container ends with it."""
        return False

    def list_jobs(self) -> list[Job]:
        """Return the jobs, in the order of their start."""
        self._parents = [pid for pid in self._parents if _runs(pid)]
        jobs = map(self._read, _folders(self._folder))
        return sorted((job for job in jobs if job is not None), key=lambda job: job["start_time"])

    def job(self, job_id: str) -> Job:
        """Return a job."""
        return self._find(job_id)[1]

    def submit(self, uri: str, metadata: Mapping[str, str], job_id: str = "") -> str:
        """Start the driver of a run, by its folder with the document; call it within `submitting`. Return the job's ID.

        The job has this ID, which must not be taken, or the next one of the run. ResourceError if its folder can't be
        written; a local run's secrets are then deleted.
        """
        taken = {job["submission_id"] for job in self.list_jobs()} | set(_document(self._folder / TAKEN).get("ids", ()))
        job_id = job_id or next_id(metadata["run_name"], taken)
        metadata = {**metadata, "job_submission_id": job_id}
        command = [sys.executable, *DRIVER, uri]
        parent = [sys.executable, "-I", "-S", driver_parent.__file__]
        folder = ""
        try:
            folder = tempfile.mkdtemp(prefix=f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-", dir=self._folder)
            record = {"id": job_id, "uri": uri, "metadata": metadata, "start": time.time(), "place": place()}
            own = {"ends_ray": self._ends_ray and bool(self._ray), "keeps_secrets": self._is_head}
            write(f"{folder}/{JOB}", {**record, **own, "ray": self._ray.get("RAY_ADDRESS")})
            variables = {} if self._is_head else {LOCAL_VARIABLE: "1"}
            with Path(folder, LOG).open("ab") as log:
                process = subprocess.Popen(
                    [*parent, *command],
                    cwd=folder,
                    env=processes.environment(
                        {**variables, **self._ray, JOB_VARIABLE: json.dumps({"metadata": metadata})}
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C and the end of the terminal reach only the command
                )
            processes.wait_for_driver(process, Path(folder), START_SECONDS)
            process.returncode = 0  # suppresses Popen's ResourceWarning: it outlives this command
            self._parents.append(process.pid)
        except (OSError, ValueError) as cause:  # the latter for a zero byte of a request
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            if not self._is_head:
                delete_secrets(metadata)
            line = f"the driver can't be started in {self._folder} ({one_line(cause)})"
            ways_out = "free some space on the head" if self._is_head else WAYS_OUT
            cure = "try again on a less busy machine" if isinstance(cause, TimeoutError) else ways_out
            raise ResourceError(f"{line}; {cure}") from cause
        self._delete_old()
        return job_id

    def reserve(self, ids: Collection[str]) -> None:
        """Keep `submit` from using IDs, which jobs of earlier heads have."""
        write(str(self._folder / TAKEN), {"ids": sorted(ids)})

    def stop_job(self, job_id: str, mark: str = STOP) -> None:
        """Ask the driver of a job to end, for a user or, with the mark INTERRUPT, for a head that is being stopped."""
        pid = self._driver(job_id)
        folder, job = self._find(job_id)
        if pid or is_lost(job):
            with suppress(OSError):
                (folder / mark).touch()
            self._ended.pop(folder, None)
        with suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGTERM)

    def ask_stacks(self, job_id: str, request: str) -> None:
        """Ask the driver of a job for the stacks of its ranks, under the ID of a request."""
        folder = self._find(job_id)[0]
        part = folder / f"{STACKS_REQUEST}.new"
        try:
            part.write_text(request)
            part.replace(folder / STACKS_REQUEST)
        except OSError as cause:
            raise ResourceError(f"the request can't be written to {folder} ({one_line(cause)}); {WAYS_OUT}") from cause

    def kill_job(self, job_id: str) -> bool:
        """Kill the driver of a job and all that it has started; return True once they have ended."""
        if pid := self._driver(job_id):
            with suppress(ProcessLookupError):  # first, as it would start others, and is not known by its variable yet
                os.kill(pid, signal.SIGKILL)
        processes.kill_all(self._find(job_id)[0])
        return True

    def log(self, job_id: str) -> str:
        """Return the log of a job so far; empty if it was deleted."""
        with suppress(FileNotFoundError):
            return (self._find(job_id)[0] / LOG).read_bytes().decode(errors="replace")
        return ""

    def tail(self, job_id: str, show: Callable[[bytes], None], offset: int = 0) -> None:
        """Show a job's log from an offset, as it is written, until the job has ended."""
        folder, _ = self._find(job_id)
        file = folder / LOG
        with (file if file.exists() else Path(os.devnull)).open("rb") as log:
            log.seek(offset)
            while True:
                job = self._read(folder)
                has_ended = job is None or job["status"] in ENDED  # before the rest is read, which is then all
                if os.fstat(log.fileno()).st_size < log.tell():  # another program has emptied it
                    log.seek(0)
                while chunk := log.read(CHUNK_BYTES):
                    show(chunk)
                if has_ended:
                    if file.exists() and not log.tell() and job and (job["driver_exit_code"] or 0) > 0:
                        line = f"ray-on-ecs: the driver failed, and wrote nothing to {file}; its disk may be full\n"
                        show(line.encode())
                    return
                time.sleep(POLL_SECONDS)

    def log_file(self, job: Job) -> Path:
        """Return the file with the log of a job."""
        return self._folder / job["log"] / LOG

    def _find(self, job_id: str) -> tuple[Path, Job]:
        for folder in _folders(self._folder):
            job = self._read(folder)
            if job is not None and job["submission_id"] == job_id:
                return folder, job
        raise ResourceError(f"this machine no longer lists job {job_id}")

    def _read(self, folder: Path) -> Job | None:
        """Return a job; None if its record is broken."""
        if folder in self._ended:
            return {**self._ended[folder]}
        record = _document(folder / JOB)
        try:
            status, end = _state(folder, record["start"])
            if status in ENDED and not end:
                end = self._end_lost(folder, record["metadata"])
            exit_status = end.get("status")
            is_stopped = (folder / STOP).exists()
            if status == FAILED and is_stopped:
                status = STOPPED
            lost = "it was killed with its parent, the machine went down, or its disk was full"
            job = {
                "submission_id": str(record["id"]),
                "metadata": {str(key): str(value) for key, value in record["metadata"].items()},
                "uri": str(record["uri"]),
                "log": folder.name,
                "ray": record["ray"],
                "status": status,
                "is_interrupted": (folder / INTERRUPT).exists(),
                "is_stopped": is_stopped,
                "start_time": int(1000 * record["start"]),
                "end_time": int(1000 * end["time"]) if end else None,
                "driver_exit_code": None if exit_status is None else int(exit_status),
                "message": lost if status in ENDED and exit_status is None else None,
            }
            if end:
                self._ended[folder] = job
            return {**job}
        except (AttributeError, LookupError, TypeError, ValueError):
            return None

    def _end_lost(self, folder: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Do what the driver's parent, which was killed, does at the end of a job; return the record of its end.

        With the lock: the secrets may already be those of another job of its run.
        """
        with suppress(OSError, Timeout), self._lock.acquire(timeout=0):
            if not _document(folder / END):
                if not self._is_head:
                    delete_secrets(metadata)
                write(f"{folder / END}", {"status": None, "time": time.time()})
        return _document(folder / END)

    def _driver(self, job_id: str) -> int | None:
        """Return the process ID of a job's driver once it has started; None if it has ended."""
        folder, job = self._find(job_id)
        while job["status"] == PENDING:
            time.sleep(POLL_SECONDS)
            folder, job = self._find(job_id)
        if _runs_elsewhere(folder):
            raise ResourceError(
                f"job {job_id} runs in another container, or on another machine of this name; stop it there"
            )
        pid, known = _document(folder / PROCESSES).get("driver", (0, ""))
        return pid if known and identity(pid) == known else None

    def _delete_old(self) -> None:
        """Delete the oldest jobs that have ended, with their logs."""
        jobs = {folder: self._read(folder) for folder in _folders(self._folder)}
        ended = [folder for folder, job in jobs.items() if job is None or job["status"] in ENDED]
        for folder in ended[:-KEPT_JOBS]:
            shutil.rmtree(folder, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    """Return the folders of jobs, the oldest first; one that another user has put there could name any process."""
    own = []
    for entry in sorted(folder.iterdir()):
        with suppress(FileNotFoundError):  # another command deletes old ones
            if entry.is_dir() and entry.lstat().st_uid == os.getuid():
                own.append(entry)
    return own


def _state(folder: Path, started: float) -> tuple[str, dict[str, Any]]:
    """Return the status of a job, and the record of its end; empty while it is under way, or if there is none."""
    end = _document(folder / END)
    if not end:
        processes = _document(folder / PROCESSES)
        if not processes and 0 <= time.time() - started < START_SECONDS:
            return PENDING, {}
        for pid, known in processes.values():  # a driver's parent records its end, perhaps just now
            if known and identity(pid) == known:
                return RUNNING, {}
        if _runs_elsewhere(folder):
            return RUNNING, {}
        end = _document(folder / END)
    return (SUCCEEDED if end.get("status") == 0 else FAILED), end


def _runs(pid: int) -> bool:
    """Return whether a child of this process still runs."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    return False


def _runs_elsewhere(folder: Path) -> bool:
    """Return whether a job is under way whose processes this one can't see: they hold a lock on its record."""
    if _document(folder / JOB).get("place", place()) == place():
        return False
    try:
        with (folder / JOB).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _document(path: Path) -> dict[str, Any]:
    """Return a document; empty if it is missing or broken."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
