"""Runs a command in a process group of its own, which ends with whoever started it; the standard library alone.

usage: python -I -S supervisor.py FD COMMAND…, with a pipe as standard input and another one, for the exit status, as FD

When the first pipe closes, because the process at its other end has died however it may, the whole group is killed,
with the children of the script's own children: none of them keeps a GPU. A process of its own sees to that, because Ray
kills the children of a worker that ends, and them alone. SIGTERM and SIGABRT are passed on to the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

FORWARDED = (signal.SIGTERM, signal.SIGABRT)
NOT_FOUND = 127
NOT_EXECUTABLE = 126


def main() -> None:
    """Run the command and end as it has ended."""
    pending: list[int] = []
    for number in FORWARDED:
        signal.signal(number, lambda signum, frame: pending.append(signum))
    if os.fork() == 0:
        _kill_group_at_eof()
    try:
        command = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    except OSError as cause:
        print(f"{sys.argv[2]}: {cause.strerror}", file=sys.stderr)
        status = NOT_FOUND if isinstance(cause, FileNotFoundError) else NOT_EXECUTABLE
    else:
        for number in FORWARDED:
            signal.signal(number, lambda signum, frame: command.send_signal(signum))
        for signum in pending:
            command.send_signal(signum)
        status = command.wait()
    os.write(int(sys.argv[1]), str(status).encode())
    os.killpg(0, signal.SIGKILL)


def _kill_group_at_eof() -> None:
    for number in (*FORWARDED, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
