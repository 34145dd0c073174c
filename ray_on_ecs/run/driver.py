"""A run from its turn to its result, as its driver tells it: places, starts of the scripts, their ends, decisions.

The driver polls the workers with its directive. Between two polls nothing waits for the storage or AWS (`_ask`), but
for the last error; Ray's head is asked, and if it does not answer, the driver ends before the workers would miss it. A
start of the scripts goes through the states of `State`. After it the failure policy decides if the scripts start again:
in the same workers, or in a new group.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from ray_on_ecs.errors import ResourceError, StorageError, TrainingError, resume_line
from ray_on_ecs.run import admission, failure_report, inputs, limit
from ray_on_ecs.run.admission import Admission
from ray_on_ecs.run.failure_policy import Failure, FailurePolicy, Mark, Raise
from ray_on_ecs.run.files.newest import Kept, has_stored, newest_stored
from ray_on_ecs.run.group import Directive, Group, GroupError, NoPlacesError, WorkerStatus, WorkerStatuses
from ray_on_ecs.run.homes import Home, home_of
from ray_on_ecs.run.instance_hours import InstanceHours
from ray_on_ecs.run.nodes import Nodes
from ray_on_ecs.run.patience import ask
from ray_on_ecs.run.receipt import NetworkCheck, efa_error
from ray_on_ecs.run.restarts import Restarts
from ray_on_ecs.run.slow_ranks import SlowRanks
from ray_on_ecs.run.stacks_request import SILENT, StacksRequest
from ray_on_ecs.run.stuck import Picture
from ray_on_ecs.run.summary import print_header, print_summary, print_what_stays, publish_files
from ray_on_ecs.run.supervisor import GRACE_SECONDS
from ray_on_ecs.run.worker import Settings
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.tracking import cloudwatch
from ray_on_ecs.tracking.cost import cost_of
from ray_on_ecs.tracking.results import write_results
from ray_on_ecs.tracking.run_monitor import RunMonitor
from ray_on_ecs.tracking.starts import describe, moment

logger = logging.getLogger(__name__)
T = TypeVar("T")

NOTICE_POLL_SECONDS = 1.0
# A node is reclaimed after this time if AWS reports no deadline.
DEFAULT_PREEMPTION_SECONDS = 60.0
# The scripts' time to end for more workers: a Checkpointer saves before SIGTERM, which comes in the last 30 s.
GROW_SECONDS = 120.0
# The scripts end this long before the deadline.
MARGIN_SECONDS = 5.0
# How long the workers may take to store the last files, once the scripts have ended.
STORE_SECONDS = 30.0
# How long workers may take to leave.
LEAVE_SECONDS = 10.0
SCRIPT_SILENT_SECONDS = 600.0
RECLAIMED = Failure("nodes are being reclaimed", "reclaimed")

# A start of the scripts. `starting`: the workers get their places, prepare their nodes and meet. `running`: all scripts
# have been started. `ending`: they get the time to end, for the reason of the driver's `ended_for`, and their files are
# stored. `ended`: this is done, or there is nothing to end.
State = Literal["starting", "running", "ending", "ended"]
# Why a start has ended: all scripts ended with 0; one failed, or all hang; a worker or its node was lost; nodes are
# being reclaimed; an elastic run may have more workers; the run reaches its limit; or it was stopped.
Reason = Literal["finished", "failed", "hung", "lost", "reclaimed", "grows", "limit", "stopped"]


def run(admitted: Admission) -> dict[str, Any]:
    """Run a script on every worker, and leave the results in the run's folder; return `result.json`.

    Raises:
        UsageError: A setting, the script or a file that it needs can't be used.
        ResourceError: The cluster lacks room for the workers.
        LimitReached: The run has reached its limit; its files are kept.
        TrainingError: The script failed; its files are kept, and `error.json` has the cause.
    """
    document, record = admitted.document, admitted.record
    config, storage = document.config, document.storage
    sources = {name: inputs.resolve(name, source, storage) for name, source in config.inputs.items()}
    record.starts.request(time.time())
    with home_of(admitted, sources) as home, ExitStack() as last:
        storage.delete(layout.ERROR)
        print_header(config, storage, home.allocation)
        driver = RunDriver(admitted, home, sources)
        last.callback(print_what_stays, config, driver.hours)
        summary = driver.train()
        publish_files(storage)
        of_code = {"archive": document.code.archive, **document.code.git}
        summary |= {"restarts": record.restarts, "starts": record.starts.documents(time.time())}
        if record.pool:
            summary |= {"pool": record.pool, "pools": record.pools}
        if record.waits or record.slow:
            summary |= {"slow": record.slow, "waits": record.waits}
        result = write_results(storage, config, of_code, summary, cost_of(driver.hours.by_kind), record.earlier)
        print_summary(result, config, storage)
    return result


class RunDriver:
    """The driver of one run."""

    def __init__(self, admitted: Admission, home: Home, sources: Mapping[str, str]) -> None:
        document = self._document = admitted.document
        self._config = document.config
        if home.allocation:
            self._config = document.config.with_workers(home.allocation.num_workers)
        self._storage = document.storage
        self._record = admitted.record
        self._left_out = document.code.left_out
        self._home = home
        self._settings = Settings(
            config=self._config,
            storage=self._storage,
            threads=home.allocation.cpus_per_worker if home.allocation else 0,
            use_gpu=home.allocation is not None and home.allocation.use_gpu,
            code=document.code,
            is_one_node=home.is_one_node,
            run_id=document.id,
            inputs=sources,
            cluster=home.cluster,
            launcher=home.launcher,
        )
        self.monitor = RunMonitor()
        self.hours = InstanceHours(home.instances)
        self._limit = limit.Limit(self._config, self._record.spent(), self.hours)
        self._record.spent = self._limit.spent
        self._group: Group | None = None
        self._restarts = Restarts(self._config.resume_args, self._record.restarts, self._record.extents)
        self._policy = FailurePolicy(self._config.max_restarts, self._mark)
        self._first_started_at: float | None = None
        self._hardware: dict[str, Any] | None = None
        self._checked_nodes_at = 0.0
        self._error: TrainingError | None = None  # with which the run ends
        self._ends_at = math.inf  # the run's limit (monotonic time), once a start ends
        self._stacks = StacksRequest()
        self._slow_ranks = SlowRanks(self._record.slow)
        self._answer: threading.Thread | None = None  # to the last request
        self._network = NetworkCheck(self._config)
        self._begin_start(0)

    def train(self) -> dict[str, Any]:
        """Run to the end; return the hardware, and when the scripts were first started.

        Raises:
            TrainingError: The run can't continue; the reason is in `error.json`, unless it is the user's mistake.
        """
        number = self._home.allocation.num_workers if self._home.allocation else None
        with (
            cloudwatch.publish_metrics(self.monitor, self._config.cloudwatch_namespace, self._home.kinds),
            self._limit.watching(),
            self.hours.running(),
            self._record.training(self.monitor, self.hours.by_kind, number, lambda: self.hours.most(0.0)),
            self._home.watching(),
        ):
            while self._ended_for != "finished":
                self._train_in_group()
        return {"hardware": self._hardware, "started_at": self._first_started_at}

    def _train_in_group(self) -> None:
        """Request workers, and start the scripts in them until they have finished, or other workers are needed."""
        self._check_limit()
        logger.debug("requesting workers")
        self._record.starts.request(time.time())
        group = self._group = self._new_group()
        others_follow = False
        try:
            self._train_in(group)
            others_follow = self._ended_for != "finished"
        finally:
            try:
                self._limit.count(is_running=False)
                self.hours.read()  # a short run may have been read only before it had workers
                self._leave(group, others_follow)
            finally:
                group.close()

    def _new_group(self) -> Group:
        """Request workers, and wait for their nodes.

        Raises:
            ResourceError: The nodes have not come.
            TrainingError: Those of lost workers have not come back.
        """
        try:
            return self._home.new_group(self._settings)
        except ResourceError as cause:
            if not self._policy.has_begun:
                raise
            failure = Failure(f"the nodes of lost workers did not come back: {cause}")
            decision = Raise(TrainingError, f"training failed: {failure.what}")
            raise failure_report.write_error(failure, decision, self._config, self._storage) from cause

    def _train_in(self, group: Group) -> None:
        try:
            while True:
                self._direct(group)
                if self._ended_for == "finished" or not self._decide(group):
                    break
        except NoPlacesError as cause:
            logger.debug(str(cause))
            if self._home.is_busy():  # the run is shown as waiting until its workers begin
                if not self._record.is_waiting:
                    logger.info("waiting: other jobs use the CPUs and GPUs of the cluster")
                self._record.note_waiting(True)
            self._begin_start(self._directive.generation)
        except GroupError as cause:
            if self._error:
                raise self._error from cause
            self._decide_on(self._why_ended(group) or Failure(str(cause)))
            self._begin_start(self._directive.generation + 1)

    def _direct(self, group: Group) -> None:
        """Direct one start of the scripts to its end, with all files stored.

        Raises:
            GroupError: See Group.
            TrainingError: The run is given up, and its scripts have ended.
            Stop: The user stopped the run; its scripts have ended, or have had the time for it.
        """
        try:
            while self._state != "ended":
                self.step(group)
        except KeyboardInterrupt as stop:
            self._error = admission.interrupted(self._config, stop)
            self._end("stopped", time.time() + GRACE_SECONDS)
            with suppress(GroupError):  # they end without the driver
                while self._state != "ended" and time.time() < self._directive.end_at + STORE_SECONDS:
                    self.step(group)
            raise
        if self._error:
            raise self._error

    def step(self, group: Group) -> None:
        """Poll the workers once, and decide on their directive."""
        self._direct_to(stacks=self._stacks.wanted())
        statuses = group.poll(self._directive)
        generation = self._directive.generation
        of_start = {rank: worker for rank, worker in statuses.items() if worker.generation == generation}
        self._take_reports(of_start)
        if self._state in ("starting", "running"):
            self._time_start(group, of_start)
        self._compare_ranks(group, of_start)
        self._last = {**self._last, **of_start}  # a worker that is lost by now may be to blame
        if self._stacks.are_there(of_start) and not (self._answer and self._answer.is_alive()):
            self._answer_request(group, of_start)
        errors = self._errors = {rank: worker for rank, worker in statuses.items() if worker.error}
        is_under_way = self._state in ("starting", "running")
        has_lost = bool(group.lost or errors)
        if has_lost and (is_under_way or self._ended_for == "finished"):  # the last files may be lost, too
            self._failure = failure_report.describe_lost(group.lost, errors, self._config)
            self._end("lost", time.time() + GRACE_SECONDS)
        elif is_under_way:
            self._prepare(group, statuses, of_start)
            self._watch(group, of_start)
            if self._state == "starting" and self._directive.measures:
                self._take_network(group, of_start)
        elif self._ended_for in ("grows", "reclaimed", "limit") and (reclaimed := self._reclaimed(group)):
            sooner = min(reclaimed["end_at"], self._directive.end_at)  # another node's time may be shorter
            self._direct_to(end_at=sooner, reclaimed=tuple({*self._directive.reclaimed, *reclaimed["reclaimed"]}))
        if self._ended_for == "hung":
            self._direct_to(are_read=all(map(_is_read, of_start.values())))
        if self._ended_for == "limit" and time.monotonic() >= self._ends_at:  # the clock may have been set back
            self._direct_to(end_at=min(self._directive.end_at, time.time()))
        self._direct_to(**self._nodes.look(group, of_start))
        if self._state == "ending":
            living = [rank for rank in range(len(group.ranks)) if rank not in group.lost and rank not in errors]
            are_done = all(self._is_done(of_start.get(rank), statuses.get(rank)) for rank in living)
            if are_done and self._nodes.have_committed(of_start):
                if self._ended_for == "limit" and _are_done(group, of_start):
                    self._ended_for, self._error = "finished", None
                self._check_stored(of_start)
                self._state = "ended"
        # Running time counts with places, from the first start on, and not while a Ray program waits.
        waits = not self._home.allocation and self._record.is_waiting
        self._limit.count(is_running=self._policy.has_begun and bool(group.places) and not waits)

    @staticmethod
    def _is_done(worker: WorkerStatus | None, before: WorkerStatus | None) -> bool:
        """Return whether a worker has ended this start; one that has not begun it has nothing to end."""
        return worker.is_stored if worker else before is None or before.is_stored or before.generation < 0

    def _take_reports(self, of_start: WorkerStatuses) -> None:
        first = of_start.get(0)
        if first and first.started_at:
            self._first_started_at = self._first_started_at or first.started_at
            self._hardware = first.hardware or self._home.hardware()
            if self._hardware:
                self._record.workers = self._hardware["workers"]
            generation = self._directive.generation
            self.monitor.update(generation, first.step, first.metrics, first.url, first.guess, first.steps)
            self._restarts.look(first.extent)

    def _compare_ranks(self, group: Group, workers: WorkerStatuses) -> None:
        """Look for a rank that the others wait for."""
        if self._state != "running":
            return
        for rank, worker in workers.items():
            for reading in worker.readings:
                self._slow_ranks.take(reading, group.places[rank], worker.clock)
        guess = self.monitor.guess.get("step")
        self._slow_ranks.look(time.time(), guess if self.monitor.step is None else self.monitor.step)
        self._record.waits = self._slow_ranks.waits

    def _time_start(self, group: Group, of_start: WorkerStatuses) -> None:
        """Note the moments of a start on new workers, for its timeline."""
        starts, now = self._record.starts, time.time()
        if not starts.is_open:
            return
        if starts.needs_places and group.places:
            starts.place(self._home.moments_of({place.node_id for place in group.places}), now)
        begun = [worker.started_at for worker in of_start.values() if worker.started_at]
        if begun and len(begun) == len(group.ranks):
            starts.begin_scripts(max(begun))
        first = of_start.get(0)
        if first and first.started_at and _has_made_step(first, first.started_at):
            if start := starts.reach_step(now):
                logger.info(f"start {describe(start)}")
        else:
            starts.look(now)

    def _prepare(self, group: Group, statuses: WorkerStatuses, of_start: WorkerStatuses) -> None:
        """Let the workers install packages once all can, and start the scripts once all are ready."""
        count = len(group.ranks)
        if count and len(statuses) == count and all(worker.is_prepared for worker in statuses.values()):
            self._direct_to(is_prepared=True)
        peers = [worker.peer for _, worker in sorted(of_start.items())]
        if count and len(peers) == count and not self._directive.peers and all(peers):
            measures = self._network.begin(group.places)
            if measures:
                logger.info("measuring the network between the nodes")
            elif self._config.require_efa and len({place.node_id for place in group.places}) == 1:
                logger.info("--require-efa: all workers are on one node, and use no network")
            self._direct_to(peers=tuple(peer for peer in peers if peer), measures=measures)

    def _take_network(self, group: Group, of_start: WorkerStatuses) -> None:
        """Print the receipt of the network, and start the scripts, unless they need EFA and do not get it."""
        nodes = {place.node_id for place in group.places}
        receipt = self._network.result(of_start, len(group.ranks), lambda: self._home.network_of(nodes))
        if receipt is None:
            return
        if receipt.has_torch:
            logger.log(logging.WARNING if receipt.failure else logging.INFO, receipt.line)
        if receipt.warning:
            logger.warning(receipt.warning)
        note = partial(self._document.note, network=receipt.document())
        if self._config.require_efa and receipt.is_without_efa:
            self._error = efa_error(receipt, self._config.run_name, has_begun=self._policy.has_begun)
            self._end("stopped", time.time() + GRACE_SECONDS)
            with suppress(OSError):
                self._ask(note)  # the evidence
        else:
            threading.Thread(target=note, name="network", daemon=True).start()  # scripts do not wait for the storage
            if self._config.require_efa and not receipt.transport:
                logger.warning("--require-efa: the run goes on, as it is not known that NCCL does not use EFA")
        self._direct_to(measures=False)

    def _watch(self, group: Group, workers: WorkerStatuses) -> None:
        """End the start if a script has failed, a node is being reclaimed, the scripts hang, or all have finished."""
        is_complete = bool(workers) and len(workers) == len(group.ranks)
        if self._state == "starting" and is_complete and all(worker.started_at for worker in workers.values()):
            self._begin()
        if any(worker.status for worker in workers.values()):
            logger.debug(f"exit statuses: {[worker.status for _, worker in sorted(workers.items())]}")
            self._end("failed", time.time() + GRACE_SECONDS)
        elif self._state == "running" and is_complete and all(worker.has_ended for worker in workers.values()):
            self._end("finished", time.time() + GRACE_SECONDS)
        elif error := self._limit.error():
            logger.info(f"the run is near its limit: the scripts have {self._limit.end_seconds:.0f} s to end")
            self._error = error
            self._end("limit", math.inf, reclaimed=tuple(range(len(group.ranks))))
        elif shortage := self._home.shortage():
            self._error = shortage
            self._end("stopped", time.time() + GRACE_SECONDS)
        elif reclaimed := self._reclaimed(group):
            self._end("reclaimed", **reclaimed)
        elif self._state == "running" and group.can_grow():
            logger.info("there is room for more workers; restarting with them")
            self._end("grows", time.time() + GROW_SECONDS, reclaimed=tuple(workers))
        elif self._state == "running":
            self._watch_silence(workers)

    def _begin(self) -> None:
        logger.debug("all scripts have been started")
        self._state = "running"
        self._policy.began()
        if self._home.allocation:  # a Ray program's watch updates the state
            self._record.note_waiting(False)

    def _reclaimed(self, group: Group) -> dict[str, Any]:
        """Return the ranks on nodes that are being reclaimed, and the time of that; at most once a second.

        It asks Ray's head.
        """
        if not group.places or time.monotonic() - self._checked_nodes_at < NOTICE_POLL_SECONDS:
            return {}
        self._checked_nodes_at = time.monotonic()
        draining = self._home.draining()
        ranks = tuple(rank for rank, place in enumerate(group.places) if place.node_id in draining)
        if not ranks:
            return {}
        unknown = time.time() + DEFAULT_PREEMPTION_SECONDS
        first = min(draining[group.places[rank].node_id] or unknown for rank in ranks)
        return {"end_at": first - MARGIN_SECONDS, "reclaimed": ranks}

    def _watch_silence(self, workers: WorkerStatuses) -> None:
        """End scripts that hang: they have reported steps, or the user has named the time."""
        silent_seconds = min(worker.silent_seconds for worker in workers.values())
        limit = self._config.hang_timeout or SCRIPT_SILENT_SECONDS
        if not limit < silent_seconds < math.inf:  # infinity: all have ended, and one has not said that all is done
            return
        if self._config.hang_timeout or any(worker.step is not None for worker in workers.values()):
            self._end("hung", time.time())
        elif not self._has_stacks and self._stacks.request == "":
            self._has_stacks = True
            self._stacks.ask(SILENT)

    def _check_stored(self, workers: WorkerStatuses) -> None:
        """Fail a run whose script has ended well if its last files were not stored; say so of any other run."""
        self._restarts.dropped = next((worker.dropped for worker in workers.values() if worker.dropped), "")
        reason = next((worker.not_stored for worker in workers.values() if worker.not_stored), None)
        if reason is None:
            return
        what = f"the last files could not be stored ({reason})"
        if self._error or self._ended_for != "finished":
            logger.warning(what)
        else:
            self._error = StorageError(f"{what}; {resume_line(self._config.run_name)}")

    def _decide(self, group: Group) -> bool:
        """Decide what follows the end of a start; return False if other workers are needed.

        Raises:
            TrainingError: The run ends.
        """
        if failure := self._why_ended(group):
            self._decide_on(failure)
        else:  # it grows
            with suppress(OSError):
                self._mark()
        needs_others = self._ended_for in ("grows", "reclaimed") or bool(self._errors)
        if not needs_others and group.lost:
            needs_others = not group.replace_lost()
        self._begin_start(self._directive.generation + 1)
        return not needs_others

    def _why_ended(self, group: Group) -> Failure | None:
        """Return the failure for which a start has ended, or ends; None if it does not end, or not for a failure."""
        if self._ended_for == "reclaimed":
            return RECLAIMED
        if self._ended_for == "hung":
            places = failure_report.picture_of(self._last, group.ranks, self._config)
            folder = self._store_stacks(places, self._last, "", self._ask)
            what = f"no progress for {self._config.hang_timeout or SCRIPT_SILENT_SECONDS:g} s: {places}"
            rank = failure_report.rank_of(places.odd_rank, self._config)
            return Failure(what, "hung", rank=rank, stacks=folder, log=self._log_of(places.odd_rank, group))
        if self._ended_for == "lost":
            return RECLAIMED if self._were_on_draining_nodes(group) else self._failure
        if self._ended_for == "failed":
            is_reclaimed = self._home.was_reclaimed()
            return RECLAIMED if is_reclaimed else failure_report.describe(self._last, self._config, self._left_out)
        return None

    def _were_on_draining_nodes(self, group: Group) -> bool:
        """Return whether workers were lost with their node, before its deadline, or had an error of that machine."""
        are_of_machines = all(isinstance(worker.error, OSError) for worker in self._errors.values())
        ranks, draining = [*group.lost, *(self._errors if are_of_machines else ())], self._home.draining()
        return any(group.places[rank].node_id in draining for rank in ranks)

    def _log_of(self, rank: int | None, group: Group) -> tuple[str, ...]:
        """Return the end of a rank's output, or of the program that has started it, on its node or on the first one."""
        own = [each for each in group.ranks if each.rank == rank]
        first = [each for each in group.ranks if each.local_rank == 0]
        on_node = [each for each in first if own and each.node_rank == own[0].node_rank]
        workers = [self._last.get(each.rank) for each in [*own, *on_node, *first[:1]]]
        return next((worker.log for worker in workers if worker and worker.log), ())

    def _decide_on(self, failure: Failure) -> None:
        """Print a line if the run continues after a failure.

        Raises:
            TrainingError: It doesn't.
        """
        decision = self._policy.decide(failure)
        logger.debug(f"{failure.kind}, {failure}: {type(decision).__name__}")
        if isinstance(decision, Raise):
            raise failure_report.write_error(failure, decision, self._config, self._storage) from failure.cause
        self._check_limit()
        what = failure.what if failure.kind == "reclaimed" else str(failure)
        stacks = f", stacks in {failure.stacks}" if failure.stacks else ""
        self._restarts.note(f"{what}{stacks}", decision.count)

    def _check_limit(self) -> None:
        """Raise LimitReached if the run has reached a limit."""
        if error := self._limit.error():
            raise error

    def _begin_start(self, generation: int) -> None:
        """Begin another start of the scripts."""
        self._restarts.begin()
        # Of a restart whose storage did not answer: files that an argument of --resume-args names may be there.
        is_unknown = generation > 0 and not self._restarts.is_known
        self._directive = Directive(generation, resumes=self._restarts.kept is not None or is_unknown)
        self._state: State = "starting"
        self._ended_for: Reason | None = None
        self._failure: Failure | None = None
        self._nodes = Nodes(mpi=self._config.mpi)
        self._slow_ranks.end(time.time())
        self._slow_ranks = SlowRanks(self._record.slow)
        self._has_stacks = False
        self._last: WorkerStatuses = {}
        self._errors: WorkerStatuses = {}
        logger.debug(f"start {generation} of the scripts")

    def _end(self, reason: Reason, end_at: float, reclaimed: tuple[int, ...] = ()) -> None:
        """End the scripts of this start until a time (Unix time), and before the run's limit."""
        logger.debug(f"start {self._directive.generation} of the scripts ends: {reason}")
        self._ended_for = reason
        self._state = "ending"
        self._record.starts.end()
        self._slow_ranks.end(time.time())
        action: Literal["end", "abort"] = "abort" if reason == "hung" else "end"
        left = self._limit.end_seconds
        self._ends_at, end_at = time.monotonic() + left, min(end_at, time.time() + left)
        self._direct_to(action=action, end_at=end_at, reclaimed=reclaimed, waits=reason == "limit")

    def _leave(self, group: Group, others_follow: bool) -> None:
        """Let the workers clean up and leave."""
        if not group.ranks:
            return
        leave = replace(self._directive, action="leave", others_follow=others_follow)
        until = time.monotonic() + LEAVE_SECONDS
        with suppress(GroupError):  # they are out of reach
            while time.monotonic() < until:
                statuses = group.poll(leave)
                if all(worker.has_left for worker in statuses.values()):
                    return

    def _direct_to(self, **changes: Any) -> None:
        self._directive = replace(self._directive, **changes)

    def _ask(self, call: Callable[[], T]) -> T:
        """Return what a call of the storage returns; the workers are polled meanwhile, or they would miss the driver.

        Raises:
            OSError: The storage failed, or has not answered in time.
        """

        def poll() -> None:
            with suppress(GroupError):  # the next step finds it
                if self._group:
                    self._group.poll(self._directive)

        return ask(call, poll)

    def _answer_request(self, group: Group, workers: WorkerStatuses) -> None:
        """Store the stacks of a request that the workers have answered, and print where the ranks are.

        The storage may take long: the run goes on, and its next decision does not wait.
        """
        request = self._stacks.request
        places = failure_report.picture_of(workers, group.ranks, self._config, request)
        self._stacks.end()
        answer = partial(self._print_places, request, places, workers)
        self._answer = threading.Thread(target=answer, name="stacks", daemon=True)
        self._answer.start()

    def _print_places(self, request: str, places: Picture, workers: WorkerStatuses) -> None:
        folder = self._store_stacks(places, workers, request, ask)
        if request != SILENT:
            logger.info(f"stacks for ray-on-ecs debug: {places} ({folder})")
            return
        logger.info(
            f"the script has been silent for {places.silent_seconds:.0f} s and has never reported a step, so it runs "
            f"on: {places}; its stacks are in {folder} (--hang-timeout ends a script that is silent for longer)"
        )

    def _store_stacks(
        self, places: Picture, workers: WorkerStatuses, request: str, wait: Callable[[Callable[[], str]], str]
    ) -> str:
        try:
            return wait(lambda: failure_report.store_stacks(places, workers, self._storage, request))
        except Exception as cause:  # of a thread it would be lost
            return f"no place: they could not be stored ({short_reason(cause)})"

    def _mark(self) -> Mark:
        self._restarts.is_known = False

        def look() -> tuple[Kept | None, bool]:
            kept = newest_stored(self._config, self._storage)
            return kept, kept is None and has_stored(self._config, self._storage)

        kept, has_files = self._ask(look)
        self._restarts.kept, self._restarts.has_files, self._restarts.is_known = kept, has_files, True
        stored_at = kept.changed_at.timestamp() if kept else None
        return Mark(self.monitor.step or None, stored_at, kept.name if kept else "", self._restarts.is_beyond)


def _is_read(worker: WorkerStatus) -> bool:
    """Return whether a worker has read the stacks of its script that hangs, or has none to read."""
    return worker.has_ended or worker.started_at is None or (worker.stacks is not None and not worker.stacks.request)


def _are_done(group: Group, workers: WorkerStatuses) -> bool:
    """Return whether all scripts have ended well before they were asked to end."""
    ended = [worker for worker in workers.values() if worker.started_at and worker.has_ended and not worker.is_cut]
    return bool(ended) and len(ended) == len(group.ranks) and not any(worker.status for worker in ended)


def _has_made_step(worker: WorkerStatus, started_at: float) -> bool:
    """Return whether a script has reported or printed a step or a metric since then."""
    if worker.step is not None or worker.extent.first or worker.guess:
        return True
    logged_at = moment(worker.metrics[1].get("time")) if worker.metrics else None  # the last record may be an old one
    return logged_at is not None and logged_at >= started_at
