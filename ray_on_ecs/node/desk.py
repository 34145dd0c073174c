"""The head's desk: a thread that starts and stops the drivers of runs as users request it, and keeps the record.

It reads requests from the bucket, writes the head's state and the logs there (jobs/documents.py), and submits a run
again that has lost its driver or its head. Its memory is the state in the bucket: a head without any other memory, on
another instance, continues what the one before had under way.

A head that finds the state of a later head stops answering requests. Its drivers go on: the lock of their runs decides.

A head that sleeps while it is idle (node/idle.py) has all that it knows in the bucket before.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray_on_ecs import secrets
from ray_on_ecs.config import OWNER, SUBMITTED
from ray_on_ecs.contract import SECRETS_KEY_VARIABLE, WORKER_TIMEOUT
from ray_on_ecs.errors import TrainingError, failure_of
from ray_on_ecs.jobs import record
from ray_on_ecs.jobs.documents import BELL, LOGS, RUN, STACKS, BrokenError, Documents, HeadState, Request
from ray_on_ecs.jobs.machine import INTERRUPT, MachineJobs
from ray_on_ecs.jobs.record import DAY, ENDED, REQUEST, Job, is_lost, is_of, key_of, next_id, number_in
from ray_on_ecs.node import labels
from ray_on_ecs.node.idle import DESK, Sleep

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
# Between two looks at the requests if the bell is not heard, and between two writes of a state that has not changed.
LOOK_SECONDS, STATE_SECONDS = 60.0, 10.0
PRUNE_SECONDS = 3600.0
# Parts of a log that are copied in one go, and those after which they are merged: a reader gets them one by one.
PART_BYTES, PARTS_AT_ONCE, MERGED_PARTS = 2**20, 8, 60
SECRETS_SECONDS = 60.0  # until secrets that could not be deleted are tried again
SECRETS_BUSY_SECONDS = 3600.0  # for which they keep a head awake: without the permission they stay for ever
LOCK_SECONDS = 5.0  # for a command in the head's shell that submits a run; the next look tries again
# A job that lasted this long has made progress, so the resubmissions before it don't count. It is longer than a run
# waits for its workers: else a driver that is killed at every start of the training would be resubmitted for ever.
PROGRESS_SECONDS = 2.0 * WORKER_TIMEOUT
# A script has 30 s after SIGTERM, and its workers 30 s more to store its files.
STOP_SECONDS = 75.0
THREAD_SECONDS = 10.0  # of its request under way
# Of the heads before this one, and of refusals.
KEPT_JOBS, KEPT_REFUSALS = 100, 50


class Desk:
    """Thread of the head.

    `ray` returns the state of Ray; OSError if it does not answer. `can_start` returns True once Ray is up: a driver
    that can't join it ends for good. `sleep` is None for a head that does not sleep.
    """

    def __init__(
        self,
        documents: Documents,
        jobs: MachineJobs,
        ray: Callable[[], dict[str, Any]],
        can_start: Callable[[], bool] = lambda: True,
        sleep: Sleep | None = None,
    ) -> None:
        self._documents, self._jobs, self._ray, self._can_start = documents, jobs, ray, can_start
        self._sleep = sleep
        self._state = HeadState(
            head=uuid.uuid4().hex,
            code=labels.fingerprint(),
            secrets_key=os.environ.get(SECRETS_KEY_VARIABLE, ""),
            wake=sleep.wake if sleep else None,
        )
        self._version: str | None = None
        self._earlier: dict[str, Job] = {}  # jobs of the heads before, by their keys (`record.key_of`)
        self._claim: list[Job] = []  # the job whose driver is about to start
        self._settled: set[str] = set()  # keys of lost jobs whose run another job has continued, or none will
        self._pushed: dict[str, int] = {}  # bytes of each log that are in the bucket
        self._merged: dict[str, int] = {}  # those of them that are in large parts
        self._pieces: dict[str, int] = {}  # parts after these
        self._parts: dict[str, bytes] = {}  # parts whose write may have succeeded, or not
        self._kill_at: dict[str, float] = {}
        self._without_secrets: set[str] = set()  # keys of jobs
        self._secrets_at = float("-inf")
        self._bell: str | None = None
        self._is_open = True  # a request may not be answered yet
        self._looked_at = self._wrote_at = float("-inf")
        self._pruned_at = time.monotonic()
        self._has_changed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.run, name="desk", daemon=True)
        self._said: set[str] = set()
        self.is_current = False  # False until the state of the head before is read, and once a later head has written

    def start(self) -> None:
        """Start the thread; it ends with this process."""
        self._thread.start()

    def run(self) -> None:
        """Work until the head stops."""
        while not self._stopping.is_set():
            self.work()
            self._stopping.wait(POLL_SECONDS)

    def work(self) -> None:
        """Do once what is to be done; one fault does not hold up the rest."""
        self._try(self._kill_late, "stopping jobs")
        if not self._version:
            if self._can_start():  # until then the state says what the head before had under way
                self._try(self._take_over, "the state of the head before")
        elif self.is_current and self._try(self._look, "requests"):  # a lost run may have been stopped
            self._try(self._resubmit_lost, "lost runs")
            self._try(self._prune, "old logs")
        else:
            self._is_open = True  # as far as is known
        self._try(self._push_logs, "logs")
        self._try(self._write, "the state")
        if self._sleep and (cause := failure_of(lambda: self._note(self._why_busy()))):
            self._note(cause)

    def _note(self, reason: str) -> None:
        # Once it stops, the last state tells that the head has gone to sleep.
        if self._sleep and not self._stopping.is_set():
            self._sleep.idle.note(DESK, reason)

    def _why_busy(self) -> str:
        """Return the reason why the head must not sleep; empty if nothing is left to do or to store."""
        if not (self._version or self.is_current):
            return "the state of the head before is not read"
        own = self._jobs.list_jobs()
        if any(job["status"] not in ENDED for job in own):
            return "a run is under way"
        if any(self._pushed.get(job["log"], -1) < _size(self._jobs.log_file(job)) for job in own):
            return "a log is not stored"
        if not self.is_current:  # a later head does the rest
            return ""
        jobs = self._list()
        open_work = {
            "a request is open": self._is_open,
            "a lost run is submitted again": any(map(is_lost, jobs)),
            "the secrets of a run are not deleted": any(map(self._waits_for_secrets, record.last_jobs(jobs))),
            "the state is not stored": self._has_changed or jobs != self._state.jobs,
        }
        return next((reason for reason, holds in open_work.items() if holds), "")

    def stop_jobs(self) -> signal.Signals:
        """Stop the jobs because the head is being stopped, and record that; the next head submits them again."""
        self._stopping.set()
        self._has_changed |= self._sleep is not None  # the last idle time tells that it has gone to sleep
        began, told = time.monotonic(), set[str]()
        while (passed := time.monotonic() - began) < STOP_SECONDS:
            works = self._thread.is_alive()  # and may start a job, so that it is looked at first
            running = {job["submission_id"] for job in self._running()}
            if not running and not (works and passed < THREAD_SECONDS):
                break
            for job_id in running - told:
                logger.info(f"stopping job {job_id}")
                with suppress(OSError, TrainingError):
                    self._jobs.stop_job(job_id, INTERRUPT)
            if running and not told:  # before they have ended, as the container has little time
                self._request_next()
            told |= running
            if not works:
                failure_of(self._push_logs)
            time.sleep(POLL_SECONDS / 2)
        for step in (self._push_logs, self._write):
            if cause := failure_of(step):
                logger.warning(f"the next head may not know the jobs of this one ({cause})")
        self._request_next()
        return signal.SIGTERM

    def _request_next(self) -> None:
        """Wake the next head if there is work for it: a head that is put to sleep may just have got some."""
        if not self._sleep:
            return
        with suppress(Exception):  # if that is not known, there may be some
            is_left = any(job["status"] not in ENDED or is_lost(job) for job in self._list())
            if not (is_left or self._documents.requests()):
                return
        if cause := failure_of(self._sleep.request):
            logger.warning(f"the next head is not woken; a request of a user does that ({cause})")

    def _running(self) -> list[Job]:
        return [job for job in self._jobs.list_jobs() if job["status"] not in ENDED]

    def _take_over(self) -> None:
        """Read the state of the head before, whose jobs are lost unless this machine has them."""
        try:
            version, state = self._documents.read_head()
        except BrokenError as cause:
            version, state = cause.version, HeadState()
            self._say(f"the state of the head before can't be used ({cause}); its runs are not continued")
        age = self._documents.head_age()[1]
        # The head before has deleted them; there may already be those of a request that is not read yet.
        self._without_secrets |= {key_of(job) for job in state.jobs if job["status"] in ENDED and not is_lost(job)}
        self._settled |= {key_of(job) for job in state.jobs if job.get("is_settled")}
        own = self._jobs.list_jobs()
        known = {key_of(job) for job in own} | {job["metadata"].get(REQUEST) for job in own}
        earlier = [job for job in state.jobs if key_of(job) not in known]
        earlier = [job if job["status"] in ENDED else self._lost(job, age) for job in earlier]
        self._settle([*earlier, *own])
        if age > DAY:
            self._settled |= {key_of(job) for job in [*own, *earlier] if job["status"] in ENDED}
        ended = [job for job in earlier if key_of(job) in self._settled or not is_lost(job)]
        self._earlier = {key_of(job): job for job in earlier if job not in ended[:-KEPT_JOBS]}
        self._try(partial(self._jobs.reserve, [job["submission_id"] for job in self._earlier.values()]), "taken IDs")
        self._state = replace(self._state, refused=state.refused)
        self._version = self._documents.write_head(self._current(), version)
        self.is_current = self._version is not None

    def _lost(self, job: Job, age: float) -> Job:
        """Return a job that was under way on a head that is gone, and that wrote its state so many seconds ago."""
        size = self._documents.log_size(job["log"]) if job["log"] else 0
        status = record.STOPPED if job.get("is_stopped") else record.FAILED
        ended = {"status": status, "end_time": int(1000 * (time.time() - age)), "log_size": size}
        return {**job, **ended, "driver_exit_code": None, "message": "its head was lost"}

    def _list(self) -> list[Job]:
        """Return all jobs in the order of their start, with the sizes of the logs that have ended."""
        own = self._jobs.list_jobs()
        for job in own:
            if job["status"] in ENDED:
                with suppress(OSError):
                    job["log_size"] = self._jobs.log_file(job).stat().st_size
        jobs = [*self._earlier.values(), *own, *self._claim]
        marked = [{**job, "is_settled": True} if key_of(job) in self._settled else job for job in jobs]
        return sorted(marked, key=lambda job: job["start_time"])

    def _settle(self, jobs: list[Job]) -> None:
        """Settle the lost jobs that are not the last ones of their runs: a later job has continued each."""
        last = {key_of(job) for job in record.last_jobs(jobs)}
        self._settled |= {key_of(job) for job in jobs if is_lost(job) and key_of(job) not in last}

    # Requests

    def _look(self) -> None:
        """Answer the requests if the bell has rung, or if there may be one that it was not rung for."""
        bell = self._documents.store.find(self._documents.path(BELL))
        has_rung = bell is not None and bell.version != self._bell
        if not (has_rung or time.monotonic() - self._looked_at > LOOK_SECONDS):
            return
        failed: dict[str, Request | None] = {}
        requests = self._documents.requests()
        if any(isinstance(each, tuple) or not each.content.get("is_check") for each in requests):
            self._note("a request is answered")
        for request in requests:
            if isinstance(request, tuple):
                if not self._try(partial(self._refuse_broken, *request), "a request"):
                    failed[request[0]] = None
            elif not self._try(partial(self._answer, request, failed), "a request"):
                failed[request.id] = request
        self._is_open = bool(failed)
        if not failed:
            self._looked_at = time.monotonic()
            self._bell = bell.version if bell else None  # as it was before the look: it may have rung meanwhile

    def _answer(self, request: Request, failed: Mapping[str, Request | None]) -> None:
        """Answer a request; `failed` are those before it that could not be answered, and will be tried again."""
        if self._stopping.is_set():
            return
        if request.age > DAY:
            self._drop(request, "the request is older than a day; start the run again")
        elif request.kind == RUN:
            with self._jobs.submitting(LOCK_SECONDS):
                self._accept(request)
        elif request.kind == STACKS:
            self._ask_stacks(request)
        else:
            for wanted in request.content["jobs"]:
                if begun := failed.get(wanted):
                    self._drop(begun, "the run was stopped before it began")
                else:
                    self._stop(wanted)
            self._has_changed = True
            if self._write():  # the next head knows it, too
                self._documents.store.delete(request.path)

    def _drop(self, request: Request, reason: str) -> None:
        """Refuse a request for good, and delete its secrets unless a job of its run uses them."""
        if request.kind == RUN and not record.under_way(self._list(), _run_of(request)):
            metadata = {**request.content["metadata"], REQUEST: request.id}
            self._delete_secrets(record.pending("", metadata, request.time))
        self._refuse(request.id, request.path, reason)

    def _refuse_broken(self, path: str, cause: BrokenError) -> None:
        hint = "; the command and the head have different versions: pulumi up" if cause.is_other_format else ""
        request = path.rpartition("/")[2].removesuffix(".json")
        self._refuse(request, path, f"the head refuses the request ({cause}){hint}")

    def _refuse(self, request: str, path: str, reason: str) -> None:
        refused = {**self._state.refused, request: reason}
        self._state = replace(self._state, refused=dict(list(refused.items())[-KEPT_REFUSALS:]))
        self._has_changed = True
        if self._write():
            self._documents.store.delete(path)

    def _accept(self, request: Request) -> None:
        """Record the job of a request, then start its driver: a head that dies in between leaves a lost job.

        A request that is withdrawn before the record is written is not started; after that its user sees the job.
        """
        jobs = self._list()
        if any(job["metadata"].get(REQUEST) == request.id for job in jobs):
            self._documents.store.delete(request.path)
            return
        run = _run_of(request)
        if active := record.under_way(jobs, run):
            line = f"run {run['run_name']} is already active as job {active['submission_id']}"
            self._refuse(request.id, request.path, line)
            return
        job_id = next_id(run["run_name"], {job["submission_id"] for job in jobs})
        own = {OWNER: request.owner, SUBMITTED: f"{request.time:.3f}", REQUEST: request.id}
        metadata = {**request.content["metadata"], **own}
        self._claim = [record.pending(job_id, metadata, time.time(), request.content["uri"])]
        try:
            if not self._write():
                return
            if self._documents.store.find(request.path) is not None:
                self._jobs.submit(request.content["uri"], metadata, job_id)
                logger.info(f"job {job_id} of {request.owner} is started")
            else:
                self._delete_secrets(self._claim[0])
        except TrainingError as cause:
            self._delete_secrets(self._claim[0])
            self._refuse(request.id, request.path, str(cause))
        finally:
            self._claim = []
            self._has_changed = True
        self._documents.store.delete(request.path)

    def _stop(self, wanted: str) -> None:
        """Stop a job, by its ID or its request's, and those that continue it; a lost one is not submitted again."""
        jobs = self._list()
        meant = [job for job in jobs if wanted in (job["submission_id"], job["metadata"].get(REQUEST))]
        for job in jobs:
            if not any(job == each or _continues(job, each) for each in meant):
                continue
            if key_of(job) in self._earlier:
                if is_lost(job):
                    self._earlier[key_of(job)] = {**job, "status": record.STOPPED}
            elif job["status"] not in ENDED or is_lost(job):
                self._jobs.stop_job(job["submission_id"])
                self._kill_at.setdefault(job["submission_id"], time.monotonic() + STOP_SECONDS)

    def _ask_stacks(self, request: Request) -> None:
        """Pass a request for stacks on to the driver of its job."""
        for job in self._running():
            if job["submission_id"] in request.content["jobs"]:
                self._jobs.ask_stacks(job["submission_id"], request.id)
        self._documents.store.delete(request.path)

    def _kill_late(self) -> None:
        """Kill the jobs that a user has stopped, and that have not ended in time."""
        running = {job["submission_id"] for job in self._running()} if self._kill_at else set()
        for job_id, moment in list(self._kill_at.items()):
            if job_id not in running:
                del self._kill_at[job_id]
            elif time.monotonic() > moment:
                self._jobs.kill_job(job_id)

    # Lost runs

    def _resubmit_lost(self) -> None:
        """Submit each run whose last job lost its driver or its head, up to `max_resubmissions` times in a row."""
        jobs = self._list()
        self._settle(jobs)
        # In the order of the queue: after the loss of a head, all of them start at once.
        for job in sorted(record.last_jobs(jobs), key=lambda job: job["metadata"].get(SUBMITTED, "")):
            if self._stopping.is_set():
                return
            if is_lost(job):
                self._try(partial(self._resubmit, job), f"job {job['submission_id']} is not submitted again")
            elif job["status"] in ENDED:
                self._delete_secrets(job)

    def _resubmit(self, job: Job) -> None:
        lost, metadata = job["submission_id"], job["metadata"]
        maximum = number_in(metadata, record.MAX_RESUBMISSIONS)
        seconds = ((job["end_time"] or 0) - job["start_time"]) / 1000
        # In a row: without progress in between, before this job was lost.
        resubmissions = 0 if seconds >= PROGRESS_SECONDS else number_in(metadata, record.RESUBMISSIONS)
        if resubmissions >= maximum:
            self._settled.add(key_of(job))
            self._has_changed = True
            self._delete_secrets(job)
            if maximum:
                self._say(f"job {lost} is not submitted again: its run was lost {maximum + 1} times in a row")
            return
        successor = next_id(metadata[record.RUN[0]], {each["submission_id"] for each in self._list()})
        own = {record.RESUBMISSIONS: str(resubmissions + 1)}
        with self._jobs.submitting(LOCK_SECONDS):
            self._jobs.submit(job["uri"], {**metadata, **own}, successor)
        logger.info(f"job {lost} was lost; submitted again as {successor} ({resubmissions + 1} of {maximum})")
        self._has_changed = True

    def _delete_secrets(self, job: Job) -> None:
        """Delete the secrets of a run that has ended, once."""
        stored, now = record.stored_secrets(job["metadata"]), time.monotonic()
        if not self._has_secrets(job) or now - self._secrets_at < SECRETS_SECONDS:
            return
        self._secrets_at = now
        if self._try(lambda: secrets.store(stored[0]).delete(stored[1:]), f"the secrets in {stored[0]}"):
            self._without_secrets.add(key_of(job))
            self._secrets_at = float("-inf")

    def _has_secrets(self, job: Job) -> bool:
        return bool(record.stored_secrets(job["metadata"])) and key_of(job) not in self._without_secrets

    def _waits_for_secrets(self, job: Job) -> bool:
        """Return True if the secrets of a job are to be deleted, and it has not ended long ago."""
        ended_at = (job["end_time"] or math.inf) / 1000
        return self._has_secrets(job) and time.time() - ended_at < SECRETS_BUSY_SECONDS

    # The bucket

    def _push_logs(self) -> None:
        """Copy what is new of the logs, to their present ends: a driver that prints all the time holds up nothing."""
        for job in self._jobs.list_jobs():
            log = job["log"]
            if log not in self._pushed:
                self._pushed[log] = self._merged[log] = self._documents.log_size(log)
                self._pieces[log] = 0
            file = self._jobs.log_file(job)
            end = _size(file)
            for _ in range(PARTS_AT_ONCE):
                if self._pushed[log] >= end or not (part := self._parts.get(log) or _read(file, self._pushed[log])):
                    break
                self._parts[log] = part  # a write that fails is repeated with the same bytes: it may have succeeded
                self._documents.write_log(log, self._pushed[log], part)
                del self._parts[log]
                self._pushed[log] += len(part)
                self._pieces[log] += 1
                self._merge(file, log)
            if job["status"] in ENDED and self._pushed[log] >= end:
                self._merge(file, log, is_last=True)

    def _merge(self, file: Path, log: str, *, is_last: bool = False) -> None:
        """Write the last parts as one, where the first of them is: a reader from the start has few to read."""
        start, size = self._merged[log], self._pushed[log] - self._merged[log]
        is_whole = size >= PART_BYTES or is_last
        if self._pieces[log] >= (2 if is_whole else MERGED_PARTS):
            content = _read(file, start, size)
            if len(content) == size:  # else another program has emptied it
                self._documents.write_log(log, start, content)
            self._pieces[log] = 1
        if is_whole:
            self._merged[log] += size
            self._pieces[log] = 0

    def _prune(self) -> None:
        """Delete the logs of jobs that are no longer listed, each hour."""
        if time.monotonic() - self._pruned_at < PRUNE_SECONDS:
            return
        self._pruned_at = time.monotonic()
        listed = {job["log"] for job in self._list()}
        for log in self._documents.store.listing(self._documents.path(LOGS)).folders:
            if log not in listed:
                self._documents.store.delete_folder(self._documents.path(LOGS, log))

    def _write(self) -> bool:
        """Write the state if it has changed, or to show that the head is there; False once another head has written."""
        if not self.is_current or self._version is None:
            return False
        is_due = time.monotonic() - self._wrote_at >= STATE_SECONDS
        if not (is_due or self._has_changed or self._list() != self._state.jobs):
            return True
        if is_due:
            ray: dict[str, Any] = {}
            with suppress(OSError):  # it is starting, or busy
                ray = self._ray()
            self._state = replace(self._state, ray=ray)
        self._has_changed = True  # until it is written
        self._state = self._current()
        while (written := self._documents.write_head(self._state, self._version)) is None:
            self._version, other = self._read_other()
            if self._version is not None and other.head != self._state.head:  # else the answer to a write was lost
                self.is_current = False
                logger.warning("a later head has taken the cluster over; this one answers no more requests")
                return False
        self._version, self._has_changed = written, False
        self._wrote_at = time.monotonic() if is_due else self._wrote_at
        return True

    def _read_other(self) -> tuple[str | None, HeadState]:
        """Return the state that is stored now, by this head or another one; a broken state counts as this head's."""
        try:
            return self._documents.read_head()
        except BrokenError as cause:
            return cause.version, HeadState() if cause.is_other_format else self._state

    def _current(self) -> HeadState:
        idle_minutes = self._sleep.idle.minutes if self._sleep else 0.0
        return replace(self._state, jobs=self._list(), idle_minutes=idle_minutes)

    def _try(self, step: Callable[[], object], what: str) -> bool:
        """Do a step; if it fails, print why, once, and return False."""
        cause = failure_of(step)
        if cause:
            self._say(f"{what}: {cause}")
        return not cause

    def _say(self, line: str) -> None:
        """Print a line once."""
        if line not in self._said:
            self._said.add(line)
            logger.warning(line)


def _run_of(request: Request) -> dict[str, str]:
    return {key: request.content["metadata"][key] for key in record.RUN}


def _continues(job: Job, lost: Job) -> bool:
    """Return True if a head has submitted a job in the place of a lost one, or of one after it."""
    run = {key: lost["metadata"].get(key, "") for key in record.RUN}
    is_later = job["start_time"] > lost["start_time"]
    return is_later and is_of(job, run) and number_in(job["metadata"], record.RESUBMISSIONS) > 0


def _size(file: Path) -> int:
    """Return the size of a log; 0 if it was deleted."""
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def _read(file: Path, start: int, size: int = PART_BYTES) -> bytes:
    """Return bytes of a log; empty if there are none, or it was deleted."""
    with suppress(FileNotFoundError), file.open("rb") as log:
        log.seek(start)
        return log.read(size)
    return b""
