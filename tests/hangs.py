"""Hangs of one rank among several (hanging_script.py), and the sentence that names it."""

import os
import re
import socket
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ray_on_ecs.run.process import ProcessOptions, ScriptProcess
from ray_on_ecs.run.stacks import Stacks
from ray_on_ecs.run.stuck import Picture, picture
from tests.waiting import until

SCRIPT = Path(__file__).with_name("hanging_script.py")
# What the sentence says of the rank that hangs.
CASES = {
    "loader": "is in load_batch, hanging_script.py:..?, in a data loader worker",
    "lock": "is in lock, hanging_script.py:..?",
    "mismatch": "waits in broadcast, hanging_script.py:..?.?",
    "exit": "has ended with exit status 0",
    "import": "is in again, deadlock.py:3, in a thread",
    "S3": "is in read_shard, hanging_script.py:..?",
    "disk": "is in save, hanging_script.py:..?",
    "gc": "is in collect, hanging_script.py:..?",
    "input": "is in ask, hanging_script.py:..?",
    "recursion": "is in visit, hanging_script.py:..?",
    "subprocess": "is in convert, hanging_script.py:..?",
    "stop": "is stopped by a signal .*",
    "DNS": "is in resolve, hanging_script.py:..?.?",
    "open": "is in open_file, hanging_script.py:..?.?",
    "tqdm": "is in show, hanging_script.py:..?.?",
    "hook": "is in hook, hanging_script.py:..?.?",
    "barrier": "waits in barrier, hanging_script.py:..?.?",
    "pool": "is in download, hanging_script.py:..?.?, in a thread",
    "fork": "is in log_line, hanging_script.py:..?.?, in a child process",
    "loop": "is in spin, hanging_script.py:..?.?",
    "validate": "is in validate, hanging_script.py:..?.?",
    "write": "is in write_part, hanging_script.py:..?.?, in a thread",
}
# The others wait for these in a Checkpointer.
OF_CHECKPOINTER = ("validate", "write")
# The others wait for these in the backward pass of DistributedDataParallel.
OF_DDP = ("hook", "loader", "lock", "recursion", "stop", "disk", "pool")


class Hang:
    """The ranks of a hang."""

    def __init__(self, processes: list[ScriptProcess], lines: list[str]) -> None:
        self.processes, self.lines = processes, lines

    def picture(self) -> Picture:
        """Return where the ranks are."""
        ended = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return picture(
            {
                rank: Stacks(processes=process.dump())
                if ended[rank] is None
                else f"has ended with exit status {ended[rank]}"
                for rank, process in enumerate(self.processes)
            },
            silent_seconds=60.0,
        )

    def wait_for(self, sentence: str, seconds: float) -> str:
        """Wait for a sentence; return the last one."""
        said = ""

        def has_come() -> bool:
            nonlocal said
            said = str(self.picture())
            return re.fullmatch(sentence, said) is not None

        until(has_come, seconds, lambda: f"{said}\n{''.join(self.lines)}")
        return said


def sentence(case: str, ranks: int, odd: int) -> str:
    """Return the pattern of the sentence about a hang."""
    others = "are in backward" if case in OF_DDP else "wait in all_reduce"
    others = "wait in init_process_group" if case == "exit" else others
    others = "wait in Checkpointer.after_step" if case in OF_CHECKPOINTER else others
    return rf"{ranks - 1} ranks {others}, hanging_script\.py:\d+; rank {odd} {CASES[case]}"


@contextmanager
def hanging(case: str, ranks: int, odd: int, folder: Path) -> Generator[Hang]:
    """Start the ranks of a hang, and end them with the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"HANG": case, "HANG_RANK": str(odd), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    common |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "HANG_DDP": "1" if case in OF_DDP else ""}
    common |= {"PYTHONPATH": str(SCRIPT.parents[1])}  # else tests/ray_on_ecs is found first
    lines: list[str] = []
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            options = ProcessOptions({**os.environ, **common, "RANK": str(rank)}, folder, lines.append)
            processes.append(stack.enter_context(ScriptProcess([sys.executable, "-u", str(SCRIPT)], options)))
        yield Hang(processes, lines)
