"""A terminal whose window is closed."""

import os
import select
import subprocess
import threading
from pathlib import Path


class Terminal:
    """A pseudo-terminal that runs a command and discards its output."""

    def __init__(self, command: list[str], variables: dict[str, str], folder: Path) -> None:
        self._end, other = os.openpty()
        self.command = subprocess.Popen(command, env=variables, cwd=folder, preexec_fn=lambda: os.login_tty(other))
        os.close(other)
        self._is_open = True
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while self._is_open:
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    os.read(self._end, 2**16)
                except OSError:  # the command has ended
                    return

    def close(self) -> None:
        """Close it: the kernel sends SIGHUP, and writes to it fail."""
        if self._is_open:
            self._is_open = False
            self._reader.join()
            os.close(self._end)
