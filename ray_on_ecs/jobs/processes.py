"""Processes of a job: their variables, the start of the driver, and their end by force."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ray_on_ecs.jobs.driver_parent import FOLDER_VARIABLE, PROCESSES

# In a job's folder.
LOG = "log"
POLL_SECONDS = 0.01
# How long killed processes may take to end.
KILL_SECONDS = 10.0
EMPTY_LOOKS = 3
# Variables that lead to another cluster.
OTHERS = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process of a job: this command's without another cluster's, and its `own`."""
    inherited = {name: value for name, value in os.environ.items() if name not in OTHERS}
    # `python` and `ray` are this environment's.
    path = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    return {"PYTHONUNBUFFERED": "1", **inherited, **own, "PATH": path}


def wait_for_driver(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> None:
    """Wait until the driver of a job starts; TimeoutError if it does not, OSError if its parent has ended."""
    deadline = time.monotonic() + seconds
    while not (folder / PROCESSES).exists():
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise TimeoutError(f"it has not started within {seconds:.0f} s")
        if process.poll() is not None and not (folder / PROCESSES).exists():
            lines = (folder / LOG).read_text(errors="replace").splitlines()
            raise OSError(lines[-1] if lines else os.strerror(process.returncode))
        time.sleep(POLL_SECONDS)


def kill_all(folder: Path) -> None:
    """Kill all processes of a job, and wait until they have ended."""
    deadline = time.monotonic() + KILL_SECONDS
    looks = 0  # that have found none: a process that is replaced by another program has no variables for a moment
    while looks < EMPTY_LOOKS and time.monotonic() < deadline:  # they may start others meanwhile
        processes = _processes_of(folder)
        looks = 0 if processes else looks + 1
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, max(deadline - time.monotonic(), 0.0))
        time.sleep(POLL_SECONDS)


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of a job, without the driver's parent: a script's supervisor is not the driver's child."""
    mark, found = os.path.realpath(folder), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(FOLDER_VARIABLE) == mark:
                found += [process, *process.children(recursive=True)]
    return found
