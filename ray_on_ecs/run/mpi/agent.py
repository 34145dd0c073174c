"""Launch agent that mpirun calls instead of ssh to start its daemon on another node; standard library only.

usage: python -I -S agent.py FOLDER [ssh's flags] HOST COMMAND…

It leaves the command in a folder, from which rank 0's worker passes it on, and ends with the status of the daemon.
"""

from __future__ import annotations

import os
import sys
import time

POLL_SECONDS = 0.05  # the start of the program waits for the last agent
# The suffixes of a host's files: the daemon's command, and its exit status.
COMMAND, STATUS = ".command", ".status"


def main() -> int:
    """Ask for the daemon and wait for its end; return its exit status."""
    mpirun = os.getppid()
    folder, *words = sys.argv[1:]
    while words[0].startswith("-"):
        words.pop(0)
    path = os.path.join(folder, words.pop(0))
    with open(path + ".part", "w") as file:
        file.write(" ".join(words))  # for a shell, as ssh passes it on
    os.rename(path + ".part", path + COMMAND)
    while not os.path.exists(path + STATUS):
        if os.getppid() != mpirun:  # it has died
            return 1
        time.sleep(POLL_SECONDS)
    with open(path + STATUS) as file:
        return int(file.read())


if __name__ == "__main__":
    sys.exit(main())
