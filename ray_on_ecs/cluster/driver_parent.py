"""Parent of a local job's driver: starts it, and records its end, also if the command that started the job is gone.

`python -I -S driver_parent.py RAY COMMAND...` in the job's folder; RAY is 1 if the job has Ray started for it, else 0.
It is a script without other modules of ours, so that the driver starts 20 ms later than without it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress

# In the job's folder.
PROCESSES, END = "processes.json", "end.json"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def identity(pid: int) -> str:
    """Return what distinguishes a process from later ones with its ID, also after a reboot; empty if it has ended."""
    if not os.path.exists("/proc/self/stat"):  # macOS
        import subprocess  # a third of this script's start

        words = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
        state, _, started = subprocess.run(words, capture_output=True, text=True).stdout.strip().partition(" ")
        return "" if state.startswith("Z") else started.strip()
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name of a program may have spaces
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"


def write(path: str, document: object) -> None:
    """Write a document as a whole: a reader finds the old one or the new one."""
    with open(f"{path}.new", "w") as file:
        json.dump(document, file)
    os.replace(f"{path}.new", path)


def main(has_ray: bool, command: list[str]) -> None:
    """Run a driver, and record its end; then end Ray if it was started for it and no other job uses it."""
    parent = os.getpid()  # which may be dead when the driver looks
    pid = os.fork()
    if pid == 0:
        # Before the driver can do anything: another command can stop it from its first moment.
        pids = {"driver": os.getpid(), "parent": parent}
        write(PROCESSES, {name: [pid, identity(pid)] for name, pid in pids.items()})
        for number in SIGNALS:  # a shell ignores some for the commands that it starts with & or nohup
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    for number in SIGNALS:  # the end of a login session or of the machine sends them to all processes
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):  # the disk is full, and the run's folder has its state
        write(END, {"status": os.waitstatus_to_exitcode(status), "time": time.time()})
    if has_ray:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "ray_on_ecs.cluster.local_head"])


if __name__ == "__main__":
    main(sys.argv[1] == "1", sys.argv[2:])
