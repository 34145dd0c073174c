"""The sentence about a hang, by the stacks of its ranks; tests/drills has real ones."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ray_on_ecs.run.collectives import Last
from ray_on_ecs.run.stacks import Frame, ProcessStacks, Stacks, Thread, in_words
from ray_on_ecs.run.stuck import picture

TORCH = "/usr/lib/python3.13/site-packages/torch"
USER = "/home/me/results/run/files/code"


def frame(text: str) -> Frame:
    function, _, place = text.partition(" ")
    file, _, line = place.rpartition(" ")
    return Frame(function, file, int(line))


def thread(*frames: str, name: str = "MainThread") -> Thread:
    return Thread(name, tuple(map(frame, frames)))


def process(*frames: str, pid: int = 10, **changes: Any) -> ProcessStacks:
    stacks = ProcessStacks(pid, threads=(thread(*frames),) if frames else ())
    return replace(stacks, **changes)


def rank(*frames: str, **changes: Any) -> Stacks:
    return Stacks(processes=(process(*frames, **changes),))


def rank_of(*threads: Sequence[str]) -> Stacks:
    return Stacks(processes=(ProcessStacks(10, threads=tuple(thread(*frames) for frames in threads)),))


def line(workers: Mapping[int, Stacks | str] | Sequence[Stacks | str]) -> str:
    return str(picture(workers if isinstance(workers, Mapping) else dict(enumerate(workers)), 60.0))


TRAIN = f"train {USER}/train.py 40"
STEP = (f"all_reduce {TORCH}/distributed/distributed_c10d.py 3", TRAIN)
LOAD = (f"get {TORCH}/data.py 1", f"load_batch {USER}/data.py 88", TRAIN)
BACKWARD = (f"_engine_run_backward {TORCH}/autograd/graph.py 8", TRAIN)
DDP = (
    f"_verify_params {TORCH}/distributed/utils.py 2",
    f"DistributedDataParallel.__init__ {TORCH}/nn/parallel/distributed.py 9",
    TRAIN,
)
# Places, by the frames of the main thread.
PLACES = {
    "collective": (STEP, "waits in all_reduce, train.py:40"),
    "collective of objects": (
        (STEP[0], f"all_gather_object {TORCH}/distributed/distributed_c10d.py 5", TRAIN),
        "waits in all_gather_object, train.py:40",
    ),
    "the user's function of that name": ((f"all_reduce {USER}/train.py 7", TRAIN), "is in all_reduce, train.py:7"),
    "FSDP": (
        (f"wait_for_unshard {TORCH}/distributed/fsdp/param.py 3", TRAIN),
        "waits in wait_for_unshard, train.py:40",
    ),
    "hook of a collective": ((f"hook {USER}/hooks.py 3", *STEP), "is in hook, hooks.py:3"),
    "DDP": (DDP, "waits in DistributedDataParallel, train.py:40"),
    "forward of DDP": (
        (f"linear {TORCH}/nn/linear.py 3", f"forward {TORCH}/nn/parallel/distributed.py 9", TRAIN),
        "is in train, train.py:40",
    ),
    "backward": (BACKWARD, "is in backward, train.py:40"),
    "package": (LOAD, "is in load_batch, data.py:88"),
    "module": ((f"<module> {USER}/train.py 2",), "is in train.py:2"),
    "command line": (("<module> <string> 1",), "is in <string>:1"),
    "import": (("_find_and_load <frozen importlib._bootstrap> 1", TRAIN), "is in train, train.py:40"),
    "only packages": ((f"main {TORCH}/run.py 5",), "is in main, run.py:5"),
    "method": ((f"Net.forward {USER}/net.py 5",), "is in Net.forward, net.py:5"),
}


@pytest.mark.parametrize("place", PLACES)
def test_place_is_the_innermost_one_of_the_user(place: str) -> None:
    frames, where = PLACES[place]
    odd = line([rank(*frames), rank(f"other {USER}/other.py 1"), rank(f"other {USER}/other.py 1")])
    assert f"rank 0 {where}" in odd.split("; ")


STUCK = rank(*LOAD)
SENTENCES = {
    "one rank": ([STUCK], "the script is in load_batch, data.py:88"),
    "all the same": ([rank(*STEP)] * 3, "all 3 ranks wait in all_reduce, train.py:40"),
    "odd one": (
        [STUCK, *[rank(*STEP)] * 3],
        "3 ranks wait in all_reduce, train.py:40; rank 0 is in load_batch, data.py:88",
    ),
    "one waits for many": (
        [rank(*STEP), STUCK, STUCK, STUCK, STUCK],
        "rank 0 waits in all_reduce, train.py:40; 4 ranks are in load_batch, data.py:88",
    ),
    "odd pair": (
        [rank(*STEP), STUCK, rank(*STEP), STUCK, rank(*STEP)],
        "3 ranks wait in all_reduce, train.py:40; ranks 1 and 3 are in load_batch, data.py:88",
    ),
    "without a collective": (
        [rank(TRAIN), rank(TRAIN), STUCK],
        "2 ranks are in train, train.py:40; rank 2 is in load_batch, data.py:88",
    ),
    "two and two": (
        [rank(*STEP), rank(*DDP), rank(*STEP), rank(*DDP)],
        "2 ranks wait in all_reduce, train.py:40; 2 ranks wait in DistributedDataParallel, train.py:40",
    ),
    "ended": (
        [rank(*STEP), rank(*STEP), "has ended with exit status 0"],
        "2 ranks wait in all_reduce, train.py:40; rank 2 has ended with exit status 0",
    ),
    "stopped": (
        [rank(*STEP), rank(*STEP, state="stopped"), rank(*STEP)],
        "2 ranks wait in all_reduce, train.py:40; rank 1 is stopped by a signal (SIGSTOP), and goes on at SIGCONT",
    ),
    "stopped while the other works": (
        [rank(TRAIN, state="stopped"), rank(TRAIN)],
        "rank 1 is in train, train.py:40; rank 0 is stopped by a signal (SIGSTOP), and goes on at SIGCONT",
    ),
    "unread": (
        [rank(*STEP), rank(fault="no ptrace"), rank(*STEP)],
        "2 ranks wait in all_reduce, train.py:40; the stacks of rank 1 can't be read (no ptrace)",
    ),
    "no Python": ([Stacks(), Stacks()], "the stacks of all 2 ranks can't be read (the script runs no Python process)"),
    "many places": (
        [rank(*STEP)] + [rank(f"f {USER}/f.py {line}") for line in range(7)],
        "rank 0 waits in all_reduce, train.py:40; rank 1 is in f, f.py:0; rank 2 is in f, f.py:1; "
        "rank 3 is in f, f.py:2; rank 4 is in f, f.py:3; 3 ranks are elsewhere",
    ),
    "nothing": ([], "the script has not started"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_sentence_names_the_odd_ranks_last(case: str) -> None:
    workers, sentence = SENTENCES[case]
    assert line(workers) == sentence


def test_rank_that_is_down_is_the_odd_one() -> None:
    workers = {0: "has not answered", 1: rank(TRAIN)}
    assert picture(workers, 60.0).odd_rank == 0
    assert picture({**workers, 2: rank(*STEP)}, 60.0).odd_rank is None, "two do not wait"
    assert picture({0: "has not answered", 1: "has not answered"}, 60.0).odd_rank is None


def test_nodes_are_named() -> None:
    workers = {
        number: replace(rank(*(LOAD if number == 3 else STEP)), node=f"i-{number // 2}, 10.0.0.{number // 2}")
        for number in range(4)
    }
    assert line(workers).endswith("; rank 3 (i-1, 10.0.0.1) is in load_batch, data.py:88")
    workers[2] = replace(workers[3])
    assert line(workers).endswith("; ranks 2 and 3 (i-1, 10.0.0.1) are in load_batch, data.py:88")


@pytest.mark.parametrize("kind", ["all_reduce", ""], ids=["Gloo", "NCCL"])
def test_number_and_time_are_of_the_last_collective(kind: str) -> None:
    joined = Last(kind, 1841, "0", time.time() - 41.2)
    for frames in (STEP, BACKWARD):
        workers = [replace(rank(*frames), joined=joined) for _ in range(3)]
        assert line([*workers, STUCK]) == (
            "3 ranks wait in all_reduce #1841; rank 3 is in load_batch, data.py:88, for 41 s"
        )
    behind = replace(workers[0], joined=replace(joined, sequence=1840, began=time.time() - 60.2))
    assert line([*workers, behind]) == ("3 ranks wait in all_reduce #1841; rank 3 waits in all_reduce #1840, for 41 s")


NUMBERS = {
    "another kind": Last("all_gather", 1841, "0", 0.0),
    "another group": Last("all_reduce", 7, "1", 0.0),
    "just now": Last("all_reduce", 1842, "0", math.inf),
    "unknown": None,
}


@pytest.mark.parametrize("case", NUMBERS)
def test_number_that_is_not_certain_names_no_rank(case: str) -> None:
    workers = [replace(rank(*STEP), joined=Last("all_reduce", 1841, "0", 0.0)) for _ in range(3)]
    assert line([*workers, replace(workers[0], joined=NUMBERS[case])]) == "all 4 ranks wait in all_reduce, train.py:40"


LOADER = (f"select {TORCH[:-6]}/lib/python3/selectors.py 4", f"next {TORCH}/utils/data/dataloader.py 7", TRAIN)
FORK = ("BaseProcess._bootstrap /usr/lib/python3.13/multiprocessing/process.py 3", *LOADER)
IDLE = ("Queue.get /usr/lib/python3.13/multiprocessing/queues.py 3", f"loop {TORCH}/utils/data/worker.py 5")
JOIN = ("Popen.wait /usr/lib/python3.13/multiprocessing/popen_fork.py 3", TRAIN)
POOL = ("Future.result /usr/lib/python3.13/concurrent/futures/_base.py 3", TRAIN)
READ = f"read {TORCH[:-6]}/fsspec/spec.py 4"
CHILDREN = {
    "data loader": (LOADER, {"pt_data_worker": (*LOAD[:2], *FORK)}, "load_batch, data.py:88, in a data loader worker"),
    "idle workers": (LOADER, {"pt_data_worker": (*IDLE, *FORK)}, "train, train.py:40"),
    "workers in a package": (LOADER, {"pt_data_worker": (READ, *FORK)}, "read, spec.py:4, in a data loader worker"),
    "child": (JOIN, {"python": (*LOAD[:2], *FORK)}, "load_batch, data.py:88, in a child process"),
    "helper": (JOIN, {"python": (READ,)}, "train, train.py:40"),
    "working": ((TRAIN,), {"python": LOAD}, "train, train.py:40"),
}


@pytest.mark.parametrize("case", CHILDREN)
def test_child_that_a_rank_waits_for_belongs_to_it(case: str) -> None:
    frames, children, where = CHILDREN[case]
    own = [process(*stack, pid=11, parent=10, name=name) for name, stack in children.items()]
    assert line([Stacks(processes=(process(*frames), *own)), *[rank(*STEP)] * 2]).endswith(f"; rank 0 is in {where}")


def test_thread_that_a_rank_waits_for_is_named() -> None:
    threads = (thread(*POOL), thread(*IDLE, name="idle"), thread(*LOAD[:2], name="pool"))
    own = ProcessStacks(10, threads=threads)
    child = process(f"other {USER}/other.py 1", pid=11, parent=10)
    sentence = line([Stacks(processes=(own, child)), *[rank(*STEP)] * 2])
    assert sentence.endswith("; rank 0 is in load_batch, data.py:88, in a thread")


def test_processes_of_a_node_have_their_own_ranks() -> None:
    """As with --mpi and with torchrun on each node, whose own process has no rank."""
    launcher = process(f"wait {TORCH}/distributed/elastic/api.py 3", pid=1)
    nodes = [
        Stacks(
            node=f"10.0.0.{node}",
            processes=(
                launcher,
                *(
                    process(*(LOAD if own == 5 else STEP), pid=own, parent=1, rank=own)
                    for own in (4 * node, 4 * node + 1)
                ),
            ),
        )
        for node in range(2)
    ]
    assert line({0: nodes[0], 4: nodes[1]}) == (
        "3 ranks wait in all_reduce, train.py:40; rank 5 (10.0.0.1) is in load_batch, data.py:88"
    )


OWN = "/usr/lib/python3.13/site-packages/ray_on_ecs/checkpoint"
THREADING = "/usr/lib/python3.13/threading.py"
STORE = (f"BackgroundSave._store {OWN}/background.py 4", f"BackgroundSave._run {OWN}/background.py 3")
STORE = (*STORE, f"Thread.run {THREADING} 9", f"Thread._bootstrap {THREADING} 7")
SAVE = (f"Thread.join {THREADING} 1", f"BackgroundSave.wait {OWN}/background.py 8")
SAVE = (*SAVE, f"Checkpointer.save {OWN}/checkpointer.py 3", TRAIN)
AFTER_STEP = (f"Checkpointer.after_step {OWN}/checkpointer.py 4", TRAIN)
POLL = (f"Pace.poll {OWN}/collectives.py 7", *AFTER_STEP)
RECEIVE = (f"Collectives.receive {OWN}/collectives.py 5", *STORE)
WRITE = (f"_write_item {TORCH}/distributed/checkpoint/filesystem.py 8", *STORE)
HEARTBEAT = (f"heartbeat {USER}/train.py 12", f"Thread.run {THREADING} 9", f"Thread._bootstrap {THREADING} 7")
# The threads of a rank, the main thread first, and those of the others; the places of these and of the rank.
SAVES = {
    "user's code": (
        ([LOAD], [(f"Collectives.gather {OWN}/collectives.py 5", *POLL)]),
        ("Checkpointer.after_step, train.py:40", "load_batch, data.py:88"),
    ),
    "decision of rank 0": (
        ([POLL], [(f"Collectives.broadcast {OWN}/collectives.py 5", *POLL)]),
        ("Checkpointer.after_step, train.py:40", "train, train.py:40"),
    ),
    "printed by faulthandler": (
        ([LOAD], [(f"gather {OWN}/collectives.py 5", f"after_step {OWN}/checkpointer.py 3", TRAIN)]),
        ("after_step, train.py:40", "load_batch, data.py:88"),
    ),
    "background": (
        ([SAVE, HEARTBEAT, WRITE], [SAVE, HEARTBEAT, RECEIVE]),
        ("Checkpointer.save, train.py:40", "_write_item, filesystem.py:8, in a thread"),
    ),
    "background that sleeps": (
        ([SAVE, WRITE], [SAVE, (f"Event.wait {THREADING} 1", *RECEIVE)]),
        ("Checkpointer.save, train.py:40", "_write_item, filesystem.py:8, in a thread"),
    ),
    "copy": (
        ([AFTER_STEP], [SAVE, RECEIVE]),
        ("Checkpointer.save, train.py:40", "train, train.py:40"),
    ),
}


@pytest.mark.parametrize("case", SAVES)
def test_rank_that_a_checkpoint_waits_for_is_named(case: str) -> None:
    (odd, others), (waits, place) = SAVES[case]
    joined = Last("", 1841, "0", 0.0)  # of NCCL, before the Checkpointer's own collective
    ranks = [replace(rank_of(*threads), joined=joined) for threads in (others, others, odd)]
    assert line(ranks) == f"2 ranks wait in {waits}; rank 2 is in {place}"


GATHER = f"gather_object {TORCH}/distributed/distributed_c10d.py 3"
WRAPPED = (f"all_reduce {TORCH}/distributed/checkpoint/utils.py 7", f"save {TORCH}/distributed/checkpoint/saver.py 2")
LOAD_STATE = f"_load {TORCH}/distributed/checkpoint/filesystem.py 4"
DOWNLOAD = f"get {TORCH[:-6]}/huggingface_hub/file.py 4"
BROADCAST = f"broadcast {TORCH}/distributed/collective_utils.py 5"
RESULT = (f"Condition.wait {THREADING} 1", *POOL)
OF_POOL = (f"_worker {TORCH[:-20]}/concurrent/futures/thread.py 9", *HEARTBEAT[1:])
DCP = {
    "save": ([(WRITE[0], *WRAPPED, TRAIN)], [(GATHER, *WRAPPED, TRAIN)], "train, train.py:40"),
    "load": ([(LOAD_STATE, TRAIN)], [(GATHER, TRAIN)], "train, train.py:40"),
    "function of a collective": ([(DOWNLOAD, BROADCAST, TRAIN)], [(GATHER, BROADCAST, TRAIN)], "train, train.py:40"),
    "async_save": (
        [RESULT, OF_POOL, (WRITE[0], *WRAPPED, *OF_POOL)],
        [RESULT, OF_POOL, (GATHER, *WRAPPED, *OF_POOL)],
        "_write_item, filesystem.py:8, in a thread",
    ),
}


@pytest.mark.parametrize("case", DCP)
def test_work_before_a_collective_is_not_a_wait(case: str) -> None:
    odd, others, place = DCP[case]
    ranks = [rank_of(*others), rank_of(*others), rank_of(*odd)]
    assert re.fullmatch(rf"2 ranks wait in \w+, train.py:40; rank 2 is in {re.escape(place)}", line(ranks))


BY_AUTOGRAD = (f"hook {USER}/hooks.py 3",)
PINNED = (f"Condition.wait {THREADING} 1", "Queue.get /usr/lib/python3.13/queue.py 3", *LOADER[1:])
RUN = ("Popen.wait /usr/lib/python3.13/subprocess.py 3", TRAIN)
IN_LOADER = "load_batch, data.py:88, in a data loader worker"
# Threads of a rank that waits, the main thread first; the stack of a data loader's worker; the place.
BESIDE = {
    "backward": ((BACKWARD, HEARTBEAT), IDLE, "backward, train.py:40"),
    "backward, with a slow loader": ((BACKWARD,), LOAD[:2], "backward, train.py:40"),
    "hook on autograd's thread": ((BACKWARD, HEARTBEAT, BY_AUTOGRAD), IDLE, "hook, hooks.py:3, in a thread"),
    "idle loader": ((LOADER, HEARTBEAT), IDLE, "train, train.py:40"),
    "loader": ((LOADER, HEARTBEAT), LOAD[:2], IN_LOADER),
    "loader that pins memory": ((PINNED, HEARTBEAT), LOAD[:2], IN_LOADER),
    "loader beside a save": ((LOADER, WRITE), IDLE, "train, train.py:40"),
    "program": ((RUN, HEARTBEAT), IDLE, "train, train.py:40"),
    "child": ((JOIN, HEARTBEAT), IDLE, "train, train.py:40"),
    "save": ((BACKWARD, WRITE), IDLE, "backward, train.py:40"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_thread_that_a_rank_does_not_wait_for_is_not_its_place(case: str) -> None:
    threads, of_worker, place = BESIDE[case]
    own = (*rank_of(*threads).processes, process(*of_worker, *FORK, pid=11, parent=10, name="pt_data_worker"))
    assert f"rank 0 is in {place}" in line([Stacks(processes=own), *[rank(*STEP)] * 2]).split("; ")


def test_rank_outside_backward_is_named_beside_heartbeats() -> None:
    ranks = [rank_of(BACKWARD, HEARTBEAT), rank_of(LOAD, HEARTBEAT)]
    assert line(ranks) == "rank 0 is in backward, train.py:40; rank 1 is in load_batch, data.py:88"
    assert picture(dict(enumerate(ranks)), 60.0).odd_rank == 1


PRINTED = f"""Fatal Python error: Aborted

Thread 0x00007f45abfff6c0 (most recent call first):
  File "/usr/lib/python3.13/threading.py", line 327 in wait

Current thread 0x00007f466fbc8b80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3913 in all_reduce
  File "{USER}/train.py", line 40 in train

Extension modules: numpy
"""


def test_printed_stacks_replace_those_that_can_not_be_read() -> None:
    assert [thread.name for thread in in_words(PRINTED)] == ["MainThread", ""]
    without_ptrace = replace(rank(fault="no ptrace"), words=PRINTED)
    assert line([without_ptrace, without_ptrace]) == "all 2 ranks wait in all_reduce, train.py:40"


def test_text_has_equal_stacks_once_and_the_odd_one_first() -> None:
    text = picture(dict(enumerate([rank(*STEP), rank(*STEP), STUCK, rank(*STEP), rank(*STEP)])), 60.0).text()
    assert [line for line in text.splitlines() if line.startswith("rank")] == [
        "rank 2: load_batch, data.py:88",
        "ranks 0, 1, 3 and 4: all_reduce, train.py:40",
    ]
    assert text.count(f"    {frame(STEP[0])}") == 1
