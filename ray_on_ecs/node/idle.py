"""Idle time of a head that sleeps, and the checks for what keeps it awake.

The head publishes its idle time each minute (node/metrics.py), and an alarm of the stack stops a head that has been
idle for long (infra/definitions/sleep.py). Two threads look for work. The desk knows of runs, requests, logs and
secrets. This one knows of Ray's jobs and nodes, of connections, and of processes that people have started in the
container. What can't be found out counts as work.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from ray_on_ecs.contract import CLOUDWATCH_NAMESPACE_VARIABLE, NOTEBOOK_PORT, SLEEP_VARIABLE
from ray_on_ecs.errors import one_line
from ray_on_ecs.jobs.documents import Wake
from ray_on_ecs.node import ports, resource_state
from ray_on_ecs.node.outage import Outage

logger = logging.getLogger(__name__)

DESK, MACHINE = "desk", "machine"
LOOK_SECONDS = 10.0
# A thread that has not looked for so long hangs, and what it would see is not known.
HANG_SECONDS = 60.0
PROC = Path("/proc")
# States of a TCP connection that is open, or that this side has closed within the last minute, such as a browser's.
# https://docs.kernel.org/networking/proc_net_tcp.html
OPEN_STATES = ("01", "06")
HEALTH_CHECK = "ray-health"
START_TIME = 19  # its place in /proc/PID/stat after the name


def wake_of_environment() -> Wake | None:
    """Return what wakes this head, by its container's variables; None if it does not sleep."""
    names = (CLOUDWATCH_NAMESPACE_VARIABLE, "AWS_REGION", SLEEP_VARIABLE)
    namespace, region, minutes = (os.environ.get(name, "") for name in names)
    with suppress(ValueError):
        if namespace and region and float(minutes or 0) > 0:
            return Wake(namespace, region, float(minutes))
    return None


class Idle:
    """Idle time of this head, by the notes of the threads (`sources`) that look for work."""

    def __init__(self, sources: Collection[str] = (DESK, MACHINE), now: Callable[[], float] = time.monotonic) -> None:
        self._sources, self._now = sources, now
        self._busy_at = now()
        self._noted_at: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._lock = threading.Lock()
        self._outage = Outage("idle: a look for work")

    def note(self, source: str, reason: str) -> None:
        """Note that a thread has looked, and the reason why the head is busy; an empty one if it is not."""
        with self._lock:
            self._noted_at[source] = self._now()
            if reason:
                self._busy_at = self._now()
            if reason != self._reasons.get(source):
                logger.debug(f"idle: the {source} finds {reason or 'nothing'}")
            self._reasons[source] = reason

    @property
    def minutes(self) -> float:
        """The idle time in minutes, 0 while the head is busy or a thread does not look."""
        with self._lock:
            now = self._now()
            late = [each for each in self._sources if now - self._noted_at.get(each, -math.inf) > HANG_SECONDS]
            if late:
                self._busy_at = now
            hung = [each for each in late if each in self._noted_at]  # the others are starting
            self._outage.note(f"the thread of the {hung[0]} hangs" if hung else None, now)
            return round((now - self._busy_at) / 60, 2)

    @property
    def is_busy(self) -> bool:
        """True for a busy head, whose idle time is some seconds between two looks."""
        return 60 * self.minutes < 2 * LOOK_SECONDS


@dataclass(frozen=True)
class Sleep:
    """Sleep of this head."""

    wake: Wake
    idle: Idle
    request: Callable[[], None]  # publishes a request for the next head; any error if that fails


def start(idle: Idle, any_under_way: Callable[[], bool], is_up: threading.Event) -> None:
    """Start the thread that looks at this machine once Ray is up; it ends with this process."""
    processes = Processes(PROC)
    checks = {
        "the jobs": lambda: "a job is under way" if any_under_way() else "",
        "the nodes": lambda: beside_the_head(resource_state.read_nodes(ports.own_gcs())),
        "the connections": lambda: connection(PROC),
        "the processes": processes.reason,
    }
    threading.Thread(target=watch, args=(idle, checks, is_up), name="idle", daemon=True).start()


def watch(idle: Idle, checks: Mapping[str, Callable[[], str]], is_up: threading.Event) -> None:
    """Check until the process ends, and print when a check begins to fail for long, and its end."""
    is_up.wait()
    outage = Outage("idle: a check, so that this head stays awake,")
    while True:
        reason, failure = look(checks)
        idle.note(MACHINE, reason or failure)
        outage.note(failure or None, time.monotonic())
        time.sleep(LOOK_SECONDS)


def look(checks: Mapping[str, Callable[[], str]]) -> tuple[str, str]:
    """Return the first reason why the head is busy, or the failure of a check; both are empty if it is idle."""
    for name, check in checks.items():
        try:
            if reason := check():
                return reason, ""
        except Exception as cause:
            return "", one_line(f"{name} can't be read: {type(cause).__name__}: {cause}")
    return "", ""


def beside_the_head(nodes: Sequence[object]) -> str:
    """Return the reason of Ray's nodes that are alive; ValueError if the head itself is not among them."""
    if not nodes:
        raise ValueError("Ray does not list the head")
    return "Ray has workers" if len(nodes) > 1 else ""


def connection(proc: Path) -> str:
    """Return the reason of a connection to the dashboard or the notebook."""
    tables = (proc / "net" / "tcp", proc / "net" / "tcp6")  # the second is missing without IPv6
    text = tables[0].read_text() + (tables[1].read_text() if tables[1].exists() else "")
    visitor = next(visitors(text, (ports.DASHBOARD, NOTEBOOK_PORT)), "")
    return f"{visitor} is connected" if visitor else ""


def visitors(table: str, own_ports: Collection[int]) -> Iterator[str]:
    """Yield the other machines that are connected to one of these ports, in the tables of /proc/net/tcp and tcp6."""
    for line in table.splitlines():
        words = line.split()
        if len(words) < 4 or words[3] not in OPEN_STATES:  # a header, or another state
            continue
        (local, port), (remote, _) = map(_endpoint, words[1:3])
        if port in own_ports and remote != local and not ip_address(remote).is_loopback:
            yield remote


def _endpoint(text: str) -> tuple[str, int]:
    """Return address and port of `0100007F:2049`: words of four bytes, each in the order of a little-endian machine."""
    host, _, port = text.partition(":")
    words = bytes.fromhex(host)
    address = ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), int(port, 16)


class Processes:
    """Processes that `docker exec` has started, such as a shell, or that have a terminal.

    One counts once two looks in a row find it: the health check has its name only after its execve.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._found: set[tuple[str, str]] = set()

    def reason(self) -> str:
        """Look at the processes, and return the reason of one of them."""
        before, self._found = self._found, set(from_outside(self._proc))
        both = before & self._found
        return f"process {min(both)[0]} was started from outside" if both else ""


def from_outside(proc: Path) -> Iterator[tuple[str, str]]:
    """Yield the ID and the start time of each process that was started from outside."""
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                stat = (folder / "stat").read_text(errors="replace")  # the name may end within a character
                if is_from_outside(stat, (folder / "cmdline").read_text(errors="replace").split("\0")):
                    yield folder.name, stat.rpartition(")")[2].split()[START_TIME]


def is_from_outside(stat: str, command: Sequence[str]) -> bool:
    """Return True for a process whose parent is not in the container, or with a terminal, as below a tmux.

    The first process of the container has such a parent, too, and so has the health check.
    https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    """
    before, _, after = stat.rpartition(")")  # the name of a program may have spaces
    state, parent, _, _, terminal = after.split()[:5]
    if before.split()[0] == "1" or state in "ZX" or any(Path(word).name == HEALTH_CHECK for word in command[:2]):
        return False
    return parent == "0" or terminal != "0"
