"""The driver's story with simulated workers: directives, decisions and the end, for each event in each state."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import Interrupted, ResourceError, ScriptError, StorageError, TrainingError, UsageError
from ray_on_ecs.jobs.driver_parent import FOLDER_VARIABLE
from ray_on_ecs.jobs.record import STACKS_REQUEST
from ray_on_ecs.run import driver as module
from ray_on_ecs.run.admission import Admission
from ray_on_ecs.run.allocation import WorkerAllocation
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.collectives import Reading
from ray_on_ecs.run.document import RunDocument
from ray_on_ecs.run.driver import RunDriver
from ray_on_ecs.run.extent import Extent
from ray_on_ecs.run.group import (
    Directive,
    FilesStatus,
    GroupError,
    NoPlacesError,
    Peer,
    Place,
    WorkerRank,
    WorkerStatus,
    WorkerStatuses,
)
from ray_on_ecs.run.homes import Home
from ray_on_ecs.run.last_words import LastWords
from ray_on_ecs.run.patience import ask
from ray_on_ecs.run.stacks import Frame, ProcessStacks, Stacks, Thread
from ray_on_ecs.run.stacks_request import SILENT
from ray_on_ecs.run.stuck import picture
from ray_on_ecs.run.supervisor import GRACE_SECONDS
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import KeptFile, Snapshot, write_snapshot
from ray_on_ecs.tracking.run_record import RunRecord
from ray_on_ecs.tracking.starts import Moments, describe
from tests.log_lines import collect_lines
from tests.run_folders import Clock
from tests.waiting import until


class Workers:
    """A group of workers on a node each, which do what the driver directs.

    Attributes:
        statuses: Their statuses.
        told: The directives so far.
        events: What happens before a poll, by its number.
        keeps_places: True if lost workers can be started again in their places.
        fails: The error of the polls.
    """

    def __init__(self, count: int = 2) -> None:
        self.ranks = [WorkerRank(rank, count, 0, 1, rank) for rank in range(count)]
        self.places = [Place(node_id=f"node-{rank}") for rank in range(count)]
        self.lost: dict[int, str] = {}
        self.next_poll = 1
        self.statuses = {rank: WorkerStatus() for rank in range(count)}
        self.told: list[Directive] = []
        self.events: dict[int, Callable[[], None]] = {}
        self.keeps_places = True
        self.has_room = False
        self.fails: Exception | None = None
        self.is_closed = False
        self.is_at_work = True

    def poll(self, directive: Directive) -> WorkerStatuses:
        self.told.append(directive)
        self.next_poll += 1
        self.events.pop(len(self.told), lambda: None)()
        if self.fails:
            raise self.fails
        for rank in self.statuses:
            if self.is_at_work:
                self._follow(rank, directive)
        return {rank: worker for rank, worker in self.statuses.items() if rank not in self.lost}

    def _follow(self, rank: int, directive: Directive) -> None:
        """Begin, start or end the script as the driver directs."""
        worker = self.statuses[rank]
        if worker.error or worker.has_left:
            return
        if directive.action == "leave":
            self.tell(rank, has_left=True)
        elif directive.generation > worker.generation:
            peer = Peer(f"host-{rank}", 1, rank)
            self.statuses[rank] = WorkerStatus(peer=peer, generation=directive.generation)
        elif directive.action == "run":
            if directive.peers and worker.started_at is None:
                self.tell(rank, started_at=1.0, pid=100 + rank)
        elif not worker.is_stored:
            status = -6 if directive.action == "abort" else -15
            if worker.started_at and worker.status is None:
                self.tell(rank, status=status, ended_at=200.0, stacks=Stacks(words=f"of rank {rank}"))
            self.tell(rank, has_ended=True, is_stored=True)

    def tell(self, rank: int, **changes: Any) -> None:
        self.statuses[rank] = replace(self.statuses[rank], **changes)

    def finish(self) -> None:
        for rank in self.statuses:
            self.tell(rank, status=0, ended_at=100.0, has_ended=True)

    def fail(self, status: int = 1) -> None:
        self.tell(1, status=status, ended_at=100.0, has_ended=True, words=LastWords("RuntimeError: x", "RuntimeError"))

    def replace_lost(self) -> bool:
        if self.keeps_places:
            for rank in self.lost:
                self.statuses[rank] = WorkerStatus()
            self.lost = {}
        return self.keeps_places

    def can_grow(self) -> bool:
        has_room, self.has_room = self.has_room, False
        return has_room

    def close(self) -> None:
        self.is_closed = True


class SimulatedHome(Home):
    """Two nodes, whose workers are simulated."""

    is_one_node = False

    def __init__(self) -> None:
        self.allocation = WorkerAllocation(2, use_gpu=False, cpus_per_worker=1)
        self.launcher: Any = None
        self.draining_nodes: dict[str, float | None] = {}
        self.lacks: ResourceError | None = None
        self.missing: ResourceError | None = None
        self.nodes = True
        self.groups: list[Workers] = []
        self.moments: list[Moments] = []
        self.makes: Iterator[Workers] = iter(Workers, None)

    def new_group(self, settings: Any) -> Workers:
        if self.missing:
            raise self.missing
        self.groups.append(next(self.makes))
        return self.groups[-1]

    def moments_of(self, node_ids: Collection[str]) -> list[Moments]:
        assert node_ids == {"node-0", "node-1"}
        return self.moments

    def draining(self) -> dict[str, float | None]:
        return self.draining_nodes

    def shortage(self) -> ResourceError | None:
        return self.lacks

    def is_busy(self) -> bool:
        return self.nodes


class Run:
    """A run whose driver a test steps through.

    Attributes:
        home: Its home.
        workers: Its workers.
        lines: The lines of its log.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        given: dict[str, Any] = {"network_check": "off", **settings}
        config = RunConfig(command=("train.py",), storage_path=str(folder), run_name="mine", **given)
        self.storage = RunStorage.open(str(folder), "mine")
        code = Code(name="code", archive="")
        document = RunDocument(
            id="first", config=config, code=code, storage=self.storage, uri=self.storage.uri, content={}
        )
        self.home = SimulatedHome()
        self.record = RunRecord(self.storage, config)
        self.driver = RunDriver(Admission(document, self.record), self.home, {})
        self.workers = Workers()
        self.lines = collect_lines()

    @property
    def state(self) -> str:
        return self.driver._state

    @property
    def told(self) -> Directive:
        return self.driver._directive

    def step(self, count: int = 1) -> Directive:
        """Let the driver poll so often; return what it says now."""
        for _ in range(count):
            self.driver.step(self.workers)
        return self.told

    def until(self, state: str) -> Directive:
        for _ in range(20):
            if self.state == state:
                return self.told
            self.step()
        raise AssertionError(f"the start is {self.state}, {self.told}, {self.workers.statuses}")

    def decide(self) -> bool:
        """Let the start end; return if these workers begin another one."""
        self.until("ended")
        return self.driver._decide(self.workers)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def begin(run: Run, state: str) -> None:
    """Bring a start into this state: `ending` because rank 0's script has failed, and rank 1's takes its time."""
    if state == "starting":
        run.step()
    else:
        run.until("running")
    if state == "ending":
        run.workers.tell(0, status=1, ended_at=50.0, has_ended=True)
        run.workers.is_at_work = False
        run.step()
    assert run.state == state


def lose(run: Run, *ranks: int, with_places: bool = False) -> None:
    run.workers.keeps_places = not with_places
    run.workers.lost |= dict.fromkeys(ranks, "a process of the run ended")


def end_with_error(run: Run) -> None:
    run.workers.tell(1, error=ScriptError("no space left"), has_ended=True, is_stored=True, has_left=True)


def give_notice(run: Run) -> None:
    run.home.draining_nodes = {"node-1": run.driver._checked_nodes_at + 100, "node-of-another-run": 0.0}
    run.driver._checked_nodes_at = 0.0


def make_room(run: Run) -> None:
    run.workers.has_room = True


def hang(run: Run) -> None:
    for rank in range(2):
        run.workers.tell(rank, step=1, silent_seconds=1000.0)


UNREAD = "the stacks of all 2 ranks can't be read (the script runs no Python process)"
RESTARTS = "restarting from the beginning (failure 1 in a row, --max-restarts is 3)"
EVENTS: dict[str, tuple[Callable[[Run], None], str, bool]] = {
    "script fails": (
        lambda run: run.workers.fail(),
        f"training failed on rank 1: train.py ended with exit status 1: RuntimeError: x; {RESTARTS}",
        True,
    ),
    "worker is lost": (
        lambda run: lose(run, 1),
        f"training failed on rank 1: a process of the run ended; {RESTARTS}",
        True,
    ),
    "its place is lost": (
        lambda run: lose(run, 1, with_places=True),
        f"training failed on rank 1: a process of the run ended; {RESTARTS}",
        False,
    ),
    "all are lost": (
        lambda run: lose(run, 0, 1, with_places=True),
        f"training failed on rank 0: a process of the run ended; {RESTARTS}",
        False,
    ),
    "worker has an error": (end_with_error, f"training failed on rank 1: no space left; {RESTARTS}", False),
    "notice": (give_notice, "nodes are being reclaimed; restarting from the beginning", False),
    "hang": (hang, f"training failed: no progress for 600 s: {UNREAD}, stacks in STACKS; {RESTARTS}", True),
    "room": (make_room, "there is room for more workers; restarting with them", False),
}
# Scripts that have not started don't hang, and a run does not grow before it runs.
CASES = [
    (state, event)
    for state in ("starting", "running")
    for event in EVENTS
    if state == "running" or event not in ("hang", "room", "script fails")
]


@pytest.mark.parametrize(("state", "event"), CASES)
def test_event_ends_the_start_with_one_decision(run: Run, state: str, event: str) -> None:
    happens, message, stays = EVENTS[event]
    begin(run, state)
    happens(run)
    told = run.step()
    assert told.action == ("abort" if event == "hang" else "end")
    assert run.decide() is stays
    [line] = run.lines
    assert line == message.replace("STACKS", line.partition("stacks in ")[2].partition(";")[0])
    assert run.told == Directive(1)
    if stays:
        run.until("running")
        assert run.step(5).action == "run"
        assert len(run.lines) == 1
    run.home.draining_nodes = {}
    run.workers = run.workers if stays else Workers()
    run.until("running")
    run.workers.finish()
    run.until("ended")
    assert run.driver._ended_for == "finished"


@pytest.mark.parametrize("event", EVENTS)
def test_event_while_a_start_ends_is_not_counted(run: Run, event: str) -> None:
    begin(run, "ending")
    EVENTS[event][0](run)
    run.step()
    run.workers.is_at_work = True
    stays = run.decide()
    assert stays is (event not in ("its place is lost", "all are lost", "worker has an error"))
    assert len(run.lines) == 1, run.lines
    assert RESTARTS in run.lines[0]
    run.home.draining_nodes, run.workers.has_room = {}, False
    run.workers = run.workers if stays else Workers()
    run.until("running")
    assert len(run.lines) == 1


def test_run_is_finished_once_all_scripts_are(run: Run, clock: Clock) -> None:
    run.until("running")
    run.workers.tell(0, status=0, ended_at=1.0, has_ended=True, silent_seconds=float("inf"))
    assert run.step(3).action == "run"
    run.workers.finish()
    assert run.step().action == "end"
    run.until("ended")
    assert run.driver._ended_for == "finished"
    assert run.lines == []


def test_failed_script_has_time_to_end(run: Run, clock: Clock) -> None:
    begin(run, "ending")
    assert (run.told.action, run.told.generation, run.told.end_at) == ("end", 0, clock.now + 30)
    assert run.step(5).generation == 0, "the other one still runs"
    run.workers.is_at_work = True
    assert run.decide()


def test_scripts_have_until_the_deadline_of_a_notice(run: Run, clock: Clock) -> None:
    run.until("running")
    run.home.draining_nodes = {"node-1": clock.now + 100, "node-of-another-run": clock.now + 5}
    assert run.step().action == "run", "Ray's head is asked once a second"
    clock.now += 1
    told = run.step()
    assert (told.action, told.reclaimed) == ("end", (1,))
    assert told.end_at == clock.now - 1 + 100 - module.MARGIN_SECONDS


def test_checkpointer_has_time_to_save_before_a_run_grows(run: Run, clock: Clock) -> None:
    """Its script gets SIGTERM in the last seconds."""
    run.until("running")
    run.workers.has_room = True
    told = run.step()
    assert (told.action, told.reclaimed) == ("end", (0, 1))
    assert told.end_at - GRACE_SECONDS >= clock.now + 60


@pytest.mark.parametrize("state", ["grows", "reclaimed"])
@pytest.mark.parametrize(("left", "is_sooner"), [(20.0, True), (400.0, False), (None, True), (-5.0, True)])
def test_shorter_notice_ends_scripts_that_are_ending_sooner(
    run: Run, clock: Clock, state: str, left: float | None, is_sooner: bool
) -> None:
    run.until("running")
    if state == "grows":
        run.workers.has_room = True
    else:
        clock.now += 1
        run.home.draining_nodes = {"node-0": clock.now + 200}
    first = run.step()
    assert first.action == "end"
    run.home.draining_nodes["node-1"] = None if left is None else clock.now + left
    clock.now += 1
    told = run.step()
    expected = clock.now + 60 if left is None else clock.now - 1 + left
    assert told.end_at == (expected - module.MARGIN_SECONDS if is_sooner else first.end_at)
    assert set(told.reclaimed) == {0, 1}
    assert run.step() == told, "later polls leave the time as it is"


DEAD = OSError(errno.ENOTCONN, "Transport endpoint is not connected", "/mnt/data")
NO_PACKAGES = ScriptError("no packages")
NOT_FOUND = UsageError("--input: /mnt/data is not on every node")
OF_NODES: dict[str, tuple[dict[int, Exception], tuple[int, ...], tuple[int, ...], bool]] = {
    "lost node": ({}, (1,), (1,), True),
    "error": ({1: DEAD}, (), (1,), True),
    "error elsewhere": ({0: DEAD}, (), (1,), False),
    "error without a notice": ({1: DEAD}, (), (), False),
    "errors on both nodes": ({0: DEAD, 1: DEAD}, (), (1,), True),
    "timeout": ({1: TimeoutError("no answer")}, (), (1,), True),
    "error of the storage": ({1: StorageError("full")}, (), (1,), False),
    "mistake of the user": ({1: NOT_FOUND}, (), (1,), False),
    "failure of the script": ({1: NO_PACKAGES}, (), (1,), False),
    "failure elsewhere, too": ({0: NO_PACKAGES, 1: DEAD}, (), (1,), False),
    "error beside a lost node": ({0: NO_PACKAGES}, (1,), (1,), True),
    "error beside a node lost elsewhere": ({0: DEAD}, (1,), (0,), True),
}


@pytest.mark.parametrize("is_early", [False, True], ids=["notice first", "notice last"])
@pytest.mark.parametrize(("errors", "lost", "draining", "is_reclaimed"), OF_NODES.values(), ids=OF_NODES)
def test_error_of_a_machine_that_drains_is_reclaimed(
    run: Run,
    errors: dict[int, Exception],
    lost: tuple[int, ...],
    draining: tuple[int, ...],
    is_reclaimed: bool,
    is_early: bool,
) -> None:
    run.driver._policy.max_restarts = 0
    begin(run, "starting")
    nodes: dict[str, float | None] = {f"node-{rank}": None for rank in draining}
    run.home.draining_nodes = {} if is_early else nodes
    for rank, error in errors.items():
        run.workers.tell(rank, error=error, has_ended=True, is_stored=True, has_left=True)
    lose(run, *lost, with_places=True)
    assert run.step().action == "end"
    run.home.draining_nodes = nodes
    if is_reclaimed:
        assert not run.decide()
        assert run.lines == ["nodes are being reclaimed; restarting from the beginning"]
    else:
        with pytest.raises(TrainingError):
            run.decide()


def test_error_after_the_notice_is_reclaimed(run: Run, clock: Clock) -> None:
    """A worker that has left because of a dead mount may read the mount nevertheless."""
    run.driver._policy.max_restarts = 0
    begin(run, "starting")
    clock.now += 1
    run.home.draining_nodes = {"node-1": None}
    run.workers.is_at_work = False
    assert run.step().action == "end"
    run.workers.tell(1, error=NO_PACKAGES, has_ended=True, is_stored=True, has_left=True)
    run.workers.is_at_work = True
    assert not run.decide()
    assert run.lines == ["nodes are being reclaimed; restarting from the beginning"]


@pytest.mark.parametrize(
    ("settings", "steps", "ends"),
    [({}, None, False), ({}, 5, True), ({"hang_timeout": 600.0}, None, True), ({"hang_timeout": 3000.0}, 5, False)],
)
def test_silence_after_reported_steps_is_a_hang(
    tmp_path: Path, settings: dict[str, float], steps: int | None, ends: bool
) -> None:
    run = Run(tmp_path, **settings)
    run.until("running")
    run.workers.tell(0, silent_seconds=1000.0, step=steps)
    assert run.step().action == "run"
    run.workers.tell(1, silent_seconds=1000.0)
    assert (run.step().action == "abort") is ends
    if ends:
        assert run.decide()
        [folder] = (tmp_path / "mine" / "stalls").iterdir()
        assert [file.read_text() for file in sorted(folder.glob("rank_*"))] == ["of rank 0", "of rank 1"]


@pytest.mark.parametrize(("setting", "log"), [("per_node", "of node 1"), ("mpi", "of node 0")])
def test_hang_of_a_node_has_the_log_of_its_program(
    tmp_path: Path, setting: str, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these only the first worker of a node, or the first one, has a program."""
    run = Run(tmp_path, **{setting: True})
    run.driver._policy.max_restarts = 0
    run.workers = Workers(8)
    run.workers.ranks = [WorkerRank(rank, 8, rank % 4, 4, rank // 4) for rank in range(8)]
    run.workers.places *= 4
    run.until("running")
    for rank in range(8):
        run.workers.tell(rank, silent_seconds=1000.0, step=3, log=(f"of node {rank // 4}",) if rank in (0, 4) else ())
    if setting == "mpi":
        run.workers.tell(4, log=())
    run.step()
    places = picture({4: Stacks(processes=(READ,)), 5: "has ended with exit status 0"}, 60.0)
    monkeypatch.setattr(module.failure_report, "picture_of", lambda *_: places)
    with pytest.raises(TrainingError):
        run.decide()
    error = run.storage.read_json("error.json")
    assert (error["log"], error["rank"]) == ([log], None if setting == "per_node" else 5)


def test_worker_that_has_finished_has_no_stacks(run: Run, tmp_path: Path) -> None:
    run.until("running")
    run.workers.tell(0, silent_seconds=1000.0, step=5)
    run.workers.tell(1, silent_seconds=1000.0, status=0, has_ended=True, is_stored=True)
    assert run.step().action == "abort"
    assert run.decide()
    [folder] = (tmp_path / "mine" / "stalls").iterdir()
    assert {file.name for file in folder.iterdir()} == {"rank_0.txt", "stacks.txt"}


def test_silent_script_without_steps_continues(run: Run) -> None:
    run.until("running")
    for rank in range(2):
        run.workers.tell(rank, silent_seconds=1000.0)
    run.step()
    request = run.step().stacks
    assert request
    for rank in range(2):
        run.workers.tell(rank, stacks=Stacks(request))
    assert run.step(3).action == "run"
    until(lambda: run.lines, between=0.01)
    assert len(run.lines) == 1
    assert "has been silent for 1000 s" in run.lines[0]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a command asks the driver for stacks."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path / STACKS_REQUEST


REQUEST_ID = "20261129-180000-00ff"
READ = ProcessStacks(1, threads=(Thread("MainThread", (Frame("load_batch", "/home/me/data.py", 88),)),))


@pytest.mark.parametrize("state", ["starting", "running"])
def test_stacks_that_a_command_asks_for_are_stored(asked: Path, tmp_path: Path, state: str) -> None:
    run = Run(tmp_path)
    run.workers.is_at_work = state == "running"
    run.until(state)
    asked.write_text(REQUEST_ID)
    assert run.step().stacks == REQUEST_ID
    if state == "running":
        for rank in range(2):
            run.workers.tell(rank, stacks=Stacks(REQUEST_ID, (READ,)))
        run.step()
    where = "are in load_batch, data.py:88" if state == "running" else "have not started"
    folder = tmp_path / "mine" / "stalls" / REQUEST_ID
    until(lambda: run.lines, between=0.01)
    assert run.lines == [f"stacks for ray-on-ecs debug: all 2 ranks {where} ({folder})"]
    assert (folder / "stacks.txt").read_text().startswith(f"all 2 ranks {where}\n")
    told = run.step()
    assert (told.action, told.stacks, run.state) == ("run", "", state)


@pytest.mark.parametrize("request_id", [REQUEST_ID, SILENT])
@pytest.mark.parametrize("fault", [None, OSError("no space"), ValueError("a bug")])
def test_run_goes_on_while_stacks_are_stored(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_id: str, fault: Exception | None
) -> None:
    goes_on = threading.Event()

    def store_slowly(*_: object) -> str:
        goes_on.wait(60)
        if fault:
            raise fault
        return "the folder"

    monkeypatch.setattr(module.failure_report, "store_stacks", store_slowly)
    run = Run(tmp_path)
    run.until("running")
    run.driver._stacks.ask(request_id)
    for rank in range(2):
        run.workers.tell(rank, stacks=Stacks(request_id, (READ,)))
    assert run.step().stacks == request_id
    asked.write_text(f"{REQUEST_ID}b")  # while the first one is stored
    run.step()
    give_notice(run)
    assert run.step(3).action == "end"
    assert run.lines == []
    goes_on.set()
    until(lambda: run.step() and len(run.lines) == 2, between=0.01)
    assert (str(fault) if fault else "the folder") in run.lines[0]
    assert run.lines[1].startswith("stacks for ray-on-ecs debug: ")


def test_hang_ends_while_stacks_are_asked_for(asked: Path, run: Run) -> None:
    run.until("running")
    asked.write_text(REQUEST_ID)
    run.step()
    hang(run)
    assert run.step().action == "abort"
    assert run.decide()


def test_hanging_scripts_end_once_all_stacks_are_read(run: Run) -> None:
    run.until("running")
    hang(run)
    run.workers.is_at_work = False
    assert run.step(2).action == "abort"
    run.workers.tell(0, stacks=Stacks())
    run.workers.tell(1, stacks=Stacks("silent"))  # of a request before
    assert not run.step(2).are_read, "the end of rank 0 would change where rank 1 is"
    run.workers.tell(1, stacks=Stacks())
    assert run.step(2).are_read


@pytest.mark.parametrize("settings", [{}, {"hang_timeout": 5.0}])
def test_scripts_that_have_ended_are_not_silent(tmp_path: Path, settings: dict[str, float]) -> None:
    """With --mpi a program has ended a moment before its last process is known to have."""
    run = Run(tmp_path, **settings)
    run.until("running")
    for rank in range(2):
        run.workers.tell(rank, status=0, silent_seconds=math.inf, step=3)
    assert run.step(3).action == "run"
    assert run.lines == []


def test_shortage_of_a_program_ends_the_run(run: Run) -> None:
    run.until("running")
    run.home.lacks = ResourceError("no GPU")
    with pytest.raises(ResourceError, match="no GPU"):
        run.driver._direct(run.workers)
    assert run.workers.told[-1].action == "end"


def stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("state", ["starting", "running", "ending"])
@pytest.mark.parametrize("answers", [True, False], ids=["workers answer", "workers are out of reach"])
def test_stop_ends_the_scripts_and_the_run(run: Run, state: str, answers: bool) -> None:
    begin(run, state)
    run.workers.is_at_work = True
    run.workers.events[len(run.workers.told) + 1] = stop
    if not answers:
        run.workers.events[len(run.workers.told) + 2] = lambda: setattr(run.workers, "fails", GroupError("no head"))
    run.home.makes = iter([run.workers])
    with pytest.raises(KeyboardInterrupt):
        run.driver._train_in_group()
    assert isinstance(run.driver._error, Interrupted)
    assert run.workers.is_closed
    if answers:
        assert [told.action for told in run.workers.told[-2:]] == ["end", "leave"]


def test_second_stop_does_not_keep_the_workers(run: Run) -> None:
    run.until("running")
    run.workers.events = {len(run.workers.told) + 1: stop}
    run.home.makes = iter([run.workers])
    follow = run.workers._follow

    def stop_again(rank: int, directive: Directive) -> None:
        follow(rank, directive)
        if directive.action == "leave":
            raise KeyboardInterrupt

    run.workers._follow = stop_again
    with pytest.raises(KeyboardInterrupt):
        run.driver._train_in_group()
    assert run.workers.told[-1].action == "leave"
    assert run.workers.is_closed


def test_stop_does_not_wait_for_workers_that_hang(run: Run, clock: Clock) -> None:
    run.until("running")
    run.workers.is_at_work = False
    run.workers.events = {
        len(run.workers.told) + number: lambda: setattr(clock, "now", clock.now + 1) for number in range(2, 200)
    }
    run.workers.events[len(run.workers.told) + 1] = stop
    before = clock.now
    with pytest.raises(KeyboardInterrupt):
        run.driver._direct(run.workers)
    assert module.STORE_SECONDS < clock.now - before <= 30 + module.STORE_SECONDS + 1


def test_stop_before_workers_have_places_does_not_wait(run: Run, clock: Clock) -> None:
    run.workers.ranks, run.workers.places, run.workers.statuses = [], [], {}
    run.workers.events[2] = stop
    with pytest.raises(KeyboardInterrupt):
        run.driver._direct(run.workers)
    assert len(run.workers.told) == 3


@pytest.mark.parametrize("ended", ["finished", "failed"])
def test_last_files_that_are_not_stored(run: Run, ended: str) -> None:
    run.until("running")
    run.workers.finish() if ended == "finished" else run.workers.fail()
    run.step()
    run.workers.tell(0, not_stored="503 SlowDown")
    what = "the last files could not be stored (503 SlowDown)"
    if ended == "finished":
        with pytest.raises(StorageError) as error:
            run.driver._direct(run.workers)
        assert str(error.value) == f"{what}; the same command with --run-name mine resumes the run"
    else:
        run.until("ended")
        assert run.lines == [what]
        assert run.decide()


def test_last_snapshot_of_all_nodes_is_waited_for(run: Run) -> None:
    run.until("running")
    for rank in range(2):
        run.workers.tell(rank, files=FilesStatus(part=f"{rank}-0-a"))
    run.step()
    run.workers.finish()
    run.step()
    for rank in range(2):
        run.workers.tell(rank, is_stored=True, files=FilesStatus(part=f"{rank}-1-a", is_last=True))
    parts = {0: "0-1-a", 1: "1-1-a"}
    assert run.step(3).commit == parts
    assert run.state == "ending"
    run.workers.tell(0, files=FilesStatus(part="0-1-a", is_last=True, committed=parts))
    run.until("ended")


@pytest.mark.parametrize(("status", "killed"), [(0, False), (1, False), (-9, True), (137, True), (255, False)])
def test_nodes_of_killed_scripts_store_nothing(run: Run, status: int, killed: bool) -> None:
    run.until("running")
    assert run.step().pids == {0: (100,), 1: (101,)}
    run.workers.tell(1, status=status, ended_at=1.0, has_ended=True)
    told = run.step()
    assert told.killed == ({1: 0.0} if killed else {})
    assert 1 in told.ended
    assert told.pids.get(1, ()) == (() if status == 0 else (101,)), "the node knows it before the driver"


def test_scripts_start_once_all_are_ready(run: Run) -> None:
    run.workers.is_at_work = False
    run.workers.statuses[0] = WorkerStatus(peer=Peer("host-0", 1, 0), generation=0, is_prepared=True)
    assert run.step(2).peers == ()
    assert not run.told.is_prepared
    run.workers.statuses[1] = WorkerStatus(peer=Peer("host-1", 2, 1), generation=0, is_prepared=True)
    assert run.step().peers == (Peer("host-0", 1, 0), Peer("host-1", 2, 1))
    assert run.told.is_prepared


def test_new_start_ignores_what_is_left_of_the_last(run: Run) -> None:
    run.until("running")
    run.workers.fail()
    assert run.decide()
    run.workers.is_at_work = False
    assert run.step(5) == Directive(1), "the statuses are of the start before"
    run.workers.is_at_work = True
    run.until("running")
    assert len(run.lines) == 1


@pytest.mark.parametrize("is_busy", [True, False])
def test_workers_without_places_are_requested_again(run: Run, is_busy: bool) -> None:
    run.home.nodes = is_busy
    group = Workers()
    group.fails, group.ranks = NoPlacesError("2 workers had no places within 5 s"), []
    run.home.makes = iter([group, group, group])
    run.record._state = "training"
    for _ in range(3):
        run.driver._train_in_group()
    assert run.told == Directive(0)
    assert run.lines == ["waiting: other jobs use the CPUs and GPUs of the cluster"] * is_busy
    assert run.record.is_waiting == is_busy


@pytest.mark.parametrize("has_begun", [False, True])
def test_nodes_that_do_not_come_end_the_run(run: Run, has_begun: bool) -> None:
    if has_begun:
        run.until("running")
    run.home.missing = ResourceError("2 nodes are missing; tried h100 and a100")
    with pytest.raises(TrainingError) as error:
        run.driver._train_in_group()
    if has_begun:
        lost = "training failed: the nodes of lost workers did not come back: 2 nodes are missing; tried h100 and a100"
        assert str(error.value).startswith(
            f"{lost}; see {run.storage.uri}/error.json; the same command with --run-name mine resumes the run"
        )
    else:
        assert error.value is run.home.missing


def keep(run: Run, name: str = "last.ckpt") -> None:
    write_snapshot(run.storage, Snapshot({name: KeptFile("files/key", 1, written_at=1_000_000_000)}))


def test_start_that_finds_files_is_told_so(run: Run) -> None:
    assert not run.told.resumes
    run.until("running")
    keep(run)
    run.workers.fail()
    run.decide()
    assert run.told.resumes
    assert "(newest kept file: last.ckpt of 1970-01-01 00:00:01 UTC; failure 1 in a row" in run.lines[-1]
    [restart] = run.record.restarts
    assert run.lines[-1].startswith(restart["cause"])
    assert restart["kept"] == "last.ckpt"


def test_restart_finds_files_if_the_storage_does_not_say(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no answer")

    run.until("running")
    keep(run)
    monkeypatch.setattr(module, "newest_stored", fail)
    run.workers.fail()
    run.decide()
    assert run.told.resumes


def test_resumed_run_finds_its_files_at_once(tmp_path: Path) -> None:
    keep(Run(tmp_path))
    assert Run(tmp_path).told.resumes


def test_run_that_grows_finds_its_files(run: Run) -> None:
    run.until("running")
    keep(run)
    make_room(run)
    run.step()
    run.decide()
    assert run.told.resumes
    assert run.record.restarts == []


ENDS: dict[str, tuple[Callable[[Run], None], str]] = {
    "failed": EVENTS["script fails"][:2],
    "hung": (
        hang,
        f"training failed: no progress for 600 s: all 2 ranks have not answered, stacks in STACKS; {RESTARTS}",
    ),
    "lost": EVENTS["its place is lost"][:2],
    "error": EVENTS["worker has an error"][:2],
    "reclaimed": EVENTS["notice"][:2],
    "grows": (make_room, f"there is room for more workers; restarting with them\ntraining failed: no head; {RESTARTS}"),
    "finished": (lambda run: run.workers.finish(), f"training failed: no head; {RESTARTS}"),
    "shortage": (lambda run: setattr(run.home, "lacks", ResourceError("no GPU")), ""),
}


@pytest.mark.parametrize("event", ENDS)
def test_first_cause_is_named_if_the_group_is_lost_while_it_ends(run: Run, event: str) -> None:
    happens, message = ENDS[event]
    run.until("running")
    happens(run)
    run.workers.is_at_work = False
    run.workers.events[len(run.workers.told) + 2] = lambda: setattr(run.workers, "fails", GroupError("no head"))
    run.home.makes = iter([run.workers])
    if event == "shortage":
        with pytest.raises(ResourceError, match="no GPU"):
            run.driver._train_in_group()
    else:
        run.driver._train_in_group()
        assert run.told == Directive(1)
    lines = "\n".join(run.lines)
    assert lines == message.replace("STACKS", lines.partition("stacks in ")[2].partition(";")[0])
    assert run.workers.is_closed


@pytest.mark.parametrize("event", ENDS)
def test_workers_keep_their_files_if_another_group_follows(run: Run, event: str) -> None:
    run.until("running")
    ENDS[event][0](run)
    run.home.makes = iter([run.workers])
    run.driver._policy.max_restarts = 0 if event in ("failed", "hung") else 3
    with suppress(TrainingError):
        run.driver._train_in_group()
    told = run.workers.told[-1]
    assert (told.action, told.others_follow) == ("leave", event in ("lost", "error", "reclaimed", "grows"))


@pytest.mark.parametrize("wait", ["mark", "stacks of a hang"])
@pytest.mark.parametrize("answers", [True, False], ids=["slow", "hanging"])
def test_workers_are_polled_while_the_storage_is_slow(
    run: Run, monkeypatch: pytest.MonkeyPatch, wait: str, answers: bool
) -> None:
    has_polled, is_over = threading.Event(), threading.Event()

    def call_slowly(*args: object) -> Any:
        (has_polled if answers else is_over).wait(60)
        return "the folder" if "stacks" in wait else None

    run.until("running")
    if not answers:
        monkeypatch.setattr(module, "ask", partial(ask, seconds=0.2))
    if "stacks" in wait:
        monkeypatch.setattr(module.failure_report, "store_stacks", call_slowly)
    else:
        monkeypatch.setattr(module, "newest_stored", call_slowly)
    (run.workers.fail if wait == "mark" else partial(hang, run))()
    run.until("ended")
    run.driver._group = run.workers
    before = len(run.workers.told)
    run.workers.events = {before + 2: has_polled.set}
    run.driver._decide(run.workers)
    is_over.set()
    assert len(run.workers.told) > before
    [line] = run.lines
    if wait == "mark":
        assert f"restarting from {'the beginning' if answers else 'where the run was'} (failure 1" in line
    else:
        assert ("the folder" if answers else "could not be stored (no answer within 0 s)") in line


@pytest.mark.parametrize("is_reclaimed", [False, True])
def test_unreachable_group_is_replaced(run: Run, is_reclaimed: bool) -> None:
    group = Workers()
    run.home.makes = iter([group, Workers()])
    group.events[5] = lambda: give_notice(run) if is_reclaimed else None
    group.events[6] = lambda: setattr(group, "fails", GroupError("the head is gone"))
    run.driver._train_in_group()
    assert group.is_closed
    assert run.told == Directive(1)
    kind = "nodes are being reclaimed" if is_reclaimed else "training failed: the head is gone"
    assert run.lines[0].startswith(f"{kind}; restarting")


def test_run_ends_when_no_restart_is_left(tmp_path: Path) -> None:
    run = Run(tmp_path, max_restarts=0)
    group = Workers()
    run.home.makes = iter([group])
    group.events[5] = group.fail
    with pytest.raises(TrainingError, match=r"train\.py ended with exit status 1: RuntimeError: x; see .*error\.json"):
        run.driver._train_in_group()
    assert group.is_closed
    assert [told.action for told in group.told[-2:]] == ["end", "leave"]
    assert run.storage.read_json("error.json")["rank"] == 1


def test_whole_run_counts_its_steps_over_restarts(run: Run) -> None:
    group = Workers()
    run.home.makes = iter([group])
    group.events = {5: lambda: group.tell(0, step=3, metrics=(0, {"loss": 1})), 6: group.fail}
    group.events |= {15: lambda: group.tell(0, step=2), 16: group.finish}
    with run.record.closing(lambda: True):
        run.driver.train()
    assert (run.driver.monitor.steps_made, run.driver.monitor.history) == (5, [{"loss": 1}])
    assert group.told[-1].action == "leave"
    assert len(run.lines) == 1


def test_slow_rank_is_said_and_recorded(run: Run, clock: Clock) -> None:
    run.until("running")
    for number in range(1, 16):
        for rank in range(2):
            times = [clock.now + 0.1 * step + 0.05 * rank for step in range(40)]
            arrivals = [("gloo/0/0", 40 * number + step, at) for step, at in enumerate(times)]
            run.workers.tell(rank, readings=[Reading(rank, number, {"gloo/0/0": (0, 1)}, 0, arrivals, f"i-{rank}")])
        clock.now += 4
        run.step()
    line = "rank 1 (i-1, 127.0.0.1) comes last to the collectives: 100 % of the waiting is for it, 50 % of the time"
    assert run.lines == [line]
    assert [(record["what"], record["until"]) for record in run.record.status()["slow"]] == [(line, None)]
    assert [(record["rank"], record["share"]) for record in run.record.status()["waits"]] == [(0, 0.5), (1, 0.0)]
    run.workers.finish()
    run.until("ended")
    assert run.record.slow[0]["until"] == "1970-01-01T00:17:40+00:00"


# The clock of these tests is at 1000, and a driver's request for workers at 900.
JOINED = {"launched": 930.0, "booted": 940.0, "pulling": 950.0, "pulled": 970.0, "joined": 980.0}
SHOWN = "1 min 40 s = alarm 0:30, instance 0:10, boot 0:10, image 0:20, Ray 0:10, environment 0:10, first step 0:10"
STEPS: dict[str, dict[str, Any]] = {
    "reports a step": {"step": 0},
    "prints a step": {"extent": Extent().at(7)},
    "prints a loss": {"guess": {"loss": 2.3}},
    "logs a metric": {"metrics": (3, {"step": 4, "time": "1970-01-01T00:16:31+00:00"})},
}
NO_STEPS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a record of an earlier start": {"metrics": (3, {"step": 4, "time": "1970-01-01T00:16:29.999+00:00"})},
    "a record without a time": {"metrics": (3, {"step": 4})},
}


def start_of(run: Run, node: Moments, **first: Any) -> list[str]:
    """Begin the scripts of a run at 990 on such a node; return its starts at 1000."""
    run.home.moments = [{"joined": 901.0}, node]
    run.workers.tell(0, generation=0, started_at=990.0, **first)
    run.workers.tell(1, generation=0, started_at=989.0)
    run.workers.is_at_work = False
    run.step()
    return [describe(start) for start in run.record.starts.documents(1000.0)]


@pytest.mark.parametrize("step", STEPS)
def test_start_ends_with_the_first_step(run: Run, step: str) -> None:
    run.record.starts.request(900.0)
    assert start_of(run, JOINED, **STEPS[step]) == [SHOWN]
    assert run.lines == [f"start {SHOWN}"]


@pytest.mark.parametrize("step", NO_STEPS)
def test_start_goes_on_without_a_step(run: Run, step: str) -> None:
    run.record.starts.request(900.0)
    assert start_of(run, JOINED, **NO_STEPS[step]) == [SHOWN.replace(" =", " so far =")]
    run.workers.is_at_work = True
    run.workers.finish()
    run.until("ended")
    assert [describe(start) for start in run.record.starts.documents(9999.0)] == [
        SHOWN.replace("1 min 40 s", "1 min 30 s").removesuffix(", first step 0:10")
    ]
    assert run.lines == []


def test_start_on_nodes_that_were_there_is_not_said(run: Run) -> None:
    run.record.starts.request(985.0)
    assert start_of(run, JOINED, step=1) == ["0 min 15 s = environment 0:05, first step 0:10"]
    assert run.lines == []


def test_restart_that_waits_for_a_node_is_a_start(run: Run, clock: Clock) -> None:
    first, second, third = Workers(), Workers(), Workers()
    run.home.makes = iter([first, second, third])
    for group in (first, second):
        group.keeps_places = False
        group.events = {5: partial(group.tell, 0, step=3), 6: partial(group.lost.update, {1: "its node is gone"})}
    third.events = {5: partial(third.tell, 0, step=9), 6: third.finish}
    for waits in (False, False, True):
        run.home.moments = [{"joined": clock.now + (5 if waits else -5)}]
        run.driver._train_in_group()
        clock.now += 100
    starts = run.record.starts.documents(clock.now)
    assert [start["is_over"] for start in starts] == [True, True], "the second was on nodes that were there"
