"""Parent of a job's driver: starts it, cleans up after it, and records its end, also without a command.

`python -I -S driver_parent.py COMMAND...` in the job's folder, which has its record. It imports only the
standard library: this delays the driver by 20 ms, and importing our modules by much more.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import suppress

# In the job's folder.
JOB, PROCESSES, END = "job.json", "processes.json", "end.json"
# The folder of the job, for all that its driver starts.
FOLDER_VARIABLE = "RAY_ON_ECS_JOB"
# The driver's exit status after a mistake. The secrets then stay if another command trains the run; the driver knows.
MISTAKE = 2
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


def main(command: list[str]) -> None:
    """Run a driver, and record its end; then end Ray if it was started for it and no other job uses it."""
    with open(JOB) as file:
        record = json.load(file)
    lock = os.open(JOB, os.O_RDONLY)  # until this process and the driver end, which another container can't see
    with suppress(OSError):  # a disk without locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)
    parent = os.getpid()  # which may be dead when the driver looks
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        # Before the driver can do anything: another command can stop it from its first moment.
        pids = {"driver": os.getpid(), "parent": parent}
        try:
            write(PROCESSES, {name: [pid, identity(pid)] for name, pid in pids.items()})
        except OSError as cause:
            os._exit(cause.errno or 1)
        for number in SIGNALS:  # a shell ignores some for the commands that it starts with & or nohup
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, {**os.environ, FOLDER_VARIABLE: os.getcwd()})
    for number in SIGNALS:  # the end of a login session or of the machine sends them to all processes
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    exit_status = os.waitstatus_to_exitcode(status)
    if os.path.exists(JOB) and not os.path.exists(PROCESSES):  # the disk is full; the command that waits for it says so
        sys.exit(exit_status)
    with suppress(OSError):  # pip and others that the driver has started; scripts, which have 30 s, have other groups
        os.killpg(pid, signal.SIGKILL)
    secrets = json.loads(record["metadata"].get("secrets", "[]"))
    if secrets and exit_status != MISTAKE and not record["keeps_secrets"]:
        import subprocess  # a third of this script's start

        subprocess.run([sys.executable, "-P", "-m", "ray_on_ecs.secrets", *secrets], check=False)
    with suppress(OSError):  # the disk is full, and the run's folder has its state
        write(END, {"status": exit_status, "time": time.time()})
    if record["ends_ray"]:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "ray_on_ecs.cluster.local_head"])


if __name__ == "__main__":
    main(sys.argv[1:])
