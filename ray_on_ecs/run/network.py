"""Workers' part in the measurement of the network between nodes, before their script starts.

Each worker with a GPU takes part, as its script does: on large instances each GPU has its own network interfaces.
Without GPUs the first worker of each node does. A worker that takes part starts network_probe.py with the script's
interpreter and variables, so NCCL finds the same libraries, devices and settings.
"""

from __future__ import annotations

import re
import signal
import tempfile
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray_on_ecs.errors import one_line
from ray_on_ecs.run.collectives import AUTOLOAD
from ray_on_ecs.run.environment import ScriptEnvironment
from ray_on_ecs.run.group import NetworkStatus, Peer, WorkerRank
from ray_on_ecs.run.nccl_log import SOCKETS, Transport, transport_in
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess

PROBE = Path(__file__).with_name("network_probe.py")
RESULT = re.compile(r"seconds of an all-reduce: ([\d.e+-]+)$")  # the probe's last line
BYTES = 2**28
# INIT and NET have the lines on the network, and ENV those on variables that choose it. NCCL opens the file again and
# writes it by lines; its own standard output would keep them while NCCL hangs. By trees, which NCCL often takes on two
# nodes, a node sends less than by rings: https://github.com/NVIDIA/nccl-tests/issues/196
NCCL = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
    "NCCL_DEBUG_FILE": "/dev/stdout",
    "NCCL_ALGO": "Ring",
}
INFO = "NCCL INFO"


@dataclass(frozen=True)
class Part:
    """A worker's part: its rank among those that take part, and the address of their store."""

    host: str
    port: int
    rank: int
    ranks: int
    local_rank: int  # -1 without GPUs


def part_of(rank: WorkerRank, peers: Sequence[Peer], *, use_gpu: bool) -> Part | None:
    """Return the part of a worker; None without one."""
    host, port = peers[0].host, peers[0].port
    if use_gpu:
        return Part(host, port, rank.rank, rank.world_size, rank.local_rank)
    nodes = len({peer.node_rank for peer in peers})
    return Part(host, port, rank.node_rank, nodes, -1) if rank.local_rank == 0 else None


class Probe:
    """A worker's process of the measurement; None without a part."""

    def __init__(self, process: ScriptProcess | None, lines: Sequence[str], gloo: Transport | None) -> None:
        self._process = process
        self._lines = lines
        self._gloo = gloo

    def look(self, seconds: float) -> NetworkStatus:
        """Wait for the end, at most so long; return the status."""
        if self._process is None:
            return NetworkStatus(has_ended=True)
        status = self._process.wait(seconds)
        lines = [*self._lines]
        transport = self._gloo or transport_in(lines)
        if status is None:
            return NetworkStatus(transport)
        if status != 0:  # NCCL's last line is of its start, and not of the failure
            self._process.last_lines = deque(line for line in lines if INFO not in line)
            words = self._process.last_words.text
            if status < 0:
                words = f"signal {-status} ({signal.strsignal(-status)}){words and ': '}{words}"
            return NetworkStatus(transport, failure=one_line(words or f"exit status {status}"), has_ended=True)
        taken = [float(found[1]) for line in lines if (found := RESULT.search(line.rstrip()))]
        return NetworkStatus(transport, seconds=sum(taken), has_ended=True)


@contextmanager
def probing(part: Part | None, environment: ScriptEnvironment, lock: Path) -> Generator[Probe]:
    """Start a worker's part, which ends with the block at the latest."""
    if part is None:
        yield Probe(None, (), None)
        return
    with tempfile.TemporaryDirectory(prefix="ray-on-ecs-network-") as folder:
        # The collectives of the script are read, and not these.
        variables = environment.variables({AUTOLOAD: "0"}, Path(folder)) | NCCL
        interface = variables.get("GLOO_SOCKET_IFNAME")
        gloo = Transport("Gloo", SOCKETS, 1, (interface,) if interface else ())
        lines: list[str] = []
        numbers = (part.port, part.rank, part.ranks, part.local_rank, BYTES)
        # -P leaves the modules beside the probe out, and the user's packages and PYTHONPATH in.
        argv = (environment.python, "-P", str(PROBE), part.host, *map(str, numbers))
        with ScriptProcess(argv, ProcessOptions(variables, environment.folder, lines.append, lock)) as process:
            yield Probe(process, lines, gloo if part.local_rank < 0 else None)
