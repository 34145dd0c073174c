"""Script of two ranks that join what the flight recorder may have to tell apart; each look is a line of JSON."""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANK, FOLDER = int(os.environ["RANK"]), Path(sys.argv[1])
flight_recorder: Any = importlib.import_module("ray_on_ecs_flight_recorder")
reader = flight_recorder.Reader(str(FOLDER / f"rank-{RANK}"))
value = torch.ones(1)


def look() -> None:
    """Print the last reading."""
    reader._look_at = reader._due = 0.0
    reader.look(time.time())
    print((FOLDER / f"rank-{RANK}" / f"collectives-{RANK}.json").read_text(), flush=True)


def begin(name: str) -> None:
    """Make the default process group."""
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/{name}", rank=RANK, world_size=2)


print(json.dumps(reader.look(time.time())), flush=True)
begin("first")
for _ in range(3):
    dist.all_reduce(value)
look()
groups: Any = [dist.new_group([rank]) for rank in range(2)]
both: Any = dist.new_group([0, 1])
dist.broadcast(value, 0, group=both)
dist.all_reduce(value, group=groups[RANK])
dist.send(value, 1) if RANK == 0 else dist.recv(value, 0)
dist.barrier()
look()
look()
if RANK == 0:
    work: Any = dist.all_reduce(value, async_op=True)
    look()
    (FOLDER / "has-looked").touch()
    work.wait()
else:
    while not (FOLDER / "has-looked").exists():
        time.sleep(0.01)
    dist.all_reduce(value)
    look()
dist.barrier()
dist.destroy_process_group()
begin("second")
dist.all_reduce(value)
look()
