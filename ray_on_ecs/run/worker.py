"""Train function of a script's worker: it starts the script, watches it, and restarts it when the driver directs."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import psutil
import ray

from ray_on_ecs import sdk, secrets
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ScriptError, one_line
from ray_on_ecs.node_folder import node_folder
from ray_on_ecs.periodic import run_every
from ray_on_ecs.run import gpu_check, inputs, mpi, nccl_interface, packages, worker_dump
from ray_on_ecs.run.code import Code
from ray_on_ecs.run.environment import NOT_A_DRIVER, OF_EVERY_RANK, WorkerEnvironment, without_ray
from ray_on_ecs.run.group import Directive, FilesStatus, WorkerStatus
from ray_on_ecs.run.metrics import MetricsLog, ReportReader, tracker_url
from ray_on_ecs.run.mpi import MpiNode, MpiRun
from ray_on_ecs.run.process import ScriptProcess, wait_for_end
from ray_on_ecs.run.run_folder import POLL_SECONDS as FOLDER_SECONDS
from ray_on_ecs.run.run_folder import RunFolder
from ray_on_ecs.run.snapshot_rounds import SnapshotRounds
from ray_on_ecs.run.stop import SIGNALLED
from ray_on_ecs.run.supervisor import GRACE_SECONDS, KILL_SECONDS
from ray_on_ecs.run.worker_rank import WorkerRank
from ray_on_ecs.tracking.records import RecordFile, merge_records, read_records
from ray_on_ecs.tracking.run_actor import Progress, RunClient
from ray_on_ecs.tracking.shown_log import cut
from ray_on_ecs.tracking.storage import RunStorage

# How often a worker looks after its script; how often it talks to the run's actor while the script runs, and while it
# waits for the others or for the driver.
POLL_SECONDS = 0.1
TALK_SECONDS = 0.5
WAIT_SECONDS = 0.05
# The metrics are stored before a snapshot that begins after them: see QUIET_SECONDS of the run's folder.
METRICS_SECONDS = 2.0
# How long a worker whose node stops waits for the driver to end the start.
DRAIN_SECONDS = 30.0
# The driver counts as lost when its actor has not answered for so long.
LOST_SECONDS = 60.0

# W&B's variables of a run's ID and of resuming it, and the most characters of the former.
WANDB = ("WANDB_RUN_ID", "WANDB_RESUME")
WANDB_LENGTH = 64

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


def run_script(settings: Settings) -> dict[str, Any]:
    """Run the script until the driver lets the workers leave.

    Returns:
        On rank 0 the hardware, and when its script was first started.

    Raises:
        ScriptError: The driver is lost.
        UsageError: The script can't be started.
    """
    with ScriptWorker(settings, WorkerRank.of_ray_train()) as worker:
        return worker.run()


class ScriptWorker:
    """One worker; a context.

    Args:
        settings: Those of the driver.
        rank: The worker's place among the others.
    """

    def __init__(self, settings: Settings, rank: WorkerRank) -> None:
        self._config = settings["config"]
        self._settings = settings
        self._actor = settings["run_actor"]
        self._storage = storage = settings["storage"]
        self._place = rank
        self._rank, self._local_rank = rank.rank, rank.local_rank
        self._world_size, self._node_rank = rank.world_size, rank.node_rank
        self._group = rank.broadcast(uuid.uuid4().hex)
        address, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        network = nccl_interface.network_of(address)
        self._blank = WorkerStatus(
            address, 0, self._node_rank, self._world_size, node, os.getpid(), network, generation=-1
        )
        self._member = self._blank
        self._members: dict[int, WorkerStatus] = {}
        self._directive: Directive | None = None
        self._unheard_since: float | None = None
        self._file = worker_dump.worker_file(storage.uri, self._rank)
        self._lock = node_folder("scripts", storage.uri)
        code = settings["code"]
        # On a single node whose storage is a local folder, the script itself may write into the storage.
        is_direct = storage.is_local and settings["is_one_node"] and rank.local_world_size == self._world_size
        self._run_folder = RunFolder(
            storage,
            code.name,
            self._node_rank,
            code.place,
            node_id=node if _shares_machine(node) else "",
            is_direct=is_direct,
            exclude=self._config.exclude,
            max_bytes=self._config.keep_gib * 2**30,
        )
        self._folder = self._run_folder.folder
        self._rounds: SnapshotRounds | None = None
        self._left_out: tuple[str, ...] = ()
        self._metrics: MetricsLog | None = None
        self._record_file: RecordFile | None = None
        self._shown: tuple[int, dict[str, Any]] | None = None
        self._shown_guess: dict[str, Any] = {}
        self._first_started_at: float | None = None
        # mpirun on rank 0 prints the lines of all ranks.
        self._prefix = f"[rank {self._rank}] " if self._world_size > 1 and not self._config.mpi else ""

    def __enter__(self) -> ScriptWorker:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(worker_dump.about_worker(self._rank)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._file.unlink(missing_ok=True)
            if self._local_rank == 0:
                self._run_folder.remove()

    def run(self) -> dict[str, Any]:
        """Prepare the node, and run the script as often as the driver directs."""
        self._talk()  # what follows may take long, and the driver ends workers that do not begin
        self._storage.check_shared()
        # Only into the script's environment: Ray's dashboard shows the environment that Ray gives its processes.
        self._secrets = secrets.read_on_node(self._config.secret, self._storage.uri)
        self._mask = secrets.masker(self._secrets.values())
        if self._local_rank == 0:
            self._reset_folder()
        self._python = self._install_packages()
        self._fetched = {
            f"{inputs.VARIABLE_PREFIX}{name}": inputs.fetch(each) for name, each in self._settings["inputs"].items()
        }
        if self._rank == 0:
            self._metrics = MetricsLog(self._config.metrics, read_records(self._storage))
            self._record_file = RecordFile(self._storage)
        generation = -1
        is_restart = False
        while (directive := self._next_start(generation)).action != "leave":
            generation = directive.generation
            self._member, self._rounds = replace(self._blank, generation=generation), None
            if self._local_rank == 0 and is_restart:
                self._reset_folder()
                self._leave_if_gpus_fail()
            is_restart = True
            self._run_once(generation)
        return {"hardware": self._hardware(), "started_at": self._first_started_at} if self._rank == 0 else {}

    def _install_packages(self) -> str:
        """Return a Python interpreter with the packages of --requirements, in the versions that all workers have."""
        if (name := self._config.requirements_in_folder) is None:
            return sys.executable
        requirements = packages.Requirements(self._folder, name, self._config.variables, self._secrets)
        resolved = requirements.resolve(self._storage) if self._rank == 0 else None
        python = requirements.install(self._place.broadcast(resolved))
        self._place.wait_for_others()
        if self._local_rank == 0:
            self._run_folder.ignore_new()  # of packages that were built in the folder
        return python

    def _next_start(self, generation: int) -> Directive:
        """Wait for the directive to start the script after this generation, or to leave."""
        while True:
            directive = self._talk()
            if directive and (directive.action == "leave" or directive.generation > generation):
                return directive
            if self._is_alone:
                raise ScriptError(f"the driver has not answered for {LOST_SECONDS:.0f} s")
            time.sleep(WAIT_SECONDS)

    def _run_once(self, generation: int) -> None:
        """Meet the other workers, run the script to its end, and store what it leaves."""
        if self._metrics:
            self._metrics.restart()
        if not self._meet():  # no script starts before every node has its files
            self._tell_stored()
            return
        if self._local_rank == 0:
            nodes = len({each.node_rank for each in self._members.values()})
            self._rounds = SnapshotRounds(
                self._storage, self._run_folder, self._node_rank, nodes, f"{self._group}-{generation}"
            )
        with tempfile.TemporaryDirectory(prefix="ray-on-ecs-") as folder:
            self._exchange = folder
            self._reports = ReportReader(Path(folder))
            self._deadline_file = Path(folder) / sdk.DEADLINE
            with self._start(Path(folder)) as process:
                self._process = process
                started_at = time.time()
                self._first_started_at = self._first_started_at or started_at
                self._member = replace(self._member, started_at=started_at)
                with run_every(FOLDER_SECONDS, self._store, "run folder"):
                    self._look_after(process)
                    self._end(process)
                    self._wait_for_node(process)
                self._take_reports()
            if self._metrics:
                self._write_metrics(is_last=True)
                self._report_progress()
        self._store_last()
        self._tell_stored()

    def _reset_folder(self) -> None:
        # The script of an earlier worker on this node may have its last seconds.
        wait_for_end(self._lock, GRACE_SECONDS + KILL_SECONDS)
        self._run_folder.reset()

    def _leave_if_gpus_fail(self) -> None:
        """Wait for the end of this start if this node stops; the driver looks for draining nodes every second."""
        if self._settings["use_gpu"] and gpu_check.stop_node_if_gpus_fail():
            waits_until = time.monotonic() + DRAIN_SECONDS
            while self._is_to_run and time.monotonic() < waits_until:
                self._talk()
                time.sleep(WAIT_SECONDS)

    def _meet(self) -> bool:
        """Choose a port and wait for all workers; return False if the driver has something else in mind.

        The script starts right after this, because another process can take the port until the script listens to it.
        """
        with socket.socket() as held:
            held.bind(("", 0))
            self._member = replace(self._member, port=held.getsockname()[1])
            while self._is_to_run:
                self._talk(wants_members=True)
                ports = [member.port for member in self._members.values()]
                if len(ports) == self._world_size and all(ports):
                    return True
                time.sleep(WAIT_SECONDS)
        return False

    @property
    def _is_to_run(self) -> bool:
        """True while the driver wants the script of this generation to run."""
        directive = self._directive
        is_of_now = directive is not None and directive.generation == self._member.generation
        return directive is not None and is_of_now and directive.action == "run" and not self._is_alone

    @property
    def _is_alone(self) -> bool:
        """True once the driver is lost."""
        return self._unheard_since is not None and time.monotonic() - self._unheard_since > LOST_SECONDS

    @property
    def _node(self) -> list[WorkerStatus]:
        """The workers of this node."""
        others = {rank: each for rank, each in self._members.items() if each.node_rank == self._node_rank}
        return list((others | {self._rank: self._member}).values())

    def _talk(self, wants_members: bool = False) -> Directive | None:
        """Tell how the script is doing; return the driver's directive to this group, if there is one."""
        files = self._rounds.status if self._rounds else None
        member = replace(self._member, files=files)
        answer = self._actor.update(self._group, self._rank, member, wants_members or self._config.mpi)
        if answer is None:
            self._unheard_since = self._unheard_since or time.monotonic()
            return None
        self._unheard_since = None
        directive, members = answer
        generation = self._member.generation
        self._members |= {rank: each for rank, each in members.items() if each.generation == generation}
        self._members = {rank: each for rank, each in self._members.items() if each.generation == generation}
        if directive is None or directive.group != self._group:
            return None
        self._directive = directive
        return directive

    @property
    def _argv(self) -> tuple[str, ...]:
        return self._config.argv(self._python)

    def _start(self, folder: Path) -> Process:
        """Start the script, or with --mpi what this worker has to do with its start."""
        variables = self._variables(folder)
        output = (self._on_line, self._lock, self._mask)
        if not self._config.mpi:
            return ScriptProcess(self._argv, variables, self._folder, *output)
        if self._rank != 0:
            node = self._node_rank if self._local_rank == 0 else None
            return MpiNode(node, variables, self._folder, *output)
        ranks = Counter(each.node_rank for each in self._members.values())
        exchange = folder / "mpi"
        exchange.mkdir()
        workers = [ranks[node] for node in range(len(ranks))]
        networks = sorted({each.network for each in self._members.values() if each.network})
        where = {"workers": workers, "address": self._member.host, "networks": networks, "exchange": exchange}
        argv = self._config.argv(self._python, mpi.runner(self._python))
        return MpiRun(argv, variables, self._folder, *output, **where)

    def _variables(self, folder: Path) -> dict[str, str]:
        """Return the script's environment: this process's without Ray's, and what its launcher would set."""
        programs = [str(Path(each).parent) for each in (self._python, sys.executable)]  # of the packages
        cluster = ray.get_runtime_context().gcs_address
        base = without_ray(os.environ)
        users = {**base, **self._config.variables, **self._secrets}
        return {
            **base,
            **self._of_tracker(users),
            **nccl_interface.variables(cluster.rpartition(":")[0], base),
            "RAY_ADDRESS": cluster,
            "PATH": os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)]),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            **self._of_launcher(),
            "RUN_NAME": self._storage.run_name,
            "RUN_DIR": str(self._folder),
            "RUN_URI": self._storage.uri,
            **self._config.git,
            sdk.FOLDER_VARIABLE: str(folder),
            **self._fetched,
            **self._config.variables,
            **self._secrets,
        }

    def _of_tracker(self, users: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with which `wandb.init()` continues a W&B run after restarts, unless the user sets them.

        Only rank 0's: ranks with one ID would write into one run of W&B, and mpirun's ranks share their variables.
        https://docs.wandb.ai/models/runs/resuming
        """
        if self._rank != 0 or self._config.mpi or any(name in users for name in WANDB):
            return {}
        return dict(zip(WANDB, (wandb_id(self._storage.run_name, self._settings["run_id"]), "allow"), strict=True))

    def _of_launcher(self) -> dict[str, str]:
        """Return the variables of a worker of torchrun, and what ends a Ray program that is started on every worker."""
        members = self._members
        worker = WorkerEnvironment(
            **asdict(self._place),
            nodes=len({each.node_rank for each in members.values()}),
            max_world_size=max(self._place.world_size, *(self._config.workers or ())),
            run_name=self._storage.run_name,
            attempt=self._member.generation,
            max_restarts=self._config.max_restarts,
            threads=self._settings["threads"],
        )
        variables = worker.variables([(each.host, each.port) for _, each in sorted(members.items())])
        if self._config.mpi:
            variables = {name: variables[name] for name in OF_EVERY_RANK}
        return variables if self._config.no_driver else {**variables, **NOT_A_DRIVER}

    def _look_after(self, process: Process) -> None:
        """Look after the script until it has ended and all of its node have, or the driver wants it to end."""
        next_talk = next_metrics = 0.0
        reported_step: int | None = None
        has_told_end = False
        while self._is_to_run and not self._member.has_ended:
            is_idle = process.wait(POLL_SECONDS) is not None
            has_ended = is_idle and process.has_ended(self._members)
            if is_idle and not has_ended:  # the daemon of mpirun has ended, and mpirun has not
                time.sleep(POLL_SECONDS)
            now = time.monotonic()
            self._take_reports()
            if now >= next_metrics and self._metrics:
                self._write_metrics()
                next_metrics = now + METRICS_SECONDS
            if self._metrics and self._metrics.step != reported_step:
                reported_step = self._metrics.step
                self._report_progress()
            if now >= next_talk or (has_ended and not has_told_end):
                next_talk, has_told_end = now + TALK_SECONDS, has_ended
                self._tell(process)
                if self._directive and self._directive.wants_stacks and self._member.stacks is None:
                    self._member = replace(self._member, stacks=process.dump())

    def _tell(self, process: Process) -> None:
        """Tell how the script is doing, and pass on what the others say."""
        has_steps = self._metrics is not None and self._metrics.step is not None
        has_ended = self._member.has_ended or process.has_ended(self._members)
        self._member = replace(process.describe(self._member), has_steps=has_steps, has_ended=has_ended)
        self._talk(wants_members=self._local_rank == 0 and self._world_size > 1)
        process.learn(self._members)

    def _end(self, process: Process) -> None:
        """End the script: by SIGTERM until the driver's deadline, or by SIGABRT, which leaves its stacks.

        A script with a Checkpointer, which saves when its node is reclaimed, only gets SIGTERM in the last seconds.
        """
        if self._member.has_ended:
            return
        directive = self._directive
        if directive and directive.action == "abort":
            self._member = replace(self._member, stacks=process.stacks())
        else:
            end_at = directive.end_at if directive and directive.action == "end" else time.time() + GRACE_SECONDS
            if directive and directive.ranks:
                part = self._deadline_file.with_suffix(".new")
                part.write_text(str(end_at))
                part.rename(self._deadline_file)
                if self._deadline_file.with_name(sdk.CHECKPOINTER).exists():
                    self._wait_for_end(process, end_at - GRACE_SECONDS)
            process.terminate()
            self._wait_for_end(process, end_at)
        if not process.has_ended(self._members):
            process.kill()
        self._member = replace(self._member, has_ended=True)

    def _wait_for_end(self, process: Process, until: float) -> None:
        """Wait until the script has ended, or until a time (Unix time)."""
        while time.time() < until and not process.has_ended(self._members):
            process.wait(POLL_SECONDS)
            self._take_reports()
            if self._config.mpi:  # mpirun waits for the ends of its daemons
                self._tell(process)

    def _wait_for_node(self, process: Process) -> None:
        """Wait, on the first worker of a node, until the scripts of all its workers have ended."""
        self._tell(process)
        while self._local_rank == 0 and not all(each.has_ended for each in self._node) and not self._is_alone:
            time.sleep(POLL_SECONDS)
            self._tell(process)

    def _tell_stored(self) -> None:
        self._member = replace(self._member, has_ended=True, is_stored=True)
        self._talk()

    def _store(self) -> None:
        """Store the files of this node that are complete; its first worker does so."""
        if self._rounds is None or self._was_killed:
            return
        try:
            self._rounds.poll(self._files, _descendants([each.pid for each in self._node]))
            self._tell_left_out()
        except Exception as cause:  # the thread continues
            print(f"files could not be stored, and will be tried again ({one_line(cause)})", flush=True)

    def _tell_left_out(self) -> None:
        left_out = self._run_folder.part.left_out
        if left_out and left_out != self._left_out:
            print(f"not kept: {', '.join(left_out)}; --keep-gib keeps more, --exclude keeps files out", flush=True)
        self._left_out = left_out

    def _store_last(self) -> None:
        """Store the last files of the node, and on the first node the last snapshot, unless a script was killed."""
        if self._rounds is None or self._was_killed:
            return
        try:
            self._rounds.finish()
            while self._node_rank == 0 and not self._rounds.commit_last(self._files):
                self._talk(wants_members=True)
                if self._is_alone or any(map(self._has_no_last_part, self._members.values())):
                    break
                time.sleep(WAIT_SECONDS)
        except Exception as cause:
            self._member = replace(self._member, not_stored=one_line(cause))
        else:
            if outside := self._run_folder.outside:
                print(f"not kept, because it is outside the working directory: {', '.join(outside)}", flush=True)
            if failed := self._run_folder.failed:
                reason = "; ".join(f"{name}: {why}" for name, why in failed.items())
                self._member = replace(self._member, not_stored=reason)

    @property
    def _was_killed(self) -> bool:
        """True if a script of this node was killed, perhaps in the middle of a write."""
        return any(map(self._is_killed, self._node)) or (self._config.mpi and self._is_killed(self._members.get(0)))

    def _is_killed(self, worker: WorkerStatus | None) -> bool:
        """Return whether a worker's script was killed: a shell adds 128 to the signal, and mpirun kills the others."""
        status = worker.status if worker else None
        return status is not None and (status < 0 or status > SIGNALLED or (self._config.mpi and status != 0))

    def _has_no_last_part(self, worker: WorkerStatus) -> bool:
        """Return whether a worker of another node has ended without a last part of its node's files."""
        lacks = worker.is_stored and worker.files is not None and not worker.files.is_last
        return worker.node_rank != self._node_rank and (lacks or self._is_killed(worker))

    @property
    def _files(self) -> dict[int, FilesStatus]:
        """File statuses of the nodes, by their ranks."""
        return {each.node_rank: each.files for each in list(self._members.values()) if each.files}

    def _take_reports(self) -> None:
        for report in self._reports.read_new():
            self._process.heard()
            if self._metrics:
                self._metrics.take_report(report)

    def _on_line(self, line: str) -> None:
        # Cut here, too: Ray reads what is written of a line so far, and would hand on a long one in parts.
        print(cut(self._prefix + line.removesuffix("\n")), flush=True)
        if self._metrics:
            self._metrics.read_line(line)
            if url := tracker_url(line):
                self._actor.report_url(url)

    def _write_metrics(self, is_last: bool = False) -> None:
        if self._metrics is None or self._record_file is None:
            return
        if (guess := self._metrics.guess) and guess != self._shown_guess:
            self._actor.report_guess(guess)
            self._shown_guess = guess
        if (last := self._metrics.last) is None:
            return
        if last != self._shown:
            self._actor.report_metrics(*last)
            self._shown = last
        try:
            self._record_file.write(self._metrics)
            if is_last:
                merge_records(self._storage)
        except OSError as cause:
            print(f"the metrics could not be stored, and will be tried again ({one_line(cause)})", flush=True)

    def _report_progress(self) -> None:
        step = (self._metrics.step if self._metrics else None) or 0
        workers = f"{self._group}-{self._member.generation}"
        self._actor.report(Progress(workers, step))

    def _hardware(self) -> dict[str, Any] | None:
        device = "CPU"
        if self._settings["use_gpu"]:
            import torch  # takes seconds, which no script should wait for

            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "GPU"
        return {
            "workers": self._world_size,
            "device": device,
            "threads_per_worker": self._settings["threads"],
            "node_cpus": psutil.cpu_count(),
        }


def wandb_id(run_name: str, run_id: str) -> str:
    """Return the ID that W&B knows a run by."""
    return f"{run_name[: WANDB_LENGTH - len(run_id) - 1]}-{run_id}"


def _shares_machine(node_id: str) -> bool:
    """Return whether another node of the cluster is on this node's machine.

    Otherwise the run's folder has the same path on all nodes, since mpirun starts all ranks in its working directory.
    """
    hosts = {each["NodeID"]: each["NodeManagerHostname"] for each in ray.nodes() if each["Alive"]}
    return list(hosts.values()).count(hosts.get(node_id, "")) > 1


def _descendants(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Yield the processes that these have started, directly or not."""
    for pid in pids:
        with suppress(psutil.Error):
            yield from psutil.Process(pid).children(recursive=True)
