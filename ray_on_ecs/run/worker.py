"""A worker of a run: it prepares its node, and starts, watches and ends the script as the driver directs.

The driver polls it (run/exchange.py). It is an actor of Ray on a cluster, and threads of the driver's process on one
machine; nothing here knows which.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray_on_ecs import arguments, logs, sdk, secrets
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ScriptError, TrainingError, one_line
from ray_on_ecs.node import notice
from ray_on_ecs.node.labels import instance_id
from ray_on_ecs.node.outage import Outage
from ray_on_ecs.periodic import run_every
from ray_on_ecs.run import collectives, gpu_check, inputs, mount_check, nccl_interface, network, packages, tcp_store
from ray_on_ecs.run.advice import advice
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.environment import AGENT_STORE, ScriptEnvironment
from ray_on_ecs.run.exchange import DRIVER_LOST_SECONDS, Exchange
from ray_on_ecs.run.files.folder import POLL_SECONDS as FOLDER_SECONDS
from ray_on_ecs.run.files.folder import RunFolder
from ray_on_ecs.run.files.node_files import NodeFiles, writers_of
from ray_on_ecs.run.files.scan import TICK_SECONDS, Looks
from ray_on_ecs.run.group import Directive, NetworkStatus, Peer, Place, WorkerRank
from ray_on_ecs.run.launcher import Launcher, Process, Start
from ray_on_ecs.run.local_gpus import gpu_name
from ray_on_ecs.run.metrics import MetricsRecorder, ReportReader
from ray_on_ecs.run.pause import end_paused, paused
from ray_on_ecs.run.process import ProcessOptions, scripts_lock, wait_for_end
from ray_on_ecs.run.stacks import READ_SECONDS, Stacks
from ray_on_ecs.run.supervisor import GRACE_SECONDS, KILL_SECONDS
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.shown_log import cut

logger = logging.getLogger(__name__)

# How often a worker looks after its script.
POLL_SECONDS = 0.1
# The metrics are stored before a snapshot that begins after them: see QUIET_SECONDS of the run's folder.
METRICS_SECONDS = 2.0
READINGS_SECONDS = 1.0  # between two looks for new readings of the collectives
# How long SIGTERM waits for a moment at which the script does not write a file, and the time from a look to the next or
# to the moment: a file that was written before is older than a tick of the disk's clock then, and so counts as whole.
REST_SECONDS, LOOK_SECONDS = 2.0, TICK_SECONDS + 0.01
# How long a worker whose node stops waits for the driver to end the start.
DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """Settings that all workers of a run share.

    Attributes:
        config: The run's settings.
        storage: The run's folder.
        threads: The CPU threads that a worker may use.
        use_gpu: True if each worker has a GPU.
        code: The user's code.
        is_one_node: True if the cluster is a single node.
        run_id: The run's ID, which a run of the same name does not share.
        inputs: The addresses of the inputs by name.
        cluster: The address of the Ray head, or nothing on one machine without Ray.
        launcher: Starts the script.
    """

    config: RunConfig
    storage: RunStorage
    threads: int
    use_gpu: bool
    code: Code
    is_one_node: bool
    run_id: str
    inputs: Mapping[str, str]
    cluster: str
    launcher: Launcher


class Script:
    """One start of the script on this worker; `deadline` is when its node is reclaimed, once the script knows."""

    def __init__(self, process: Process, exchange: Path) -> None:
        self.process = process
        self.deadline: float | None = None
        self.exchange = exchange
        self.reports = ReportReader(exchange)
        # An earlier recommendation needs no save: the script has just read its last checkpoint.
        self._recommendation = notice.of_instance().recommendation
        self._outage = Outage("the notice to the script", seconds=0)

    def tell(self, name: str, text: str) -> bool:
        """Write a file that the script reads (`ray_on_ecs.sdk`); return False if that fails, as with a full disk."""
        part = self.exchange / f"{name}.new"

        def write() -> None:
            part.write_text(text)
            part.rename(self.exchange / name)

        return self._outage.attempt(write, time.monotonic())

    def pass_on_recommendation(self) -> None:
        """Tell the script of a new recommendation of EC2 to replace this instance, after which it saves once."""
        recommendation = notice.of_instance().recommendation
        if recommendation not in ("", self._recommendation) and self.tell(sdk.EXTRA_SAVE, recommendation):
            self._recommendation = recommendation


class ScriptWorker:
    """One worker. `run` is called on one thread, and `poll` of its exchange on others."""

    def __init__(self, settings: Settings, rank: WorkerRank, place: Place) -> None:
        self.exchange = Exchange()
        self._settings = settings
        self._config = settings.config
        self._storage = storage = settings.storage
        self._rank = rank
        self._is_first_of_node = rank.local_rank == 0
        self._place = place
        self._lock = scripts_lock(storage.uri)
        self._run_folder = RunFolder(
            storage,
            settings.code.name,
            rank.node_rank,
            settings.code.place,
            # Otherwise it has the same path on all nodes, since mpirun starts all ranks in its working directory.
            node_id=place.node_id if place.shares_machine else "",
            # On a single node whose storage is a local folder, the script itself may write into the storage.
            is_direct=storage.is_local and settings.is_one_node and rank.local_world_size == rank.world_size,
            exclude=self._config.exclude,
            max_bytes=self._config.keep_gib * 2**30,
            variables={**os.environ, **self._config.variables},
        )
        self._folder = self._run_folder.folder
        self._files: NodeFiles | None = None  # of the first worker of a node, once the scripts begin
        self._recorder: MetricsRecorder | None = None  # of rank 0
        self._store = ExitStack()  # of the process groups of a start
        per_node = self._config.per_node
        is_only_one = rank.world_size == (rank.local_world_size if per_node else 1)
        name = f"node {rank.node_rank}" if per_node else f"rank {rank.rank}"
        # mpirun on rank 0 prints the lines of all ranks.
        self._prefix = "" if is_only_one or self._config.mpi else f"[{name}] "

    def run(self) -> None:
        """Run the script as often as the driver directs. An error becomes the worker's status."""
        try:
            self._run()
        except Exception as error:
            # The exception of a library may not survive the way to the driver.
            is_known = isinstance(error, TrainingError | ScriptError | OSError)
            cause = error if is_known else ScriptError(one_line(repr(error)))
            self.exchange.report(error=cause, where=traceback.format_exc(), has_ended=True, is_stored=True)
        self._store.close()
        self.exchange.report(has_left=True)

    def _run(self) -> None:
        environment = self._prepare_node()
        if self._rank.rank == 0:
            self._recorder = MetricsRecorder(self._config.metrics, self._storage)
        generation = -1
        while True:
            directive = self._next_start(generation)
            self._store.close()  # not before: scripts of other nodes may end later
            logger.debug(f"rank {self._rank.rank}: {directive.action}, start {directive.generation}")
            if directive.action == "leave":
                break
            is_restart, generation = generation >= 0, directive.generation
            self._files = None
            if self._is_first_of_node and is_restart:
                self._reset_folder()
            self.exchange.begin(generation)
            if self._is_first_of_node and is_restart:
                self._leave_if_node_fails(has_run=True)
            self._run_once(environment)
        if self._is_first_of_node and directive.others_follow:
            self._run_folder.keep()
        elif self._is_first_of_node:
            self._run_folder.remove()

    def _prepare_node(self) -> ScriptEnvironment:
        """Bring the code, the packages, the secrets and the inputs to this node."""
        self._storage.check_shared()
        # Only into the script's environment: Ray's dashboard shows the environment that Ray gives its processes.
        values = secrets.read_on_node(self._config.secret, self._storage.uri)
        logs.mask_by(secrets.Masker(values.values()))
        if self._is_first_of_node:
            self._reset_folder()
        python = self._install_packages(values)
        self._leave_if_node_fails(has_run=False)
        fetched = {f"{arguments.INPUT}{name}": inputs.fetch(at) for name, at in self._settings.inputs.items()}
        return ScriptEnvironment(
            config=self._config,
            storage=self._storage,
            run_id=self._settings.run_id,
            folder=self._folder,
            python=python,
            secrets=values,
            inputs=fetched,
            git=self._settings.code.git,
            cluster=self._settings.cluster,
        )

    def _install_packages(self, secret_values: dict[str, str]) -> str:
        """Return a Python interpreter with the packages of --requirements, in the versions that all workers have."""
        name = self._config.requirements_in_folder
        if name is None:
            return sys.executable
        code, variables = self._settings.code, self._config.variables
        requirements = packages.Requirements(self._folder, name, code.archive, variables, secret_values, code.version)
        if self._rank.rank == 0:
            requirements.resolve(self._storage)
        self.exchange.report(is_prepared=True)
        while not self.exchange.directive.is_prepared:
            if self.exchange.directive.action == "leave":  # another worker has failed
                raise ScriptError("the run ended before its packages were resolved")
            self._wait(1.0)
        python = requirements.install(packages.Resolution(**self._storage.read_json(layout.PACKAGES)))
        if self._is_first_of_node:
            self._run_folder.ignore_new()  # of packages that were built in the folder
        return python

    def _wait(self, seconds: float) -> None:
        """Wait for the driver's next poll.

        Raises:
            ScriptError: The driver is lost.
        """
        self.exchange.wait(seconds)
        if self.exchange.has_lost_driver:
            raise ScriptError(f"the driver has not answered for {DRIVER_LOST_SECONDS:.0f} s")

    def _next_start(self, generation: int) -> Directive:
        """Wait for the directive to start the script after this generation, or to leave."""
        while True:
            directive = self.exchange.directive
            if directive.action == "leave" or directive.generation > generation:
                return directive
            if self._files:
                self._files.commit_last()
            self._wait(1.0)

    def _run_once(self, environment: ScriptEnvironment) -> None:
        """Meet the other workers, run the script to its end, and store what it leaves."""
        if self._recorder:
            self._recorder.log.restart()
        store = self._serve_store(environment.python)
        with socket.socket() as listener:
            # It holds a free port for the script, and lets the measurement, which sets this too, listen there before.
            listener.bind(("", 0))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # No script starts before every node has its files.
            is_to_start = self._meet(listener.getsockname()[1], store) and self._measure_network(environment)
        if is_to_start:  # at once: another process can take the port until the script listens to it
            if self._is_first_of_node or not self._config.per_node:
                self._run_script(environment)
            else:  # the first worker's program uses this one's GPU
                self.exchange.report(started_at=time.time(), status=0, silent_seconds=math.inf)
        self.exchange.report(has_ended=True)
        if self._files:
            self._files.store_last()
        self.exchange.report(is_stored=True)

    def _serve_store(self, python: str) -> tuple[str, int] | None:
        """Serve the store of the process groups of several workers, on rank 0; return its address.

        A single worker's script serves its own, as under python, also at a port of its choice; so does a program of
        --per-node, and a script for which the user says so.
        """
        ranks, per_node = self._rank.world_size, self._config.per_node
        is_own = ranks == 1 or per_node or self._config.variables.get(AGENT_STORE, "True") != "True"
        if is_own or self._rank.rank != 0:
            return None
        host = tcp_store.HOST if self._rank.local_world_size == ranks else self._place.host
        return self._store.enter_context(tcp_store.serving(python, ranks, host))

    def _meet(self, port: int, store: tuple[str, int] | None) -> bool:
        """Wait for all workers; return False if the driver has something else in mind."""
        host = self._place.host
        peer = Peer(host, port, self._rank.node_rank, nccl_interface.network_of(host), store)
        self.exchange.report(peer=peer, hardware=self._hardware())
        while self.exchange.is_to_run:
            if self.exchange.directive.peers:
                return True
            self._wait(1.0)
        return False

    def _measure_network(self, environment: ScriptEnvironment) -> bool:
        """Measure the network while the driver wants that; return False if it has something else in mind."""
        exchange, settings = self.exchange, self._settings
        if exchange.directive.measures:
            part = network.part_of(self._rank, exchange.directive.peers, use_gpu=settings.use_gpu)
            try:
                with network.probing(part, environment, self._lock) as probe:
                    while exchange.is_to_run and exchange.directive.measures:
                        exchange.report(network=probe.look(POLL_SECONDS))
                        if exchange.status.network and exchange.status.network.has_ended:
                            break
            except OSError as cause:
                exchange.report(network=NetworkStatus(failure=one_line(cause), has_ended=True))
            while exchange.is_to_run and exchange.directive.measures:
                self._wait(1.0)
        return exchange.is_to_run

    def _hardware(self) -> dict[str, Any] | None:
        """Return the run's hardware, from rank 0; a Ray program starts the workers itself."""
        if self._rank.rank != 0 or self._config.driver:
            return None
        return {
            "workers": self._rank.world_size,
            "device": gpu_name() if self._settings.use_gpu else "CPU",
            "threads_per_worker": self._settings.threads,
            "node_cpus": os.cpu_count(),
        }

    def _run_script(self, environment: ScriptEnvironment) -> None:
        """Run the script to its end."""
        peers, resumes = self.exchange.directive.peers, self.exchange.directive.resumes
        if self._is_first_of_node:
            self._files = NodeFiles(self._storage, self._run_folder, self.exchange, peers, self._rank.node_rank)
        with tempfile.TemporaryDirectory(prefix="ray-on-ecs-") as folder:
            start = Start(
                config=self._config.resumed() if resumes else self._config,
                rank=self._rank,
                peers=peers,
                number=self.exchange.status.generation,
                threads=self._settings.threads,
                environment=environment,
                exchange=Path(folder),
            )
            with self._start(start) as process:
                script = Script(process, start.exchange)
                logger.debug(f"rank {self._rank.rank}: the script has been started in {self._folder}")
                self.exchange.report(started_at=time.time())
                with run_every(FOLDER_SECONDS, self._files.store, "run folder") if self._files else nullcontext():
                    self._look_after(script)
                    self._end(script)
                    self._wait_for_node(script)
                self._take_reports(script)
            self._settings.launcher.look(process, start.exchange)
            logger.debug(f"rank {self._rank.rank}: the script has ended with {self.exchange.status.status}")
            if self._recorder:
                self._recorder.write(is_last=True)
                self.exchange.report(**self._recorder.report)

    def _start(self, start: Start) -> Process:
        launcher, environment = self._settings.launcher, start.environment
        variables = environment.variables(launcher.variables(start), start.exchange)
        mask = secrets.Masker(environment.secrets.values())
        options = ProcessOptions(variables, self._folder, self._on_line, self._lock, mask, self._on_state)
        return launcher.process(start, options)

    def _reset_folder(self) -> None:
        # The script of an earlier worker on this node may have its last seconds.
        wait_for_end(self._lock, GRACE_SECONDS + KILL_SECONDS)
        self._run_folder.reset()

    def _leave_if_node_fails(self, *, has_run: bool) -> None:
        """Wait for the end of this start if this node stops; the driver looks for draining nodes every second.

        `ray-worker` has checked the GPUs before the first script.
        """
        stops = has_run and self._settings.use_gpu and gpu_check.stop_node_if_gpus_fail()
        if stops or mount_check.stop_node_if_mounts_fail(asks=self._is_first_of_node):
            waits_until = time.monotonic() + DRAIN_SECONDS
            while self.exchange.directive.action == "run" and time.monotonic() < waits_until:
                self._wait(1.0)

    def _look_after(self, script: Script) -> None:
        """Look after the script until it has ended and all of its node have, or the driver wants it to end."""
        exchange, process = self.exchange, script.process
        next_metrics = next_notice = next_reading = 0.0
        while exchange.is_to_run and not exchange.status.has_ended:
            if process.wait(POLL_SECONDS) is not None and not process.has_ended(exchange.directive):
                time.sleep(POLL_SECONDS)  # the daemon of mpirun has ended, and mpirun has not
            self._take_reports(script)
            self._settings.launcher.look(process, script.exchange)
            if self._recorder and time.monotonic() >= next_metrics:
                self._recorder.write()
                next_metrics = time.monotonic() + METRICS_SECONDS
            if time.monotonic() >= next_notice:
                script.pass_on_recommendation()
                next_notice = time.monotonic() + notice.POLL_SECONDS
            if time.monotonic() >= next_reading:
                exchange.report(readings=collectives.readings(script.exchange))
                next_reading = time.monotonic() + READINGS_SECONDS
            self._report_script(process)
            wanted, known = exchange.directive.stacks, exchange.status.stacks
            if wanted and (known is None or known.request != wanted):
                exchange.report(stacks=self._stacks(script, wanted))

    def _stacks(self, script: Script, request: str = "") -> Stacks:
        """Read the script's stacks."""
        instance, host = instance_id(), self._place.host
        node = ", ".join(name for name in (instance, host) if name and host != Place.host)
        joined = collectives.last(script.exchange)
        return Stacks(request, script.process.dump(), node=node, joined=joined)

    def _report_script(self, process: Process) -> None:
        """Report how the script is doing, and pass on what the driver says of the others."""
        exchange = self.exchange
        process.learn(exchange.directive)
        has_ended = exchange.status.has_ended or process.has_ended(exchange.directive)
        of_recorder = self._recorder.report if self._recorder else {}
        described = process.describe()
        if words := described.get("words"):
            mends = advice(words.text, self._folder, self._config.variables)
            described["words"] = replace(words, advice=mends)
        exchange.report(**described, **of_recorder, pid=process.pid, has_ended=has_ended)

    def _end(self, script: Script) -> None:
        """End the script: by SIGTERM until the driver's deadline, or by SIGABRT, which leaves its stacks.

        A script with a Checkpointer, or that polls `seconds_left`, saves when its node is reclaimed, and only gets
        SIGTERM in the last seconds; so does any script if the run's limit is reached.
        """
        exchange, process = self.exchange, script.process
        if exchange.status.has_ended:
            return
        directive = exchange.directive
        if directive.generation == exchange.status.generation and directive.action == "abort":
            read = self._stacks(script)
            exchange.report(stacks=read)
            ends_at = time.monotonic() + READ_SECONDS
            while not exchange.directive.are_read and time.monotonic() < ends_at:  # a worker may have been lost
                time.sleep(POLL_SECONDS)
            exchange.report(stacks=replace(read, words=process.stacks()))
        else:
            ends_at = partial(self._ends_at, script, time.time() + GRACE_SECONDS)
            grace = min(GRACE_SECONDS, (ends_at() - time.time()) / 2)  # of a short notice, half is for a save
            if script.deadline and (directive.waits or (script.exchange / sdk.CHECKPOINTER).exists()):
                self._wait_for_end(script, lambda: ends_at() - grace)
            with self._pause_at_rest(script, ends_at()):
                has_ended = process.has_ended(exchange.directive)
                exchange.report(is_cut=not has_ended or (script.exchange / sdk.TOLD).exists())
                process.terminate()
            self._wait_for_end(script, ends_at)
        if not process.has_ended(exchange.directive):
            process.kill()
        self._report_script(process)
        exchange.report(has_ended=True)

    def _ends_at(self, script: Script, without_driver: float) -> float:
        """Return when the script gets SIGKILL (Unix time), and tell it if its node is reclaimed then.

        The driver may bring the time forward; `without_driver` is for a worker that has lost it.
        """
        directive = self.exchange.directive
        if directive.generation != self.exchange.status.generation or directive.action != "end":
            return without_driver
        is_new = bool(directive.reclaimed) and script.deadline != directive.end_at
        if is_new and script.tell(sdk.DEADLINE, str(directive.end_at)):
            script.deadline = directive.end_at
        return directive.end_at

    def _wait_for_end(self, script: Script, until: Callable[[], float]) -> None:
        """Wait until the script has ended, or until a time (Unix time)."""
        looked_at, looks = 0.0, Looks()
        while time.time() < until() and not script.process.has_ended(self.exchange.directive):
            if looks.are_due:
                with looks.measured():
                    now, is_at_rest = time.time(), self._is_at_rest(script)
                if is_at_rest and looked_at:  # a process that is killed closes its files before it has ended
                    self.exchange.report(rested_at=looked_at)
                looked_at = now if is_at_rest else 0.0
            script.process.wait(POLL_SECONDS)
            self._take_reports(script)
            self._report_script(script.process)

    @contextmanager
    def _pause_at_rest(self, script: Script, until: float) -> Generator[None]:
        """Pause the script, for a block that sends SIGTERM, when it has no file open for writing; wait for it a moment.

        A script without a handler then ends at once, so that its files are whole.
        """
        until = min(until, time.time() + REST_SECONDS)
        while script.process.wait(LOOK_SECONDS) is None and time.time() < until:
            with paused(writers_of([script.process.pid]) or []) as held:
                # A process that began meanwhile is not held.
                if not held or held != writers_of([script.process.pid]) or not self._run_folder.is_at_rest(held):
                    continue
                time.sleep(LOOK_SECONDS)
                self.exchange.report(rested_at=time.time())
                yield
                if end_paused(held):
                    self.exchange.report(rested_at=math.inf)  # nothing was written since, by any of them
                return
        yield

    def _is_at_rest(self, script: Script) -> bool:
        writers = writers_of([script.process.pid])
        return writers is not None and self._run_folder.is_at_rest(writers)

    def _wait_for_node(self, script: Script) -> None:
        """Wait, on the first worker of a node, until the scripts of all its workers have ended."""
        self._report_script(script.process)
        while self._is_first_of_node and self._rank.node_rank not in self.exchange.directive.ended:
            if self.exchange.has_lost_driver:
                return
            self.exchange.wait(1.0)
            script.process.learn(self.exchange.directive)

    def _take_reports(self, script: Script) -> None:
        for report in script.reports.read_new():
            script.process.heard()
            if self._recorder:
                self._recorder.log.take_report(report)

    def _on_line(self, line: str) -> None:
        # Cut here, too: Ray reads what is written of a line so far, and would hand on a long one in parts.
        # And in one piece: with --local the lines of all ranks come from threads of one process.
        sys.stdout.write(cut(self._prefix + line.removesuffix("\n")) + "\n")
        sys.stdout.flush()

    def _on_state(self, line: str) -> None:
        if self._recorder:
            self._recorder.read_line(line)
