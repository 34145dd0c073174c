"""Ranks on this machine, whose collectives are compared as the driver of a run does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ray_on_ecs import sdk
from ray_on_ecs.run import collectives
from ray_on_ecs.run.group import Place
from ray_on_ecs.run.slow_ranks import LOOK_SECONDS, SlowRanks
from ray_on_ecs.tracking.slow_ranks import SlowTime, Wait

SCRIPT = Path(__file__).with_name("slow_rank_script.py")
POLL_SECONDS = 0.5
SAMPLED = ('SAMPLED = ("nccl",)', 'SAMPLED = ("nccl", "gloo")')


@dataclass(frozen=True)
class Outcome:
    """The end of some ranks.

    Attributes:
        statuses: Their exit statuses.
        times: The times with a slow rank.
        waits: How much each rank waits.
        last: The last collective of each rank.
    """

    statuses: list[int]
    times: list[SlowTime]
    waits: list[Wait]
    last: list[collectives.Last | None]


def run(
    case: str,
    folder: Path,
    *,
    count: int = 4,
    slow: int = 1,
    seconds: float = 45,
    sampled: bool = False,
    until: str = "",
) -> Outcome:
    """Run some ranks of the script to their end, and compare them meanwhile; `sampled` reads Gloo as if it was NCCL.

    They train for some seconds, or until this rank (`rank 1`) is named.
    """
    folders = [folder / f"rank-{rank}" for rank in range(count)]
    processes = [_start(case, folders[rank], rank, count, slow, seconds, sampled) for rank in range(count)]
    times: list[SlowTime] = []
    slow_ranks = SlowRanks(times)

    def take() -> None:
        for reading in (reading for folder in folders for reading in collectives.readings(folder)):
            slow_ranks.take(reading, Place(), 0.0)

    try:
        while any(process.poll() is None for process in processes):
            time.sleep(POLL_SECONDS)
            take()
            slow_ranks.look(time.time(), None)
            if until and any(until == each["what"].partition(" comes")[0] for each in times):
                (folder / "over").touch()
        take()
        slow_ranks.look(time.time() + LOOK_SECONDS, None)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    last = [collectives.last(folder) for folder in folders]
    return Outcome([process.wait() for process in processes], times, slow_ranks.waits, last)


def _start(
    case: str, folder: Path, rank: int, count: int, slow: int, seconds: float, sampled: bool
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    path = collectives.install(folder)
    if sampled:
        code = path / f"{collectives.NAME}.py"
        code.write_text(code.read_text().replace(*SAMPLED))
    environment = {
        **os.environ,
        "TORCH_FR_BUFFER_SIZE": "2000",
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "PYTHONPATH": str(path),
        sdk.FOLDER_VARIABLE: str(folder),
    }
    command = [sys.executable, str(SCRIPT), case, str(slow), str(seconds), str(folder.parent)]
    return subprocess.Popen(command, env=environment, start_new_session=True)
