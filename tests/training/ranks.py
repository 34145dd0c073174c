"""The ranks of the tests' runs: processes that stay, forked from one with torch, whose import takes longer than a test.

Each call has a process group of its own.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 480.0
FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"])


class Ranks:
    """Calls functions on several ranks at once; a context, at whose end their processes end."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._lines: list[Connection] = []

    def __call__(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, ranks, *arguments)` returns on each rank, with gloo between them; rank 0's comes first.

        Raises:
            AssertionError: A rank failed, with its traceback, or none had an answer in time.
        """
        while len(self._lines) < ranks:
            self._add()
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            lines = self._lines[:ranks]
            for rank, line in enumerate(lines):
                self._send(line, (function, rank, ranks, Path(folder) / "rendezvous", arguments))
            answers: dict[Connection, Any] = {}
            while waiting := [line for line in lines if line not in answers]:
                if not (ready := wait(waiting, SECONDS)):
                    self._fail("a rank hangs")
                answers |= {line: self._answer(line) for line in ready if isinstance(line, Connection)}
        return [answers[line] for line in lines]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines:
            self._send(line, None)
        for process in self._processes:
            process.join(SECONDS)
        ended = [process.exitcode for process in self._processes]
        self._end()
        assert ended == [0] * len(ended), f"ranks ended with {ended}: what a run leaves behind brings its process down"

    def _add(self) -> None:
        mine, theirs = mp.Pipe()
        process = FORKED.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._lines.append(mine)

    def _send(self, line: Connection, call: object) -> None:
        try:
            line.send(call)
        except OSError:
            self._fail(f"a rank ended since the last test: {[process.exitcode for process in self._processes]}")

    def _answer(self, line: Connection) -> Any:
        try:
            failed, answer = line.recv()
        except EOFError:
            failed, answer = True, "a rank's process ended"
        if failed:
            self._fail(answer)
        return answer

    def _fail(self, why: str) -> NoReturn:
        """The others wait for the one that failed: the next call has new processes."""
        self._end()
        raise AssertionError(why)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._lines = [], []


def _serve(line: Connection) -> None:
    torch.set_num_threads(1)
    while call := line.recv():
        try:
            line.send((False, _called(*call)))
        except Exception:
            line.send((True, traceback.format_exc()))


def _called(function: Callable[..., Any], rank: int, ranks: int, rendezvous: Path, arguments: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        answer = function(rank, ranks, *arguments)
        dist.barrier()  # a rank that is done must not close its connections while another one still makes them
        return answer
    finally:
        dist.destroy_process_group()
