"""Reader of PyTorch's flight recorder in a script's own process; standard library only.

`import torch` calls `start` as an extension that it loads by itself (see `collectives.install`). A thread then writes
the collectives that this rank has joined to a file in the folder of the process, every few seconds: always the last
one, and now and then all new ones. It reads the recorder of NCCL and Gloo through private names of PyTorch, which are
here alone; where one is missing, or anything else fails, the thread ends and the script knows nothing of it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

FOLDER_VARIABLE = "RAY_ON_ECS_SDK_DIR"  # of ray_on_ecs.sdk, which may not be installed here
FILES = "collectives-{}.json"
LOOK_SECONDS = 2.0
# All ranks read at multiples of this, by the clock: a reading holds up the script, and so it does once for all ranks.
READ_SECONDS = 4
STILL_LOOKS = 2  # with nothing new, after which a rank counts as waiting, and its last collective is read
# A reading of 2000 collectives takes 30 ms of CPU time. It may take this share of the time, else the interval doubles.
SHARE = 0.005
# The most collectives of one reading: the driver compares those of all ranks.
MOST, LEAST, OF_ALL_RANKS = 400, 50, 2000
_lock = threading.Lock()  # held during a look


def start() -> None:
    """Start the thread, under `ray-on-ecs run`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not hasattr(os, "register_at_fork"):
        return
    stop = threading.Event()
    atexit.register(stop.set)
    # A child that is forked during a look would inherit a lock of the recorder that nothing opens.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    threading.Thread(target=_run, args=(folder, stop), name="ray-on-ecs flight recorder", daemon=True).start()


def _run(folder: str, stop: threading.Event) -> None:
    reader = Reader(folder)
    try:
        while not stop.wait(LOOK_SECONDS - time.time() % LOOK_SECONDS):
            with _lock, suppress(OSError):  # a full disk
                reader.look(time.time())
    except Exception:
        pass  # such as another version of PyTorch: the script must not see it


class Reader:
    """What this process has read of its flight recorder so far."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._number = 0
        self._last: dict[str, Any] | None = None
        self._arrivals: list[tuple[str, int, float]] = []
        self._p2p = 0
        self._groups: dict[str, list[int]] = {}
        self._records: dict[str, int] = {}  # by recorder, the last one that was read
        self._sequences: dict[str, tuple[int, int, int]] = {}  # by group: last number, new beginnings, others
        self._status, self._read_status = b"", b""
        self._looks = 0  # since the status has changed
        self._due = 0.0
        self._seconds = READ_SECONDS

    def look(self, now: float) -> None:
        """Read all new collectives if that is due, or if this rank has joined others and does not go on."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        status = b"".join(dump(includeCollectives=False) for dump in _dumps().values())
        self._looks = self._looks + 1 if status == self._status else 0
        self._status = status
        if now < self._due and (status == self._read_status or self._looks < STILL_LOOKS):
            return
        began = time.thread_time()
        self._read(distributed)
        self._read_status = status
        while time.thread_time() - began > SHARE * self._seconds:
            self._seconds *= 2
        self._due = (now // self._seconds + 1) * self._seconds

    def _read(self, distributed: Any) -> None:
        """Read the new collectives, and write them."""
        entries: list[tuple[str, dict[str, Any]]] = []
        for recorder, dump in _dumps().items():
            found = json.loads(dump()).get("entries") or []
            if found:
                read = self._records.get(recorder, -1)
                newest = self._records[recorder] = max(entry["record_id"] for entry in found)
                is_reset = newest < read
                entries += [(recorder, entry) for entry in found if is_reset or entry["record_id"] > read]
        entries.sort(key=lambda pair: pair[1]["time_created_ns"])
        self._arrivals, self._p2p = [], 0
        for recorder, entry in entries:
            if entry["is_p2p"]:
                self._p2p += 1
            else:
                self._take(recorder, entry)
        self._number += 1
        rank, size = distributed.get_rank(), distributed.get_world_size()
        for key in {key for key, _, _ in self._arrivals} - self._groups.keys():
            self._groups[key] = _ranks(distributed, key.split("/")[1])
        most = max(min(MOST, OF_ALL_RANKS // size), LEAST)
        document = {
            "rank": rank,
            "number": self._number,
            "p2p": self._p2p,
            "groups": self._groups,
            "arrivals": self._arrivals[-most:],
            "last": self._last,
        }
        path = os.path.join(self._folder, FILES.format(rank))
        with open(f"{path}.new", "w") as file:
            json.dump(document, file)
        os.replace(f"{path}.new", path)

    def _take(self, recorder: str, entry: dict[str, Any]) -> None:
        """Take a collective; a group of the same name that was made again counts from 1 again."""
        name, sequence = entry["process_group"][0], entry["collective_seq_id"]
        group = f"{recorder}/{name}"
        before, times, others = self._sequences.get(group, (0, 0, 0))
        if sequence <= before:
            times += 1
        elif recorder == "gloo":  # it notes no sends and receives, but counts them among the operations
            self._p2p += max(entry["op_id"] - sequence - others, 0)
        self._sequences[group] = (sequence, times, entry["op_id"] - sequence)
        began = entry["time_created_ns"] / 1e9
        self._arrivals.append((f"{group}/{times}", sequence, began))
        self._last = {
            "kind": entry["profiling_name"].rpartition(":")[2].strip("_").removesuffix("_base"),
            "sequence": sequence,
            "group": name,
            "began": began,
            "is_done": entry["state"] == "completed" or bool(entry["retired"]),
        }


def _dumps() -> dict[str, Any]:
    """Return the functions that dump a flight recorder, by the backend that it is of."""
    of_torch = sys.modules["torch._C._distributed_c10d"]
    names = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    return {backend: getattr(of_torch, name) for backend, name in names.items() if hasattr(of_torch, name)}


def _ranks(distributed: Any, name: str) -> list[int]:
    """Return the ranks of a process group; none if it has been destroyed."""
    for group, its_name in list(distributed.distributed_c10d._world.pg_names.items()):
        if its_name == name:
            return list(distributed.get_process_group_ranks(group))
    return []
