"""Train function of a script's worker: it starts the script, watches it, and restarts it when the driver directs."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import psutil
import ray

from ray_on_ecs import logs, sdk, secrets
from ray_on_ecs.config import LOCAL_VARIABLE, RunConfig
from ray_on_ecs.errors import ScriptError
from ray_on_ecs.periodic import run_every
from ray_on_ecs.private_folder import node_folder
from ray_on_ecs.run import gpu_check, inputs, local_store, nccl_interface, packages, worker_dump
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.environment import AGENT_STORE, NOT_A_DRIVER, OF_EVERY_RANK, ScriptEnvironment, WorkerEnvironment
from ray_on_ecs.run.files.folder import POLL_SECONDS as FOLDER_SECONDS
from ray_on_ecs.run.files.folder import RunFolder
from ray_on_ecs.run.files.node_files import WAIT_SECONDS, NodeFiles
from ray_on_ecs.run.group import Directive, WorkerStatus
from ray_on_ecs.run.group_member import LOST_SECONDS, GroupMember
from ray_on_ecs.run.local_store import LocalStore
from ray_on_ecs.run.metrics import ReportReader
from ray_on_ecs.run.metrics_recorder import MetricsRecorder
from ray_on_ecs.run.mpi.launcher import MpiNode, MpiRun, runner
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess, wait_for_end
from ray_on_ecs.run.supervisor import GRACE_SECONDS, KILL_SECONDS
from ray_on_ecs.run.worker_rank import WorkerRank
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.run_actor import RunClient
from ray_on_ecs.tracking.shown_log import cut

logger = logging.getLogger(__name__)

# How often a worker looks after its script, and how often it reports to the run's actor while the script runs.
POLL_SECONDS = 0.1
REPORT_SECONDS = 0.5
# The metrics are stored before a snapshot that begins after them: see QUIET_SECONDS of the run's folder.
METRICS_SECONDS = 2.0
# How long a worker whose node stops waits for the driver to end the start.
DRAIN_SECONDS = 30.0

Process = ScriptProcess | MpiNode


class Settings(TypedDict):
    """The argument of `run_script`."""

    config: RunConfig
    storage: RunStorage
    run_actor: RunClient
    threads: int
    use_gpu: bool
    code: Code
    is_one_node: bool
    run_id: str
    inputs: dict[str, str]
    is_waiting: NotRequired[Callable[[], bool]]  # whether a Ray program waits for its workers


class Script:
    """One start of the script on this worker."""

    def __init__(self, process: Process, exchange: Path) -> None:
        self.process = process
        self.exchange = exchange
        self.reports = ReportReader(exchange)


def run_script(settings: Settings) -> dict[str, Any]:
    """Run the script until the driver lets the workers leave.

    Returns:
        On rank 0 the hardware, and when its script was first started.

    Raises:
        ScriptError: The driver is lost.
        UsageError: The script can't be started.
    """
    logs.set_up("", settings["config"].variables)
    with ScriptWorker(settings, WorkerRank.of_ray_train()) as worker:
        return worker.run()


class ScriptWorker:
    """One worker; a context."""

    def __init__(self, settings: Settings, rank: WorkerRank) -> None:
        self._settings = settings
        self._config = settings["config"]
        self._storage = storage = settings["storage"]
        self._rank = rank
        group = rank.broadcast(uuid.uuid4().hex)
        address, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        status = WorkerStatus(
            host=address,
            port=0,
            node_rank=rank.node_rank,
            world_size=rank.world_size,
            node_id=node_id,
            pid=os.getpid(),
            network=nccl_interface.network_of(address),
            generation=-1,
        )
        self._member = GroupMember(settings["run_actor"], group, rank.rank, status)
        self._dump_file = worker_dump.worker_file(storage.uri, rank.rank)
        self._lock = node_folder("scripts", storage.uri)
        code = settings["code"]
        self._run_folder = RunFolder(
            storage,
            code.name,
            rank.node_rank,
            code.place,
            node_id=node_id if _shares_machine(node_id) else "",
            # On a single node whose storage is a local folder, the script itself may write into the storage.
            is_direct=storage.is_local and settings["is_one_node"] and rank.local_world_size == rank.world_size,
            exclude=self._config.exclude,
            max_bytes=self._config.keep_gib * 2**30,
        )
        self._folder = self._run_folder.folder
        self._files = NodeFiles(storage, self._run_folder, self._member, is_mpi=self._config.mpi)
        self._recorder: MetricsRecorder | None = None  # of rank 0
        self._first_started_at: float | None = None
        # mpirun on rank 0 prints the lines of all ranks.
        self._prefix = f"[rank {rank.rank}] " if rank.world_size > 1 and not self._config.mpi else ""

    def __enter__(self) -> ScriptWorker:
        self._dump_file.parent.mkdir(parents=True, exist_ok=True)
        self._dump_file.write_text(json.dumps(worker_dump.about_worker(self._rank.rank)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._dump_file.unlink(missing_ok=True)
            if self._rank.local_rank == 0:
                self._run_folder.remove()

    def run(self) -> dict[str, Any]:
        """Prepare the node, and run the script as often as the driver directs."""
        self._report()  # what follows may take long, and the driver ends workers that do not begin
        environment = self._prepare_node()
        if self._rank.rank == 0:
            self._recorder = MetricsRecorder(self._config.metrics, self._storage, self._settings["run_actor"])
        generation = -1
        is_restart = False
        while True:
            directive = self._next_start(generation)
            logger.debug(f"rank {self._rank.rank}: {directive.action}, start {directive.generation}")
            if directive.action == "leave":
                break
            generation = directive.generation
            self._member.begin(generation)
            self._files.forget()
            if self._rank.local_rank == 0 and is_restart:
                self._reset_folder()
                self._leave_if_gpus_fail()
            is_restart = True
            self._run_once(environment)
        if self._rank.rank != 0:
            return {}
        return {"hardware": self._hardware(), "started_at": self._first_started_at}

    def _prepare_node(self) -> ScriptEnvironment:
        """Bring the code, the packages, the secrets and the inputs to this node."""
        self._storage.check_shared()
        # Only into the script's environment: Ray's dashboard shows the environment that Ray gives its processes.
        values = secrets.read_on_node(self._config.secret, self._storage.uri)
        logs.mask_by(secrets.Masker(values.values()))
        if self._rank.local_rank == 0:
            self._reset_folder()
        python = self._install_packages(values)
        sources = self._settings["inputs"]
        return ScriptEnvironment(
            config=self._config,
            storage=self._storage,
            run_id=self._settings["run_id"],
            folder=self._folder,
            python=python,
            secrets=values,
            inputs={f"{inputs.VARIABLE_PREFIX}{name}": inputs.fetch(source) for name, source in sources.items()},
            git=self._settings["code"].git,
        )

    def _install_packages(self, secret_values: dict[str, str]) -> str:
        """Return a Python interpreter with the packages of --requirements, in the versions that all workers have."""
        name = self._config.requirements_in_folder
        if name is None:
            return sys.executable
        requirements = packages.Requirements(self._folder, name, self._config.variables, secret_values)
        resolved = requirements.resolve(self._storage) if self._rank.rank == 0 else None
        python = requirements.install(self._rank.broadcast(resolved))
        self._rank.wait_for_others()
        if self._rank.local_rank == 0:
            self._run_folder.ignore_new()  # of packages that were built in the folder
        return python

    def _next_start(self, generation: int) -> Directive:
        """Wait for the directive to start the script after this generation, or to leave."""
        while True:
            directive = self._report()
            if directive and (directive.action == "leave" or directive.generation > generation):
                return directive
            if self._member.has_lost_driver:
                raise ScriptError(f"the driver has not answered for {LOST_SECONDS:.0f} s")
            time.sleep(WAIT_SECONDS)

    def _run_once(self, environment: ScriptEnvironment) -> None:
        """Meet the other workers, run the script to its end, and store what it leaves."""
        if self._recorder:
            self._recorder.restart()
        with self._serve_store(environment.python) as store:
            if not self._meet(store):  # no script starts before every node has its files
                self._report_stored()
                return
            self._run_script(environment)
        self._files.store_last()
        self._report_stored()

    def _serve_store(self, python: str) -> AbstractContextManager[LocalStore | None]:
        """Return the store of a local run's process group, which rank 0's script would serve to the whole network.

        A single worker has none: its script may start ranks and a store itself, as PyTorch's examples do by `mp.spawn`.
        """
        is_wanted = self._rank.world_size > 1 and AGENT_STORE not in self._config.variables
        serves = is_wanted and self._rank.rank == 0 and LOCAL_VARIABLE in os.environ
        return LocalStore(python) if serves else nullcontext()

    def _run_script(self, environment: ScriptEnvironment) -> None:
        """Run the script to its end."""
        if self._rank.local_rank == 0:
            self._files.begin()
        with tempfile.TemporaryDirectory(prefix="ray-on-ecs-") as folder:
            exchange = Path(folder)
            with self._start(environment, exchange) as process:
                script = Script(process, exchange)
                started_at = time.time()
                logger.debug(f"rank {self._rank.rank}: the script has been started in {self._folder}")
                self._first_started_at = self._first_started_at or started_at
                self._member.status = replace(self._member.status, started_at=started_at)
                with run_every(FOLDER_SECONDS, self._files.store, "run folder"):
                    self._look_after(script)
                    self._end(script)
                    self._wait_for_node(script)
                self._take_reports(script)
            logger.debug(f"rank {self._rank.rank}: the script has ended with {self._member.status.status}")
            if self._recorder:
                self._write_metrics(exchange, is_last=True)
                self._report_progress()

    def _reset_folder(self) -> None:
        # The script of an earlier worker on this node may have its last seconds.
        wait_for_end(self._lock, GRACE_SECONDS + KILL_SECONDS)
        self._run_folder.reset()

    def _leave_if_gpus_fail(self) -> None:
        """Wait for the end of this start if this node stops; the driver looks for draining nodes every second."""
        if self._settings["use_gpu"] and gpu_check.stop_node_if_gpus_fail():
            waits_until = time.monotonic() + DRAIN_SECONDS
            while self._member.is_to_run and time.monotonic() < waits_until:
                self._report()
                time.sleep(WAIT_SECONDS)

    def _meet(self, store: LocalStore | None) -> bool:
        """Choose a port and wait for all workers; return False if the driver has something else in mind.

        The script starts right after this, because another process can take the port until the script listens to it.
        """
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
            self._member.status = replace(self._member.status, port=port, store=store.port if store else 0)
            while self._member.is_to_run:
                self._report(wants_statuses=True)
                ports = [worker.port for worker in self._member.statuses.values()]
                if len(ports) == self._rank.world_size and all(ports):
                    return True
                time.sleep(WAIT_SECONDS)
        return False

    def _report(self, *, wants_statuses: bool = False) -> Directive | None:
        """Report to the run's actor; return the driver's directive to this group, if there is one."""
        return self._member.report(self._files.status, wants_statuses=wants_statuses or self._config.mpi)

    def _argv(self, python: str) -> tuple[str, ...]:
        return self._config.argv(python)

    def _start(self, environment: ScriptEnvironment, exchange: Path) -> Process:
        """Start the script, or with --mpi what this worker has to do with its start."""
        variables = self._variables(environment, exchange)
        mask = secrets.Masker(environment.secrets.values())
        options = ProcessOptions(variables, self._folder, self._on_line, self._lock, mask)
        if not self._config.mpi:
            return ScriptProcess(self._argv(environment.python), options)
        if self._rank.rank != 0:
            return MpiNode(self._rank.node_rank if self._rank.local_rank == 0 else None, options)
        argv = self._config.argv(environment.python, runner(environment.python))
        return MpiRun(argv, options, self._member.statuses, exchange / "mpi")

    def _variables(self, environment: ScriptEnvironment, exchange: Path) -> dict[str, str]:
        """Return the script's environment variables."""
        launcher = environment.wandb_variables(self._rank.rank) | self._launcher_variables()
        return environment.variables(launcher, exchange)

    def _launcher_variables(self) -> dict[str, str]:
        """Return the variables of a worker of torchrun, and what ends a Ray program that is started on every worker."""
        statuses = self._member.statuses
        worker = WorkerEnvironment(
            **asdict(self._rank),
            nodes=len({status.node_rank for status in statuses.values()}),
            max_world_size=max(self._rank.world_size, *(self._config.workers or ())),
            run_name=self._storage.run_name,
            attempt=self._member.status.generation,
            max_restarts=self._config.max_restarts,
            threads=self._settings["threads"],
        )
        store = (local_store.HOST, statuses[0].store) if statuses[0].store else None
        variables = worker.variables([(status.host, status.port) for _, status in sorted(statuses.items())], store)
        if self._config.mpi:
            variables = {name: variables[name] for name in OF_EVERY_RANK}
        return variables if self._config.no_driver else {**variables, **NOT_A_DRIVER}

    def _look_after(self, script: Script) -> None:
        """Look after the script until it has ended and all of its node have, or the driver wants it to end."""
        member, process = self._member, script.process
        next_report = next_metrics = 0.0
        reported_step: int | None = None
        has_reported_end = False
        while member.is_to_run and not member.status.has_ended:
            is_idle = process.wait(POLL_SECONDS) is not None
            has_ended = is_idle and process.has_ended(member.statuses)
            if is_idle and not has_ended:  # the daemon of mpirun has ended, and mpirun has not
                time.sleep(POLL_SECONDS)
            now = time.monotonic()
            self._take_reports(script)
            if self._recorder and now >= next_metrics:
                self._write_metrics(script.exchange)
                next_metrics = now + METRICS_SECONDS
            if self._recorder and self._recorder.step != reported_step:
                reported_step = self._recorder.step
                self._report_progress()
            if now >= next_report or (has_ended and not has_reported_end):
                next_report, has_reported_end = now + REPORT_SECONDS, has_ended
                self._report_script(process)
                if member.directive and member.directive.wants_stacks and member.status.stacks is None:
                    member.status = replace(member.status, stacks=process.dump())

    def _report_script(self, process: Process) -> None:
        """Report how the script is doing, and pass on what the others report."""
        member = self._member
        has_steps = self._recorder is not None and self._recorder.step is not None
        has_ended = member.status.has_ended or process.has_ended(member.statuses)
        member.status = replace(process.describe(member.status), has_steps=has_steps, has_ended=has_ended)
        self._report(wants_statuses=self._rank.local_rank == 0 and self._rank.world_size > 1)
        process.learn(member.statuses)

    def _end(self, script: Script) -> None:
        """End the script: by SIGTERM until the driver's deadline, or by SIGABRT, which leaves its stacks.

        A script with a Checkpointer, which saves when its node is reclaimed, only gets SIGTERM in the last seconds.
        """
        member, process = self._member, script.process
        if member.status.has_ended:
            return
        directive = member.directive
        if directive and directive.action == "abort":
            member.status = replace(member.status, stacks=process.stacks())
        else:
            end_at = directive.end_at if directive and directive.action == "end" else time.time() + GRACE_SECONDS
            if directive and directive.ranks:
                deadline_file = script.exchange / sdk.DEADLINE
                part = deadline_file.with_suffix(".new")
                part.write_text(str(end_at))
                part.rename(deadline_file)
                if (script.exchange / sdk.CHECKPOINTER).exists():
                    self._wait_for_end(script, end_at - GRACE_SECONDS)
            process.terminate()
            self._wait_for_end(script, end_at)
        if not process.has_ended(member.statuses):
            process.kill()
        member.status = replace(member.status, has_ended=True)

    def _wait_for_end(self, script: Script, until: float) -> None:
        """Wait until the script has ended, or until a time (Unix time)."""
        while time.time() < until and not script.process.has_ended(self._member.statuses):
            script.process.wait(POLL_SECONDS)
            self._take_reports(script)
            if self._config.mpi:  # mpirun waits for the ends of its daemons
                self._report_script(script.process)

    def _wait_for_node(self, script: Script) -> None:
        """Wait, on the first worker of a node, until the scripts of all its workers have ended."""
        member = self._member
        self._report_script(script.process)
        if self._rank.local_rank != 0:
            return
        while not all(worker.has_ended for worker in member.on_node) and not member.has_lost_driver:
            time.sleep(POLL_SECONDS)
            self._report_script(script.process)

    def _report_stored(self) -> None:
        self._member.status = replace(self._member.status, has_ended=True, is_stored=True)
        self._report()

    def _take_reports(self, script: Script) -> None:
        for report in script.reports.read_new():
            script.process.heard()
            if self._recorder:
                self._recorder.take_report(report)

    def _on_line(self, line: str) -> None:
        # Cut here, too: Ray reads what is written of a line so far, and would hand on a long one in parts.
        print(cut(self._prefix + line.removesuffix("\n")), flush=True)
        if self._recorder:
            self._recorder.read_line(line)

    def _write_metrics(self, exchange: Path, *, is_last: bool = False) -> None:
        if self._recorder:
            self._recorder.write(is_last=is_last)

    def _report_progress(self) -> None:
        if self._recorder:
            self._recorder.report_progress(f"{self._member.group}-{self._member.status.generation}")

    def _hardware(self) -> dict[str, Any] | None:
        device = "CPU"
        if self._settings["use_gpu"]:
            import torch  # takes seconds, which no script should wait for

            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "GPU"
        return {
            "workers": self._rank.world_size,
            "device": device,
            "threads_per_worker": self._settings["threads"],
            "node_cpus": psutil.cpu_count(),
        }


def _shares_machine(node_id: str) -> bool:
    """Return whether another node of the cluster is on this node's machine.

    Otherwise the run's folder has the same path on all nodes, since mpirun starts all ranks in its working directory.
    """
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    return list(hosts.values()).count(hosts.get(node_id, "")) > 1
