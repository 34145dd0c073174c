"""Jobs of a cluster's head, which a command reaches through the bucket, with the methods of MachineJobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from ray_on_ecs import secrets
from ray_on_ecs.errors import HeadGone, HeadUnavailable, Interrupted, ResourceError, TrainingError, UsageError
from ray_on_ecs.jobs.documents import RUN, STACKS, STOP, BrokenError, Documents, HeadState, Request
from ray_on_ecs.jobs.record import DAY, ENDED, FAILED, REQUEST, Job, delete_secrets, pending, was_lost
from ray_on_ecs.storage.bucket import StorageFault

if TYPE_CHECKING:
    from ray_on_ecs.cluster.wake import Waker

# A head writes its state every 10 s. After these times it may be away, and is silent.
AWAY_SECONDS, SILENT_SECONDS = 20.0, 35.0
# A head that is there answers a request sooner.
ANSWER_SECONDS = 5.0
POLL_SECONDS = 0.5
STATE_SECONDS = 2.0  # between two looks at the state while a log is followed
# For each next part of the log of a job that has ended.
LAST_SECONDS = 15.0
WITHDRAW_SECONDS = 10.0  # for the head to start a driver
# A head that is starting pulls its image first.
ACCEPT_SECONDS = 1800.0
# A head whose idle time is so far from its end does not go to sleep while a command connects to it.
AWAKE_MINUTES = 5.0


class RemoteJobs:
    """Jobs of a cluster.

    `user` returns the user's ID, `aws:userid`; `secrets_of` the store of a run's secrets, by the run's folder.
    """

    # For a job that is asked to end: its driver writes a last checkpoint, and the head kills it after 70 s.
    stop_seconds = 180.0

    def __init__(
        self,
        documents: Documents,
        user: Callable[[], str],
        say: Callable[[str], None],
        secrets_of: Callable[[str], secrets.Store] = secrets.store,
        waker: Waker | None = None,
    ) -> None:
        self._documents, self._user, self._say, self._secrets_of = documents, user, say, secrets_of
        self._waker = waker
        self._version, self._state = "", HeadState()
        self._checked_at = 0.0  # when its own request was still there
        self._said: set[str] = set()

    def state(self) -> tuple[HeadState, float]:
        """Return the head's state, and the seconds since it was written.

        HeadUnavailable if no head has written it yet, UsageError if another version has.
        """
        with _answers():
            version, age = self._documents.head_age()
            try:
                if version != self._version:
                    _, self._state = self._documents.read_head()
            except BrokenError as cause:
                path = self._documents.path()
                raise UsageError(
                    f"the state of the head in {path} can't be used ({cause}): pulumi up gives the head the image of "
                    "this version, or install the version of the head"
                ) from cause
        self._version = version
        if not version:
            raise HeadUnavailable(
                "the head has not written its state yet: it is starting, or its image is older than this command, and "
                "pulumi up replaces it"
            )
        if age > DAY:
            return replace(self._state, jobs=[_not_continued(job) for job in self._state.jobs]), age
        return self._state, age

    def is_away(self) -> bool:
        """Return True while the head writes no state: it may be about to be replaced."""
        return self.state()[1] > AWAY_SECONDS

    @contextmanager
    def submitting(self) -> Generator[None]:
        """Wait for a head; it itself refuses a second request for a run."""
        self._wait(lambda state, age: "is up")
        yield

    def list_jobs(self) -> list[Job]:
        """Return the jobs in the order of their start, and last the requests that the head has not accepted yet."""
        state, age, jobs = self.read()
        if age > SILENT_SECONDS and not is_asleep(state, age):
            self._say_once("silent", f"the head is silent: this is its state of {_ago(age)}")
        return jobs

    def read(self) -> tuple[HeadState, float, list[Job]]:
        """Return the head's state, the seconds since it was written, and all jobs as `list_jobs` does."""
        with _answers():  # before the state: a request that is accepted meanwhile is in both, and not in neither
            requests = [each for each in self._documents.requests() if not isinstance(each, tuple)]
        state, age = self.state()
        answered = {job["metadata"].get(REQUEST) for job in state.jobs} | state.refused.keys()
        others = [each for each in requests if each.kind == RUN and each.id not in answered]
        return state, age, [*state.jobs, *map(_requested, others)]

    def job(self, job_id: str) -> Job:
        """Return a job, or the one that answers a request of this ID."""
        if job := _find(self.list_jobs(), job_id):
            return job
        raise ResourceError(f"the head no longer lists job {job_id}")

    def submit(self, uri: str, metadata: Mapping[str, str]) -> str:
        """Request the run of a folder, and wait until the head has accepted it; return the job's ID.

        UsageError if the head refuses it, and Interrupted if a user has stopped it before. If the head does not accept
        it in time: ResourceError, and the request is withdrawn, and its secrets are deleted.
        """
        user, request = self._user(), uuid.uuid4().hex
        try:
            self._ask()
        except BaseException:  # also Ctrl-C
            delete_secrets(metadata, self._secrets_of)
            raise
        try:
            with _answers():  # also a write whose answer is lost may have succeeded
                self._documents.write_request(user, RUN, request, uri=uri, metadata=dict(metadata))
            return self._wait(partial(self._answer, user, request, metadata["run_name"]), is_patient=True)
        except BaseException as end:
            job = self._withdraw(user, request)
            if job:
                self._say(f"run {metadata['run_name']} is submitted as job {job}, and goes on")
            elif job is not None and not isinstance(end, UsageError):  # a refused one may be that of another command
                delete_secrets(metadata, self._secrets_of)
                self._say(f"the request of run {metadata['run_name']} is withdrawn")
            raise

    def awaken(self) -> None:
        """Return at once if the head is awake; else wake it, and return once it has answered an empty request.

        Its idle time then begins anew. Raises as `submit` does.
        """
        state, age = self.state()
        if state.wake is None or (
            age <= SILENT_SECONDS and state.idle_minutes < state.wake.after_minutes - AWAKE_MINUTES
        ):
            return
        user, request = self._user(), uuid.uuid4().hex
        self._ask()

        def answer(state: HeadState, age: float) -> str:
            return "" if age > AWAY_SECONDS or self._documents.is_open(user, request) else "is up"

        self._send(user, STOP, request, [], answer, is_patient=True, does="answers")

    def _send(
        self,
        user: str,
        kind: str,
        request: str,
        jobs: list[str],
        found: Callable[[HeadState, float], str],
        *,
        is_patient: bool = False,
        does: str,
    ) -> None:
        """Write a request about these jobs, and wait as `_wait` does; withdraw it if that fails."""
        try:
            with _answers():
                self._documents.write_request(user, kind, request, jobs=jobs)
            self._wait(found, is_patient=is_patient, does=does)
        except BaseException:
            with suppress(OSError):
                self._documents.withdraw(user, request)
            raise

    def _ask(self) -> None:
        """Publish a request for a head that may sleep, as `Waker.ask` does."""
        with suppress(HeadUnavailable):  # it has never been there
            if self._waker:
                self._waker.ask(*self.state())

    def _withdraw(self, user: str, request: str) -> str | None:
        """Withdraw a request; return the ID of its job if the head was faster, and None if that is not known."""
        deadline = time.monotonic() + WITHDRAW_SECONDS
        try:
            with _answers():
                self._documents.withdraw(user, request)
            while found := _find(self.state()[0].jobs, request):
                # Without a log it is about to start, or to be dropped, as its request is gone.
                if found["log"] or found["status"] in ENDED or time.monotonic() > deadline:
                    return str(found["submission_id"])
                time.sleep(POLL_SECONDS)
            return ""
        except (HeadUnavailable, UsageError):  # there is not a head, or it is of another version
            return ""
        except ResourceError as cause:
            self._say(f"the head may still start the run, as its request can't be withdrawn ({cause})")
            return None

    def _wait(
        self, found: Callable[[HeadState, float], str], *, is_patient: bool = False, does: str = "starts the run"
    ) -> str:
        """Return what is found in the head's state and its age, as soon as there is something; else ResourceError.

        If it is patient, a bucket that does not answer is asked again, and a head that sleeps is woken; `does` is what
        the head then does.
        """
        began = time.monotonic()
        while (waited := time.monotonic() - began) < ACCEPT_SECONDS:
            try:
                state, age = self.state()
                with _answers():
                    if answer := found(state, age):
                        return answer
                is_late = age > SILENT_SECONDS or waited > ANSWER_SECONDS
                reason = f"the head wrote its state {_ago(age)}" if is_late else ""
                if is_patient and self._waker and self._waker.wait(state, age):
                    reason = ""
            except ResourceError as cause:
                if isinstance(cause, HeadGone) or not (is_patient or isinstance(cause, HeadUnavailable)):
                    raise
                reason = str(cause)
            if reason:
                self._say_once("waits", f"waiting for the head, which {does} as soon as it is up ({reason})")
            time.sleep(POLL_SECONDS)
        raise ResourceError(
            f"the head did not answer in {ACCEPT_SECONDS / 60:.0f} minutes; ray-on-ecs status shows why"
        )

    def _answer(self, user: str, request: str, run: str, state: HeadState, age: float) -> str:
        """Return the ID of the job that answers a request, empty if there is none yet; Interrupted once withdrawn."""
        if reason := state.refused.get(request):
            raise UsageError(reason)
        own = [job for job in state.jobs if job["metadata"].get(REQUEST) == request]
        if not own and time.monotonic() - self._checked_at > STATE_SECONDS:
            self._checked_at = time.monotonic()
            if not self._documents.is_open(user, request):
                latest = self.state()[0]  # the head writes its answer before it deletes the request
                if not (request in latest.refused or _find(latest.jobs, request)):
                    raise Interrupted(f"run {run} was stopped before it began; the same command starts it")
        # A job without a log is recorded, and about to start: the head may still refuse it.
        return next((job["submission_id"] for job in own if job["log"] or job["status"] in ENDED), "")

    def _say_once(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(line)

    def stop_job(self, job_id: str) -> None:
        """Ask the head to stop a job; withdraw the user's own request that no head has accepted."""
        user = self._user()
        with _answers():
            if self._documents.is_open(user, job_id) and self._withdraw(user, job_id) == "":
                return
            self._documents.write_request(user, STOP, jobs=[job_id])

    def ask_stacks(self, job_id: str, request: str) -> None:
        """Ask the head for the stacks of a job's ranks, under the ID of a request; UsageError if it refuses that."""
        user = self._user()

        def answer(state: HeadState, age: float) -> str:
            if reason := state.refused.get(request):
                raise UsageError(reason)
            return "" if self._documents.is_open(user, request) else "is answered"

        self._send(user, STACKS, request, [job_id], answer, does="passes the request on")

    def check_requests(self, *, is_answered: bool = True) -> None:
        """Send the head a request that asks for nothing; raise as the others do if the user may not.

        It does not keep the head awake. If there is not a head that answers and deletes it, it is withdrawn.
        """
        user = self._user()
        with _answers():
            request = self._documents.write_request(user, STOP, jobs=[], is_check=True)
            if not is_answered:
                self._documents.withdraw(user, request)

    def kill_job(self, job_id: str) -> bool:
        """Return False: the head itself kills a job that does not end."""
        return False

    def log(self, job_id: str) -> str:
        """Return the log of a job so far."""
        parts: list[bytes] = []
        job = self.job(job_id)
        with _answers():
            self._read_log(job, 0, parts.append)
        return b"".join(parts).decode(errors="replace")

    def tail(self, job_id: str, show: Callable[[bytes], None], offset: int = 0) -> None:
        """Show a job's log from an offset to its end; HeadUnavailable if the head is silent: it goes on from there."""
        looked_at, ended_at, read_at, job = 0.0, 0.0, 0.0, self.job(job_id)
        while True:
            if time.monotonic() - looked_at > STATE_SECONDS:
                state, age = self.state()
                job = _find(state.jobs, job_id) or self._still_listed(job_id, job)
                if age > SILENT_SECONDS and job["status"] not in ENDED:
                    raise HeadUnavailable(f"the head wrote its state {_ago(age)}")
                looked_at = time.monotonic()
                ended_at = ended_at or (looked_at if job["status"] in ENDED else 0.0)
                show(b"")
            before = offset
            with _answers():
                offset = self._read_log(job, offset, show)
            read_at = time.monotonic() if offset > before else read_at
            # The rest was lost with its head.
            is_late = ended_at and time.monotonic() - max(ended_at, read_at) > LAST_SECONDS
            if job["status"] in ENDED and (is_late or offset >= (job.get("log_size") or 0)):
                return
            time.sleep(POLL_SECONDS)

    def _still_listed(self, job_id: str, job: Job) -> Job:
        """Return a job that is not in the head's state; TrainingError if it was a request that is gone."""
        if job["log"]:  # the head has forgotten it
            return job
        if found := _find(self.list_jobs(), job_id):
            return found
        refused = self._state.refused.get(job["metadata"].get(REQUEST, job_id))
        raise TrainingError(refused or f"the request of run {job['metadata'].get('run_name')} was withdrawn")

    def _read_log(self, job: Job, offset: int, show: Callable[[bytes], None]) -> int:
        """Show the parts of a log from an offset; return the next one."""
        while job["log"] and (part := self._documents.read_log(job["log"], offset)):
            show(part)
            offset += len(part)
        return offset


def is_asleep(state: HeadState, age: float) -> bool:
    """Return True if the head that wrote this state, so many seconds ago, has gone to sleep and was not replaced yet.

    A head that is silent for another reason was busy, or had not been idle for long.
    """
    return age > SILENT_SECONDS and state.wake is not None and state.idle_minutes >= state.wake.after_minutes


def _not_continued(job: Job) -> Job:
    """Return a job of a head that has been away for a day: the next one continues no run of it (node/desk.py)."""
    if job["status"] in ENDED:
        return {**job, "is_settled": True} if was_lost(job) else job
    return {**job, "status": FAILED, "message": "its head was lost", "is_settled": True}


def _find(jobs: Sequence[Job], job_id: str) -> Job | None:
    """Return the last job of an ID, or the first one that answers a request of this ID."""
    of_id = [job for job in jobs if job["submission_id"] == job_id]
    answers = [job for job in jobs if job["metadata"].get(REQUEST) == job_id]
    return next(iter([*of_id[::-1], *answers]), None)


def _requested(request: Request) -> Job:
    """Return the job of a request that the head has not accepted yet."""
    metadata = {**request.content["metadata"], "owner": request.owner, REQUEST: request.id}
    return pending(request.id, metadata, request.time)


def _ago(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} ago"


@contextmanager
def _answers() -> Generator[None]:
    """Raise a storage's fault as an error of the command."""
    try:
        yield
    except StorageFault as cause:
        raise cause.error from cause
