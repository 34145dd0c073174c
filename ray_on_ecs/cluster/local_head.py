"""Local Ray head, which `ray-on-ecs run --local` starts for Ray programs, and which ends with the last one.

Each Python environment has a separate head, because tasks run in the head's environment. A file in `~/.ray-on-ecs`
stores its address and token.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import psutil
from filelock import FileLock

from ray_on_ecs.cluster.head import Head
from ray_on_ecs.config import LOCAL_VARIABLE
from ray_on_ecs.errors import DISK_FULL, ResourceError, UsageError, one_line
from ray_on_ecs.jobs.driver_parent import identity
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.processes import environment
from ray_on_ecs.jobs.record import ENDED, Job
from ray_on_ecs.node import ports
from ray_on_ecs.node.api import AnswerError, TokenError
from ray_on_ecs.node.ray_status import ALIVE
from ray_on_ecs.private_folder import at_home, held, new_short, place

HOST = "127.0.0.1"
# Several, as Ray gives up a start whose node has not joined within 30 s, which is short on a busy machine.
START_ATTEMPTS, START_SECONDS = 4, 300.0
# How long a head may be silent, on a busy machine, until it is replaced.
ANSWER_SECONDS = 60.0
POLL_SECONDS = 0.2
STOP_SECONDS = 10.0
RAYLET = "raylet"
PORTS = ("--port", "--dashboard-port", "--ray-client-server-port", "--dashboard-agent-listen-port")
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats")
VARIABLES = {
    **ports.METRICS,
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a laptop does not get interruption notices
    # Otherwise Ray on Linux takes the address of the network in place of 127.0.0.1, for all its servers.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@dataclass(frozen=True)
class LocalHead:
    """Head on this machine."""

    url: str  # URL of its dashboard
    address: str  # `HOST:PORT` at which drivers join it
    token: str  # Ray's token
    pid: int  # process ID of `ray start`
    started: str  # identity of that process, as its ID may be reused
    folder: str  # folder of its log, with Ray's temporary folder in it; only this user can open it

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its processes, and of a driver that joins it."""
        # Without the address, parts of Ray look for any Ray on the machine, which may be another one.
        return {**VARIABLES, "RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    @property
    def processes(self) -> list[psutil.Process]:
        """`ray start` and its descendants; empty if it has ended."""
        if not self.started or identity(self.pid) != self.started:
            return []
        try:
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def find() -> LocalHead | None:
    """Return the running head, or None."""
    head = _remembered()
    return head if head and head.processes else None


def answers(head: LocalHead) -> bool:
    """Return whether a running head knows its living node: some of its processes may have been killed, or hang."""
    dashboard = Head(head.url, head.token)
    port = int(head.url.rpartition(":")[2])
    deadline = time.monotonic() + ANSWER_SECONDS
    while head.processes and ports.listens(port) and time.monotonic() < deadline:
        try:
            return any(node["state"] == ALIVE for node in dashboard.nodes())
        except TokenError:  # another program has its port
            return False
        except AnswerError as cause:
            if not cause.is_passing and cause.status < 500:
                return False
        time.sleep(POLL_SECONDS)
    return False


def start(cpus: int) -> LocalHead:
    """Start a head that only this user can reach; return it once its dashboard answers. It replaces the one before.

    UsageError if Ray is not installed, ResourceError if it does not start.
    """
    if find_spec("ray") is None:
        install = "pip install '.[local]' in the checkout of ray-on-ecs installs it"
        raise UsageError(f"--local: a Ray program needs Ray, which is not installed here; {install}")
    try:
        return _start(cpus)
    except OSError as cause:
        way_out = "; free some space" if cause.errno in DISK_FULL else ""
        raise ResourceError(f"Ray can't start on this machine ({one_line(cause)}){way_out}") from cause


def _start(cpus: int) -> LocalHead:
    forget()
    reason = logs = ""
    for attempt in range(START_ATTEMPTS):
        folder = new_short("ray-")
        head = None
        try:
            numbers = dict(zip(PORTS, ports.free_ports(len(PORTS)), strict=True))
            head = _launch(folder, cpus, numbers)
            reason = _wait(head, list(numbers.values()))
            if not reason:
                _remember(head)
                return head
            if attempt == START_ATTEMPTS - 1:
                logs = f"{_rays(folder)}/session_latest/logs"
                logs = logs if Path(logs).exists() else folder  # Ray has not got as far
        finally:
            if head is None or find() != head:  # it failed, or the user is tired of waiting
                _end(head, "" if logs else folder)
    raise ResourceError(
        f"Ray did not start on this machine in {START_ATTEMPTS} attempts: {reason}; its logs are in {logs}"
    )


def end_unused() -> None:
    """End the head and everything that runs on it, unless a Ray program is under way; call it with the lock held."""
    head = find()
    if head and not runs_on(head):
        forget()


def runs_on(head: LocalHead) -> list[Job]:
    """Return the jobs that are under way and use a head."""
    return [job for job in MachineJobs().list_jobs() if job["ray"] == head.address and job["status"] not in ENDED]


def forget() -> None:
    """End the head if it still runs, and remove its file and its folder."""
    if head := _remembered():
        _end(head, head.folder)
    _file().unlink(missing_ok=True)


@contextmanager
def lock(what: str = "starts or ends Ray") -> Generator[None]:
    """Hold the lock for finding, starting and ending the head until the block ends; see `held`."""
    with held(FileLock(_file().with_suffix(".lock")), what):
        yield


def _file() -> Path:
    environment = hashlib.sha256(f"{place()} {sys.prefix}".encode()).hexdigest()[:8]
    return at_home() / f"head-{environment}.json"


def _launch(folder: str, cpus: int, numbers: dict[str, int]) -> LocalHead:
    command = [
        *RAY,
        f"--node-ip-address={HOST}",
        f"--dashboard-host={HOST}",
        f"--num-cpus={cpus}",
        *(["--num-gpus=0"] if sys.platform == "darwin" else []),  # Ray counts Apple's GPU, which Ray Train can't use
        f"--temp-dir={_rays(folder)}",
        *("--min-worker-port=0", "--max-worker-port=0"),
        *ports.flags(numbers),
    ]
    url, address = f"http://{HOST}:{numbers['--dashboard-port']}", f"{HOST}:{numbers['--port']}"
    head = LocalHead(url, address, secrets.token_hex(32), 0, "", folder)
    with Path(folder, "ray.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,  # modules of the user's folder must not hide Ray's
            env=environment({LOCAL_VARIABLE: "1", **head.variables}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C goes to the command only, which stops the run before its head
        )
    process.returncode = 0  # suppresses Popen's ResourceWarning: it outlives this command, or psutil waits for it
    return replace(head, pid=process.pid, started=identity(process.pid))


def _wait(head: LocalHead, numbers: list[int]) -> str:
    """Wait until the node has joined and all servers of the head listen; return why not, or nothing if they do.

    On a busy machine one of the servers may give up after the dashboard has answered, and Ray then ends the others.
    """
    dashboard = Head(head.url, head.token)
    had_raylet = False
    deadline = time.monotonic() + START_SECONDS
    while (processes := head.processes) and time.monotonic() < deadline:
        has_raylet = False
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                has_raylet |= process.name() == RAYLET and process.status() != psutil.STATUS_ZOMBIE
        if had_raylet and not has_raylet:  # Ray would wait for it for half a minute
            return "the raylet has ended"
        had_raylet = has_raylet
        if has_raylet:
            try:
                session = dashboard.get("/api/version", "session_name")
                is_foreign = session != Path(_rays(head.folder), "session_latest").resolve().name
            except TokenError:
                session, is_foreign = "", True
            except AnswerError as cause:
                session, is_foreign = "", not cause.is_passing and cause.status < 500
            if is_foreign:  # it has taken the port, and Ray runs without its dashboard
                return f"another program answers at {head.url}"
            with suppress(AnswerError):  # the state API starts later
                if session and dashboard.nodes() and all(map(ports.listens, numbers)):
                    return ""
        time.sleep(POLL_SECONDS)
    lines = Path(head.folder, "ray.log").read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def _remembered() -> LocalHead | None:
    """Return the head of the file, which may have ended."""
    try:
        return LocalHead(**json.loads(_file().read_text()))
    except (OSError, TypeError, ValueError):
        return None


def _remember(head: LocalHead) -> None:
    new = _file().with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps(asdict(head)))
    new.replace(_file())


def _end(head: LocalHead | None, folder: str) -> None:
    """Kill a head and delete this folder, if any: its jobs have ended, and Ray's own end takes five seconds."""
    processes = head.processes if head else []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, STOP_SECONDS)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _rays(folder: str) -> str:
    """Return the folder that Ray uses. It makes it, and what is in it, writable for all; the one above stays closed."""
    return f"{folder}/r"


if __name__ == "__main__":  # at the end of a Ray program's driver, whose log has its end already
    with lock(""):
        end_unused()
