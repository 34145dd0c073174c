"""Store of a process group on this machine, on 127.0.0.1: PyTorch's listens on all interfaces and asks for no password.

usage: python -I local_store.py FD PORT PID, with a socket that listens at PORT as FD; it serves until PID ends.

https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_SECONDS = 0.2
BACKLOG = 1024


class LocalStore:
    """A port to which the ranks of a script connect; a context. The first connection starts the server.

    Attributes:
        port: The port.
    """

    def __init__(self, python: str) -> None:
        self._python = python
        self._listener = socket.create_server((HOST, 0), backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="process group's store", daemon=True)

    def __enter__(self) -> LocalStore:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def _serve(self) -> None:
        """Wait for a connection, which a script without PyTorch never makes, and serve it in another process."""
        with self._listener:
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            while not poll.poll(POLL_SECONDS * 1000):
                if self._has_ended.is_set():
                    return
            descriptor = self._listener.fileno()
            server = subprocess.Popen(
                [self._python, "-I", __file__, str(descriptor), str(self.port), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        while not self._has_ended.wait(POLL_SECONDS):
            if server.poll() is not None:  # the script, which waits for it, fails
                logger.warning(f"{self._python} can't serve the process group's store; that needs PyTorch 2.1")
                return
        server.kill()
        server.wait()


def main() -> None:
    """Serve."""
    from torch.distributed import TCPStore

    descriptor, port, pid = map(int, sys.argv[1:])
    store = TCPStore(HOST, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)
    while os.getppid() == pid:
        time.sleep(POLL_SECONDS)
    del store


if __name__ == "__main__":
    main()
