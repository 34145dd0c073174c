"""Reader of the collectives that a script's process joins, in this process; standard library only.

`import torch` calls `start` as an extension that it loads by itself (see `collectives.install`). A thread then writes
what this rank has joined to a file in the folder of the process, every few seconds. All of it goes through private
names of PyTorch, which are here alone; where one is missing, the thread ends and the script knows nothing of it.

With Gloo it reads PyTorch's flight recorder, which has the time and the name of each collective. With NCCL a dump of
that would query the events of kernels, and end a capture of a CUDA graph in another thread by an error
(https://github.com/pytorch/pytorch/pull/104555). So there the thread looks at the groups' counters, 100 times a second
at multiples of 10 ms, at which the other ranks look, too.
"""

from __future__ import annotations

import atexit
import json
import os
import re
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
TICK_SECONDS = 0.01
END_SECONDS = 5.0
SAMPLED = ("nccl",)  # backends whose counters are looked at
# A reading of 2000 collectives takes 20 ms of CPU time. It may take this share of the time, else the interval doubles.
SHARE = 0.005
# The most collectives of one reading: the driver compares those of all ranks.
MOST, LEAST, OF_ALL_RANKS = 400, 50, 2000
ENTRY = re.compile(rb'\{"collective_seq_id":')  # the beginning of an entry, whose keys are sorted
_lock = threading.Lock()  # held during a look


def start() -> None:
    """Start the thread, under `ray-on-ecs run`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not hasattr(os, "register_at_fork"):
        return
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(folder, stop), name="ray-on-ecs flight recorder", daemon=True)

    def end() -> None:  # a thread in PyTorch's code while Python ends would end the process by an error
        stop.set()
        thread.join(END_SECONDS)

    atexit.register(end)
    # A child that is forked during a look would inherit a lock of the recorder that nothing opens.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    thread.start()


def _run(folder: str, stop: threading.Event) -> None:
    reader = Reader(folder)
    try:
        while not stop.wait(reader.pause - time.time() % reader.pause):
            with _lock, suppress(OSError):  # a full disk
                reader.tick(time.time())
                reader.look(time.time())
    except Exception:
        pass  # such as another version of PyTorch: the script must not see it


class Reader:
    """The state of the reader in this process."""

    def __init__(self, folder: str) -> None:
        self.pause = LOOK_SECONDS  # between its looks
        self._folder = folder
        self._number = 0
        self._last: dict[str, Any] | None = None
        self._arrivals: list[tuple[str, int, float]] = []
        self._p2p = 0
        self._groups: dict[str, list[int]] = {}
        self._backends: dict[str, str] = {}  # by group
        self._record = -1  # the last one of the recorder that was read
        self._sequences: dict[str, tuple[int, int, int]] = {}  # by group: last number, new beginnings, others
        self._status, self._read_status = b"", b""
        self._looks = 0  # since the status has changed
        self._look_at = self._due = 0.0
        self._seconds = READ_SECONDS

    def tick(self, now: float) -> None:
        """Look at the counters of the groups whose backend is sampled; each collective since the last look is new."""
        for name, group in _groups() if self.pause == TICK_SECONDS else ():
            if self._backends.get(name) in SAMPLED:
                count = group._get_sequence_number_for_group()
                key = f"{self._backends[name]}/{name}"
                before, times, _ = self._sequences.get(key, (count, 0, 0))
                if count < before:
                    before, times = 0, times + 1
                self._sequences[key] = (count, times, 0)
                for sequence in range(max(before, count - MOST) + 1, count + 1):
                    self._arrivals.append((f"{key}/{times}", sequence, now))
                    self._last = _last("", sequence, name, now)

    def look(self, now: float) -> None:
        """Write what is new if that is due, or if this rank has stopped joining collectives."""
        distributed = sys.modules.get("torch.distributed")
        if now < self._look_at or distributed is None or not distributed.is_available():
            return
        self._look_at = (now // LOOK_SECONDS + 1) * LOOK_SECONDS
        if not distributed.is_initialized():
            return
        backends = {name: str(distributed.get_backend(group)) for name, group in _groups()}
        self._backends = {name: "nccl" if "nccl" in backend else "gloo" for name, backend in backends.items()}
        self.pause = TICK_SECONDS if set(SAMPLED) & set(self._backends.values()) else LOOK_SECONDS
        status = _dump(includeCollectives=False)
        self._looks = self._looks + 1 if status == self._status else 0
        self._status = status
        if now < self._due and (status == self._read_status or self._looks < STILL_LOOKS):
            return
        began = time.thread_time()
        self._read()
        self._write(distributed)
        self._read_status = status
        while time.thread_time() - began > SHARE * self._seconds:
            self._seconds *= 2
        self._due = (now // self._seconds + 1) * self._seconds

    def _read(self) -> None:
        """Read the new collectives of Gloo, whose recorder may have been reset."""
        found = json.loads(_newest(_dump())).get("entries") if "gloo" not in SAMPLED else []
        if found:
            newest = max(entry["record_id"] for entry in found)
            read, self._record = self._record if newest >= self._record else -1, newest
            for entry in found:
                if entry["record_id"] > read:
                    self._take(entry)

    def _write(self, distributed: Any) -> None:
        """Write what is new."""
        self._number += 1
        rank, size = distributed.get_rank(), distributed.get_world_size()
        for name, group in _groups():
            for key in {key for key, _, _ in self._arrivals if _name(key) == name} - self._groups.keys():
                self._groups[key] = list(distributed.get_process_group_ranks(group))
        document = {
            "rank": rank,
            "number": self._number,
            "p2p": self._p2p,
            "groups": self._groups,
            "arrivals": self._arrivals[-max(min(MOST, OF_ALL_RANKS // size), LEAST) :],
            "last": self._last,
        }
        self._arrivals, self._p2p = [], 0
        path = os.path.join(self._folder, FILES.format(rank))
        with open(f"{path}.new", "w") as file:
            json.dump(document, file)
        os.replace(f"{path}.new", path)

    def _take(self, entry: dict[str, Any]) -> None:
        """Take a collective; a group of the same name that was made again counts from 1 again."""
        name, sequence = entry["process_group"][0], entry["collective_seq_id"]
        before, times, others = self._sequences.get(f"gloo/{name}", (0, 0, 0))
        if sequence <= before:
            times += 1
        else:  # sends and receives are not noted, but counted among the operations
            self._p2p += max(entry["op_id"] - sequence - others, 0)
        self._sequences[f"gloo/{name}"] = (sequence, times, entry["op_id"] - sequence)
        began = entry["time_created_ns"] / 1e9
        self._arrivals.append((f"gloo/{name}/{times}", sequence, began))
        self._last = _last(entry["profiling_name"].rpartition(":")[2].strip("_"), sequence, name, began)


def _name(key: str) -> str:
    """Return the group's name in `backend/name/new beginnings`."""
    return key.partition("/")[2].rpartition("/")[0]


def _last(kind: str, sequence: int, group: str, began: float) -> dict[str, Any]:
    return {"kind": kind, "sequence": sequence, "group": group, "began": began}


def _dump(**options: bool) -> bytes:
    """Return the flight recorder of Gloo as JSON."""
    return sys.modules["torch._C._distributed_c10d"]._dump_fr_trace_json(**options)


def _newest(dump: bytes) -> bytes:
    """Return a dump with its last entries alone, which are the newest: to parse all takes as long as the dump."""
    begins = [found.start() for found in ENTRY.finditer(dump)]
    return dump[: begins[0]] + dump[begins[-MOST] :] if len(begins) > MOST else dump


def _groups() -> list[tuple[str, Any]]:
    """Return the process groups of this rank, with their names."""
    groups = sys.modules["torch.distributed.distributed_c10d"]._world.pg_names
    return [(name, group) for group, name in list(groups.items())]
