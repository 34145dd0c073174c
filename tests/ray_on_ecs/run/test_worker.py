"""Workers that are threads, with real scripts and files: starts, ends, lost drivers and errors."""

from __future__ import annotations

import io
import math
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from ray_on_ecs import sdk
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.node import notice
from ray_on_ecs.private_folder import node_folder
from ray_on_ecs.run import exchange as exchange_module
from ray_on_ecs.run import mount_check
from ray_on_ecs.run import worker as worker_module
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.environment import AGENT_STORE
from ray_on_ecs.run.group import Directive, Place, WorkerRank, WorkerStatus, WorkerStatuses
from ray_on_ecs.run.homes import launcher_of
from ray_on_ecs.run.thread_group import ThreadGroup
from ray_on_ecs.run.worker import Script, ScriptWorker, Settings
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from tests.run_folders import in_manifest
from tests.waiting import until

SCRIPTS = {
    # Saves itself, and writes how long it has whenever that changes.
    "saves_itself.py": """
import os, signal, time
from ray_on_ecs import sdk

signal.signal(signal.SIGTERM, signal.SIG_IGN)
sdk.register_checkpointer()
open("begun", "w").close()
while True:
    left = sdk.seconds_left()
    print("none" if left > 1e10 else "years" if left > 1e6 else "seconds", file=open("left.new", "w"))
    os.rename("left.new", "left")
    time.sleep(0.05)
""",
    # Deletes what is below TMPDIR, and saves at SIGTERM.
    "empties.py": """
import os, shutil, signal, sys, time

def save(number, frame):
    print("saved", file=open("saved", "w"))
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
shutil.rmtree(os.environ["RAY_ON_ECS_SDK_DIR"])
print("begun", file=open("begun", "w"))
time.sleep(600)
""",
    # Writes a file, and another one at SIGTERM.
    "train.py": """
import os, signal, sys, time

def save(number, frame):
    print("saved", file=open("saved", "w"))
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print(f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", file=open("begun", "w"))
time.sleep(600)
""",
    # Trains and evaluates with a new group each time, while a model holds the last one.
    "groups.py": """
import os
import torch
import torch.distributed as dist

torch.set_num_threads(1)
models = []
for number in range(10):
    dist.init_process_group("gloo")
    models.append(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)))
    value = torch.ones(1)
    dist.all_reduce(value, group=dist.new_group())
    dist.destroy_process_group()
    print(value.item(), file=open(f"rank{os.environ['RANK']}", "a"))
""",
    "of_each_node.py": """
import os
names = [name for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "NPROC_PER_NODE") if name in os.environ]
print(*names, os.environ["NPROC_PER_NODE"], file=open("node" + os.environ["NODE_RANK"], "a"))
""",
    "nested.sh": """#!/bin/sh
exec torchrun --nnodes $NNODES --node-rank $NODE_RANK --nproc-per-node $NPROC_PER_NODE \\
  --master-addr $MASTER_ADDR --master-port $MASTER_PORT of_each_rank.py
""",
    "wrapped.sh": """#!/bin/bash
python $1
echo next > next
""",
    # Serves what PyTorch does not know at the port that PyTorch would use.
    "own_server.py": """
import os, socket
socket.create_server(("", int(os.environ["MASTER_PORT"]))).close()
print(os.environ.get("TORCHELASTIC_USE_AGENT_STORE"), file=open("served", "w"))
""",
    "of_each_rank.py": """
import os
print(os.environ["LOCAL_RANK"], "of", os.environ["WORLD_SIZE"], file=open("rank" + os.environ["RANK"], "w"))
""",
    "arguments.py": """
import os, sys
print(sys.argv[1:], file=open("arguments" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w"))
""",
    # Each rank has a file open for writing when the other one has; rank 0 keeps a log, too.
    "writing.py": """
import os, pathlib, time
rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
log = open("train.log", "a")
with open(f"part{rank}", "w") as part:
    print("half", file=part, flush=True)
    while len(list(pathlib.Path().glob("part*"))) < count:
        time.sleep(0.01)
    print("begun", file=log, flush=True)
    while not os.path.exists("../../go-on"):
        time.sleep(0.01)
    print("whole", file=part, flush=True)
os.rename(f"part{rank}", f"model{rank}.pt")
time.sleep(600)
""",
    # Rank 0 saves all the time, and another process of it as well; the files are whole when they are closed.
    "often.py": """
import os, time

def save(name):
    number = 0
    while True:
        number += 1
        with open(name + ".tmp", "w") as file:
            print(number, file=file, flush=True)
            time.sleep(0.002)
            print("whole", file=file)
        os.rename(name + ".tmp", name)
        time.sleep(0.01)

if os.environ["RANK"] == "0":
    save("mine.pt" if os.fork() else "child.pt")
print("begun", file=open("begun", "w"))
time.sleep(600)
""",
    # Saves at SIGTERM, and then ends by it, as without a handler.
    "saving_late.py": """
import os, signal, time

def save(number, frame):
    with open("late.pt", "w") as file:
        print("half", file=file, flush=True)
        while not os.path.exists("../../go-on"):
            time.sleep(0.01)
        print("whole", file=file, flush=True)
    while not os.path.exists("../../end"):
        time.sleep(0.01)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

signal.signal(signal.SIGTERM, save)
print("begun", file=open("begun", "w"))
time.sleep(600)
""",
    # Has no handler, and saves once its node is reclaimed.
    "polls.py": """
import time
from ray_on_ecs import seconds_left

for step in range(200):
    if seconds_left() < 1e9:
        print("saved", file=open("saved", "w"))
        break
    open("begun", "w").close()
    time.sleep(3)  # a step
""",
    # Ends by itself, and may have asked how long it has.
    "ends_itself.py": """
import os, time
from ray_on_ecs import seconds_left

print("begun", file=open("begun", "w"))
while not os.path.exists("../../go-on"):
    if "ASKS" in os.environ and seconds_left() < 1e9:
        open("asked", "w").close()
    time.sleep(0.05)
""",
}


class Workers:
    """A group of threads, which a test polls as the driver does."""

    def __init__(
        self,
        folder: Path,
        count: int = 1,
        script: str = "train.py",
        *,
        is_one_node: bool = True,
        source: str = "",
        **flags: Any,
    ) -> None:
        self.storage = RunStorage.open(str(folder / "storage"), "mine")
        self.storage.write_json(layout.SETTINGS, {})
        given: dict[str, Any] = {"storage_path": str(folder / "storage"), "run_name": "mine", "num_workers": count}
        config = RunConfig(command=tuple(script.split()), resume_args="--resume 'a b'", **given | flags)
        settings = Settings(
            config=config,
            storage=self.storage,
            threads=1,
            use_gpu=False,
            code=Code(name="code", archive=""),
            is_one_node=is_one_node,
            run_id="first",
            inputs={"data": source} if source else {},
            cluster="",
            launcher=launcher_of(config),
        )
        self.settings = settings
        self.folder = Path(self.storage.path("files/code"))
        self.group = ThreadGroup(settings, count)
        self.directive = Directive()

    def poll(self) -> WorkerStatuses:
        statuses = self.group.poll(self.directive)
        peers = [worker.peer for worker in statuses.values() if worker.generation == self.directive.generation]
        if not self.directive.peers and len(peers) == len(self.group.ranks) and all(peers):
            self.say(peers=tuple(peers))
        if all(worker.has_ended for worker in statuses.values()):
            killed = [worker.rested_at for worker in statuses.values() if (worker.status or 0) < 0]
            self.say(ended=frozenset({0}), killed={0: min(killed)} if killed else {})
        return statuses

    def say(self, **changes: object) -> None:
        self.directive = Directive(**{**vars(self.directive), **changes})  # ty: ignore[invalid-argument-type]

    def until(self, **wanted: object) -> WorkerStatus:
        """Poll until rank 0's status has these values."""

        def has_them() -> WorkerStatus | None:
            status = self.poll()[0]
            return status if all(getattr(status, name) == value for name, value in wanted.items()) else None

        return until(has_them, between=0)

    def until_begun(self, *files: str) -> None:
        """Poll until all scripts have been started, and wait for these files of theirs."""
        until(lambda: all(worker.started_at for worker in self._healthy().values()), between=0)
        until(lambda: all((self.folder / name).exists() for name in files))

    def _healthy(self) -> WorkerStatuses:
        statuses = self.poll()
        assert not any(worker.error for worker in statuses.values()), [worker.where for worker in statuses.values()]
        return statuses


Start = Callable[..., Workers]


@pytest.fixture(autouse=True)
def code(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(code: Code, folder: Path) -> None:
        folder.mkdir()
        for name, text in SCRIPTS.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    monkeypatch.setattr(Code, "place", place)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start workers, which leave after the test."""
    started: list[Workers] = []

    def start(*given: Any, **more: Any) -> Workers:
        started.append(Workers(tmp_path, *given, **more))
        return started[-1]

    yield start
    for workers in started:
        workers.say(action="leave")
        until(lambda workers=workers: all(worker.has_left for worker in workers.poll().values()), between=0)


@pytest.fixture
def workers(start: Start) -> Workers:
    return start()


def test_script_that_is_ended_may_save(workers: Workers) -> None:
    workers.until_begun("begun")
    workers.say(action="end", end_at=2e9)
    assert workers.until(is_stored=True).status == 0
    assert in_manifest(workers.storage) == {"begun": "0-0\n", "saved": "saved\n"}


def test_deadline_that_is_brought_forward_holds(start: Start) -> None:
    workers = start(script="saves_itself.py")
    left = workers.folder / "left"

    def has(text: str) -> bool:
        workers.poll()
        return left.exists() and left.read_text() == f"{text}\n"

    workers.until_begun()
    until(lambda: has("none"))
    workers.say(action="end", end_at=4e9, reclaimed=(0,))
    until(lambda: has("years"))
    workers.say(end_at=time.time() + 20)
    until(lambda: has("seconds"))
    workers.say(end_at=time.time())
    assert workers.until(has_ended=True).status == -signal.SIGKILL


def test_script_that_polls_seconds_left_may_save(start: Start) -> None:
    workers = start(script="polls.py")
    workers.until_begun("begun")
    workers.say(action="end", end_at=time.time() + 600, reclaimed=(0,))
    ended = workers.until(is_stored=True)
    assert (ended.status, ended.is_cut) == (0, True), "without SIGTERM, and not done"
    assert in_manifest(workers.storage)["saved"] == "saved\n"


@pytest.mark.parametrize("env", [(), ("ASKS=1",)])
def test_script_may_finish_in_the_notice_of_a_limit(start: Start, env: tuple[str, ...]) -> None:
    workers = start(script="ends_itself.py", env=env)
    workers.until_begun("begun")
    workers.say(action="end", end_at=time.time() + 600, reclaimed=(0,), waits=True)
    until(lambda: workers.poll() and ((workers.folder / "asked").exists() or not env))
    Path(workers.storage.path("go-on")).touch()
    ended = workers.until(is_stored=True)
    assert (ended.status, ended.is_cut) == (0, bool(env)), "without SIGTERM"


def test_short_notice_of_a_limit_ends_with_sigterm(workers: Workers) -> None:
    workers.until_begun("begun")
    begun = time.time()
    workers.say(action="end", end_at=begun + 8, reclaimed=(0,), waits=True)
    ended = workers.until(is_stored=True)
    assert (ended.status, ended.is_cut) == (0, True)
    assert (ended.ended_at or 0) >= begun + 4, "the first half is for a save"


def test_workers_of_a_node_that_stops_wait_for_its_drain(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def stop(*, asks: bool) -> bool:
        asked.append(asks)
        return True

    monkeypatch.setattr(mount_check, "stop_node_if_mounts_fail", stop)
    workers = start(count=2, source=str(tmp_path / "data"))
    until(lambda: workers.poll() and len(asked) == 2, between=0)
    for _ in range(5):
        assert not any(worker.error or worker.peer for worker in workers.poll().values())
    assert sorted(asked) == [False, True], "one worker asks the node to stop"
    workers.say(action="end", end_at=time.time() + 60)
    until(lambda: all(worker.has_left for worker in workers.poll().values()), between=0)
    assert [type(worker.error) for worker in workers.poll().values()] == [UsageError] * 2, "they read it in vain"


def test_recommendation_after_the_start_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recommended = iter(["before", "before", "after", ""])
    monkeypatch.setattr(notice, "of_instance", lambda: notice.Notices(recommendation=next(recommended)))
    script = Script(cast(Any, None), tmp_path)
    told = tmp_path / sdk.EXTRA_SAVE
    script.pass_on_recommendation()
    assert not told.exists(), "the script has just read its last checkpoint"
    for _ in range(2):
        script.pass_on_recommendation()
        assert told.read_text() == "after"


def test_script_without_a_place_for_the_notice_gets_sigterm(start: Start) -> None:
    workers = start(script="empties.py")
    workers.until_begun("begun")
    workers.say(action="end", end_at=time.time() + 600, reclaimed=(0,))
    assert workers.until(is_stored=True).status == 0
    assert in_manifest(workers.storage)["saved"] == "saved\n"


def test_notice_that_could_not_be_written_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exchange = tmp_path / "gone"
    script = Script(cast(Any, None), exchange)
    for _ in range(3):
        assert not script.tell(sdk.DEADLINE, "1")
    assert capsys.readouterr().out.count("the notice to the script has failed") == 1
    exchange.mkdir()
    assert script.tell(sdk.DEADLINE, "1")
    assert (exchange / sdk.DEADLINE).read_text() == "1"


def test_script_without_a_handler_ends_between_two_writes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "REST_SECONDS", 300.0)
    workers = start(count=2, script="writing.py")
    workers.until_begun()
    log = workers.folder / "train.log"
    until(lambda: log.exists() and log.read_text().count("begun") == 2)
    workers.say(action="end", end_at=2e9)
    for _ in range(3):
        assert {worker.status for worker in workers.poll().values()} == {None}
    Path(workers.storage.path("go-on")).touch()
    assert workers.until(is_stored=True).status == -signal.SIGTERM
    models = dict.fromkeys(("model0.pt", "model1.pt"), "half\nwhole\n")
    assert in_manifest(workers.storage) == {"train.log": "begun\nbegun\n", **models}


@pytest.mark.parametrize("reclaimed", [(), (0,)], ids=["restart", "notice"])
def test_script_behind_a_shell_may_save(start: Start, reclaimed: tuple[int, ...]) -> None:
    workers = start(script="./wrapped.sh train.py", no_python=True)
    workers.until_begun("begun")
    workers.say(action="end", end_at=time.time() + 60, reclaimed=reclaimed)
    assert workers.until(is_stored=True).status == 0
    assert in_manifest(workers.storage) == {"begun": "0-0\n", "saved": "saved\n"}


def test_script_without_a_handler_behind_a_shell_keeps_its_last_files(start: Start) -> None:
    workers = start(script="./wrapped.sh often.py", no_python=True)
    workers.until_begun("mine.pt", "child.pt")
    workers.say(action="end", end_at=2e9)
    status = workers.until(is_stored=True)
    assert (status.status, status.rested_at) == (-signal.SIGTERM, math.inf)
    stored = in_manifest(workers.storage)
    assert all(stored[name].endswith("\nwhole\n") for name in ("mine.pt", "child.pt"))


def test_script_that_saves_often_keeps_its_last_files(start: Start) -> None:
    workers = start(count=2, script="often.py")
    workers.until_begun("mine.pt", "child.pt", "begun")
    workers.say(action="end", end_at=2e9)
    status = workers.until(is_stored=True)
    assert (status.status, status.rested_at) == (-signal.SIGTERM, math.inf)
    stored = in_manifest(workers.storage)
    for name in ("mine.pt", "child.pt"):
        assert stored[name] == (workers.folder / name).read_text()
        assert stored[name].endswith("\nwhole\n")
        assert stored.get(f"{name}.tmp", "whole\n").endswith("whole\n")


@pytest.mark.parametrize("saves", [False, True])
def test_handler_that_ends_by_its_signal_may_save(start: Start, saves: bool) -> None:
    workers = start(script="saving_late.py")
    workers.until_begun("begun")
    late = workers.folder / "late.pt"
    pid = until(lambda: workers.poll()[0].pid, between=0)
    workers.say(action="end", end_at=2e9, pids={0: (pid,)})
    until(lambda: workers.poll() and late.exists(), between=0)
    if saves:
        Path(workers.storage.path("go-on")).touch()
        until(lambda: late.read_text() == "half\nwhole\n")
        written_at = late.stat().st_mtime
        until(lambda: workers.poll()[0].rested_at > written_at + 0.1, between=0)
        Path(workers.storage.path("end")).touch()
    else:
        psutil.Process(pid).children()[0].kill()
    assert workers.until(is_stored=True).status == -(signal.SIGTERM if saves else signal.SIGKILL)
    assert in_manifest(workers.storage).get("late.pt") == ("half\nwhole\n" if saves else None)


def test_next_start_has_the_files_of_the_last(workers: Workers) -> None:
    workers.until_begun("begun")
    workers.say(action="end", end_at=2e9)
    workers.until(is_stored=True)
    workers.directive = Directive(1)
    folder = workers.folder

    def has_begun() -> bool:
        workers.poll()
        with suppress(FileNotFoundError):  # the folder is deleted and created again
            return (folder / "begun").read_text() == "0-1\n"
        return False

    until(has_begun, between=0)
    assert (folder / "saved").read_text() == "saved\n"


def test_resume_args_are_given_to_a_start_that_finds_files(start: Start) -> None:
    workers = start(script="arguments.py")
    for generation, resumes in enumerate((False, True)):
        workers.directive = Directive(generation, resumes=resumes)
        workers.until(status=0, generation=generation, is_stored=True)
    assert [(workers.folder / f"arguments{number}").read_text() for number in "01"] == ["[]\n", "['--resume', 'a b']\n"]


def test_start_that_ends_before_all_have_met_starts_nothing(workers: Workers) -> None:
    workers.group.poll(workers.directive)
    until(lambda: workers.group.poll(workers.directive)[0].peer)
    workers.directive = Directive(action="end")
    status = workers.until(is_stored=True)
    assert (status.started_at, status.status) == (None, None)
    assert in_manifest(workers.storage) == {}


def test_driver_that_is_lost_ends_the_script(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the script leaves are not stored: its worker does not know how the others have ended."""
    workers.until_begun("begun")
    monkeypatch.setattr(exchange_module, "DRIVER_LOST_SECONDS", 1.0)
    exchange = workers.group._exchanges[0]
    until(lambda: exchange.status.has_left)
    status = exchange.status
    assert status.status == 0
    assert "the driver has not answered for 600 s" in str(status.error)
    assert in_manifest(workers.storage).get("saved") is None


def test_error_of_a_worker_is_its_status(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(code: Code, folder: Path) -> None:
        raise LookupError("no code")

    monkeypatch.setattr(Code, "place", fail)
    status = workers.until(has_left=True)
    assert str(status.error) == "LookupError('no code')"
    assert "in fail" in status.where
    assert status.is_stored


def test_ranks_of_a_machine_share_its_folder(start: Start) -> None:
    workers = start(count=2, script="of_each_rank.py")
    workers.until(is_stored=True)
    assert in_manifest(workers.storage) == {"rank0": "0 of 2\n", "rank1": "1 of 2\n"}


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.ray)])  # it takes long
def test_script_makes_and_destroys_process_groups(start: Start, count: int) -> None:
    workers = start(count=count, script="groups.py")
    workers.until(is_stored=True)
    assert in_manifest(workers.storage) == {f"rank{rank}": f"{count:.1f}\n" * 10 for rank in range(count)}


@pytest.mark.parametrize(
    ("flags", "said"),
    [({"per_node": True}, "None"), ({"env": (f"{AGENT_STORE}=False",)}, "False")],
    ids=["node", "env"],
)
def test_port_is_free_for_another_server(start: Start, flags: dict[str, Any], said: str) -> None:
    workers = start(script="own_server.py", **flags)
    assert workers.until(is_stored=True).status == 0
    assert in_manifest(workers.storage) == {"served": f"{said}\n"}


def test_program_of_a_node_starts_once(start: Start) -> None:
    workers = start(count=3, script="of_each_node.py", per_node=True)
    workers.until(is_stored=True)
    others = [workers.poll()[rank] for rank in (1, 2)]
    assert [(other.status, other.ended_at, other.pid, other.is_stored) for other in others] == [(0, None, 0, True)] * 2
    assert in_manifest(workers.storage) == {"node0": "NPROC_PER_NODE 3\n"}
    workers.directive = Directive(1)
    workers.until(is_stored=True, generation=1)
    assert in_manifest(workers.storage) == {"node0": 2 * "NPROC_PER_NODE 3\n"}


def test_torchrun_starts_the_workers_of_its_node(start: Start) -> None:
    workers = start(count=2, script="./nested.sh", per_node=True, no_python=True)
    assert workers.until(is_stored=True).log == ()
    assert in_manifest(workers.storage) == {"rank0": "0 of 2\n", "rank1": "1 of 2\n"}


@pytest.mark.parametrize(
    ("rank", "flags", "prefix"),
    [
        (WorkerRank(), {}, ""),
        (WorkerRank(1, 2, 1, 2), {}, "[rank 1] "),
        (WorkerRank(1, 2, 1, 2), {"mpi": True}, ""),
        (WorkerRank(0, 4, 0, 4), {"per_node": True}, ""),
        (WorkerRank(4, 8, 0, 4, 1), {"per_node": True}, "[node 1] "),
    ],
    ids=["one", "rank", "mpirun", "one node", "node"],
)
def test_lines_have_rank_or_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: WorkerRank, flags: dict[str, Any], prefix: str
) -> None:
    ScriptWorker(Workers(tmp_path, **flags).settings, rank, Place())._on_line("step 1\n")
    assert capsys.readouterr().out == f"{prefix}step 1\n"


class Pieces(io.StringIO):
    """A stream that keeps what each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


def test_lines_of_ranks_that_print_at_once_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, lines = range(4), [f"step {step}" for step in range(50)]
    settings = Workers(tmp_path, count=len(ranks)).settings
    places = [WorkerRank(rank, len(ranks), local_rank=rank, local_world_size=len(ranks)) for rank in ranks]
    workers = [ScriptWorker(settings, place, Place()) for place in places]
    monkeypatch.setattr(sys, "stdout", out := Pieces())
    start = threading.Barrier(len(ranks))

    def print_all(worker: ScriptWorker) -> None:
        start.wait(60)
        for number, line in enumerate(lines):
            worker._on_line(line if number == len(lines) - 1 else f"{line}\n")  # the last one has no end

    threads = [threading.Thread(target=print_all, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in ranks:  # a piece is never cut by another thread
        assert [piece for piece in out.pieces if piece.startswith(f"[rank {rank}] ")] == [
            f"[rank {rank}] {line}\n" for line in lines
        ]
    assert len(out.pieces) == len(ranks) * len(lines)


@pytest.mark.parametrize("others_follow", [True, False])
def test_folder_stays_for_another_group_of_the_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_follow: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    workers = start(script="of_each_rank.py", is_one_node=False)
    workers.until(is_stored=True)
    workers.say(action="leave", others_follow=others_follow)
    workers.until(has_left=True)
    folder = node_folder("runs", f"{workers.storage.uri} ")
    assert [path.name for path in folder.rglob("rank0")] == ["rank0"] * others_follow
