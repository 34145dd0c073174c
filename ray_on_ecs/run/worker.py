"""What Ray Train runs on every worker for a user's script: it starts the script and looks after it until its end."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import psutil
import ray
import ray.train
from ray.train import collective

from ray_on_ecs import sdk
from ray_on_ecs.errors import ScriptError, UsageError, one_line
from ray_on_ecs.periodic import every
from ray_on_ecs.run import inputs, mpi, packages, run_dir, upload, worker_dump
from ray_on_ecs.run.config import ScriptConfig
from ray_on_ecs.run.environment import OF_EVERY_RANK, Worker
from ray_on_ecs.run.group import Member
from ray_on_ecs.run.metrics import MetricsLog, ReportReader
from ray_on_ecs.run.mpi import MpiNode, MpiRun
from ray_on_ecs.run.nccl_interface import network_of
from ray_on_ecs.run.preemption import PREEMPTED, preemption
from ray_on_ecs.run.process import ScriptProcess
from ray_on_ecs.run.rendezvous import Rendezvous
from ray_on_ecs.tracking.records import RecordFile, merge_records, read_records
from ray_on_ecs.tracking.run_state import Progress, RunStateClient
from ray_on_ecs.tracking.storage import RunStorage

# How often a worker looks after its script, and how often it asks what there is to decide.
POLL_SECONDS = 0.1
DECISION_SECONDS = 0.5
METRICS_SECONDS = 5.0
# Exit statuses of a wrong flag, and of a command that isn't there.
USAGE_STATUSES = (2, 126, 127)


class Settings(TypedDict):
    """What the driver passes to `run_script`."""

    config: ScriptConfig
    storage: RunStorage
    run_state: RunStateClient
    rendezvous: Rendezvous
    threads: int
    use_gpu: bool
    requirements: str | None
    inputs: dict[str, str]
    attempt: int


@dataclass(frozen=True)
class Decision:
    """What all workers do next, as rank 0 has decided.

    Attributes:
        action: Go on; end because all scripts have, or one has failed, or none has given a sign of life; or stop the
            scripts because nodes are being reclaimed.
        stop_at: When they are (Unix time).
        ranks: The ranks on these nodes.
    """

    action: Literal["continue", "done", "failed", "stalled", "stop"]
    stop_at: float = 0.0
    ranks: tuple[int, ...] = ()


def run_script(settings: Settings) -> dict[str, Any]:
    """Run the script to its end, once.

    Returns:
        On rank 0 the hardware, or `{"preempted": ranks}` if nodes are being reclaimed.

    Raises:
        ScriptError: The script failed, or hung.
        UsageError: It can't be started.
    """
    with ScriptWorker(settings) as worker:
        return worker.run()


class ScriptWorker:
    """One worker; a context.

    Args:
        settings: What the driver passes.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._config = settings["config"]
        self._storage = storage = settings["storage"]
        self._context = context = ray.train.get_context()
        self._rank = context.get_world_rank()
        self._world_size = context.get_world_size()
        self._group = collective.broadcast_from_rank_zero(uuid.uuid4().hex)
        address = ray.util.get_node_ip_address()
        self._member = Member(address, 0, context.get_node_rank(), network_of(address))
        self._file = worker_dump.worker_file(storage.uri, self._rank)
        self._folder = run_dir.local_folder(storage)
        self._run_folder = run_dir.RunFolder(storage, self._folder, context.get_node_rank() == 0)
        self._metrics: MetricsLog | None = None
        self._record_file: RecordFile | None = None
        self._shown: tuple[int, dict[str, Any]] | None = None

    def __enter__(self) -> ScriptWorker:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(worker_dump.about_worker(self._rank)) + "\n")
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._file.unlink(missing_ok=True)

    def run(self) -> dict[str, Any]:
        """Prepare the node, start the script and look after it."""
        self._storage.check_shared()
        if self._context.get_local_rank() == 0:
            self._run_folder.restore()
        python = packages.python_with(self._settings["requirements"], self._working_folder)
        fetched = {
            f"{inputs.VARIABLE_PREFIX}{name}": inputs.fetch(each) for name, each in self._settings["inputs"].items()
        }
        if self._rank == 0:
            self._metrics = MetricsLog(self._config.metrics, read_records(self._storage))
            self._record_file = RecordFile(self._storage)
        collective.barrier()  # no script before every node has its files
        with tempfile.TemporaryDirectory(prefix="training-sdk-") as folder:
            self._reports = ReportReader(Path(folder))
            self._deadline_file = Path(folder) / sdk.DEADLINE
            variables = {**self._variables(python, fetched), sdk.FOLDER_VARIABLE: folder}
            with self._start(python, variables, Path(folder)) as process:
                self._process = process
                self._started_at = time.time()
                with every(run_dir.STORE_SECONDS, self._store, "run folder"):
                    decision = self._look_after(process)
                    self._end(process, decision)
            return self._conclude(process, decision)

    def _start(self, python: str, variables: dict[str, str], folder: Path) -> ScriptProcess | MpiNode:
        """Start the script, or with --mpi what this worker has to do with its start."""
        if not self._config.mpi:
            return ScriptProcess(self._config.argv(python), variables, self._working_folder, self._on_line)
        if self._rank != 0:
            node = self._member.node_rank if self._context.get_local_rank() == 0 else None
            return MpiNode(node, variables, self._working_folder, self._on_line)
        ranks = Counter(each.node_rank for each in self._members.values())
        exchange = folder / "mpi"
        exchange.mkdir()
        workers = [ranks[node] for node in range(len(ranks))]
        networks = sorted({each.network for each in self._members.values() if each.network})
        where = {"workers": workers, "address": self._member.host, "networks": networks, "exchange": exchange}
        argv = self._config.argv(python, mpi.runner(python))
        return MpiRun(argv, variables, self._working_folder, self._on_line, **where)

    @property
    def _working_folder(self) -> Path:
        """The folder with the code, which Ray has brought to the node of a cluster."""
        uploaded = ray.get_runtime_context().runtime_env.get("working_dir")
        return Path.cwd() / upload.FOLDER if uploaded else self._config.folder

    def _variables(self, python: str, fetched: Mapping[str, str]) -> dict[str, str]:
        """Meet the other workers; return the script's environment with the variables of what was fetched."""
        self._members = members = self._meet()
        worker = Worker(
            rank=self._rank,
            world_size=self._world_size,
            local_rank=self._context.get_local_rank(),
            local_world_size=self._context.get_local_world_size(),
            node_rank=self._context.get_node_rank(),
            nodes=len({each.node_rank for each in members.values()}),
            run_name=self._storage.run_name,
            attempt=self._settings["attempt"],
            max_restarts=self._config.max_restarts,
            threads=self._settings["threads"],
        )
        programs = [str(Path(each).parent) for each in (python, sys.executable)]  # of the packages
        of_worker = worker.variables([(each.host, each.port) for _, each in sorted(members.items())])
        if self._config.mpi:
            of_worker = {name: of_worker[name] for name in OF_EVERY_RANK}
        return {
            **os.environ,
            "PATH": os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)]),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            **of_worker,
            "RUN_DIR": str(self._folder),
            **fetched,
            **self._config.variables,
        }

    def _meet(self) -> dict[int, Member]:
        """Choose a port and wait for all workers of the group; return them by rank.

        The script starts right after this, because another process can take the port until the script listens to it.
        """
        with socket.socket() as held:
            held.bind(("", 0))
            self._member = replace(self._member, port=held.getsockname()[1])
            while True:
                members = self._settings["rendezvous"].update(self._group, self._rank, self._member)
                if len(members) == self._world_size:
                    return members
                time.sleep(POLL_SECONDS)

    def _look_after(self, process: ScriptProcess | MpiNode) -> Decision:
        """Look after the script until there is something else to do; return what."""
        next_decision = next_metrics = 0.0
        reported_step: int | None = None
        while True:
            if process.wait(POLL_SECONDS) is not None:  # other scripts may go on
                time.sleep(POLL_SECONDS)
            now = time.monotonic()
            self._take_reports()
            if now >= next_metrics and self._metrics:
                self._write_metrics()
                next_metrics = now + METRICS_SECONDS
            if self._metrics and self._metrics.step != reported_step:
                reported_step = self._metrics.step
                self._report_progress()
            if now >= next_decision:
                next_decision = now + DECISION_SECONDS
                decision = self._decide(process)
                if decision.action != "continue":
                    return decision

    def _decide(self, process: ScriptProcess | MpiNode) -> Decision:
        """Tell how this script is doing, and return what rank 0 has decided for all."""
        members = self._exchange(process)
        notice = preemption()
        decision = Decision("continue")
        if any(each.status for each in members.values()):
            decision = Decision("failed")
        elif notice:
            decision = Decision("stop", notice.deadline, tuple(notice.ranks))
        elif len(members) == self._world_size:
            if all(each.status is not None for each in members.values()):
                decision = Decision("done")
            elif min(each.silent_seconds for each in members.values()) > self._config.hang_timeout:
                decision = Decision("stalled")
        return collective.broadcast_from_rank_zero(decision)

    def _exchange(self, process: ScriptProcess | MpiNode) -> dict[int, Member]:
        """Tell how this script is doing; return what is known of all workers, by rank."""
        self._member = process.describe(self._member)
        members = self._settings["rendezvous"].update(self._group, self._rank, self._member)
        process.learn(members)
        return members

    def _end(self, process: ScriptProcess | MpiNode, decision: Decision) -> None:
        """End the script as was decided."""
        if decision.action == "stop":
            self._deadline_file.write_text(str(decision.stop_at))
            print(f"nodes are being reclaimed: SIGTERM to rank {self._rank}", flush=True)
            process.terminate()
            has_ended = False
            while time.time() < decision.stop_at and not has_ended:
                has_ended = process.wait(DECISION_SECONDS) is not None
                self._take_reports()
                self._exchange(process)  # mpirun waits for the ends of its daemons
        if decision.action == "stalled":
            with self._file.open("a") as file:
                file.write(process.stacks())

    def _conclude(self, process: ScriptProcess | MpiNode, decision: Decision) -> dict[str, Any]:
        """Store what the script has left, and return the result or raise why there is none."""
        self._take_reports()
        self._store(is_last=True)
        if self._metrics:
            self._write_metrics(is_last=True)
            self._report_progress()
        collective.barrier()  # as soon as one has raised, Ray kills the others
        if decision.action == "failed" and (status := self._member.status):
            raise self._error(process, status)
        if decision.action == "stalled":
            raise ScriptError(f"no sign of life for {self._config.hang_timeout:g} s")
        if decision.action == "stop":
            return {PREEMPTED: list(decision.ranks)}
        return {"hardware": self._hardware(), "first_step_at": self._started_at} if self._rank == 0 else {}

    def _error(self, process: ScriptProcess | MpiNode, status: int) -> Exception:
        """Return the error for a script that has failed; a restart would not mend a wrong command or package."""
        last = process.last_words or "it wrote nothing"
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        message = one_line(f"{self._config.command[0]} {how}: {last}")
        if last.startswith("ModuleNotFoundError"):
            return UsageError(f"{message}; name its package in a file for --requirements")
        return UsageError(message) if status in USAGE_STATUSES else ScriptError(message)

    def _store(self, is_last: bool = False) -> None:
        """Store the files of this node that are complete; its first worker does so."""
        if self._context.get_local_rank() != 0:
            return
        try:
            self._run_folder.store(time.monotonic(), psutil.Process().children(recursive=True), is_last)
        except OSError as cause:
            print(f"$RUN_DIR could not be stored, and will be tried again ({one_line(cause)})", flush=True)

    def _take_reports(self) -> None:
        for report in self._reports.read_new():
            self._process.heard()
            if self._metrics is None:
                continue
            if report[sdk.STEP] is not None:
                self._metrics.advance(report[sdk.STEP])
            if values := report.get(sdk.VALUES):
                self._metrics.add(values)

    def _on_line(self, line: str) -> None:
        print(line, end="", flush=True)
        if self._metrics:
            self._metrics.read_line(line)

    def _write_metrics(self, is_last: bool = False) -> None:
        if self._metrics is None or self._record_file is None or (last := self._metrics.last) is None:
            return
        if last != self._shown:
            self._settings["run_state"].report_metrics(*last)
            self._shown = last
        try:
            self._record_file.write(self._metrics)
            if is_last:
                merge_records(self._storage)
        except OSError as cause:
            print(f"the metrics could not be stored, and will be tried again ({one_line(cause)})", flush=True)

    def _report_progress(self) -> None:
        step = (self._metrics.step if self._metrics else None) or 0
        self._settings["run_state"].report(Progress(0, step, 0, self._group, step, self._started_at))

    def _hardware(self) -> dict[str, Any]:
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
