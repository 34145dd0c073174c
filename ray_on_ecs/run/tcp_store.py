"""TCPStore for the process groups of a start, which its script may make and destroy as often as it likes.

A group's own store would end with rank 0's group, and listen on all interfaces; PyTorch's asks for no password.

usage: python -I tcp_store.py FD HOST PORT PID, with a socket that listens there as FD; it serves until PID ends.

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
from collections.abc import Generator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
POLL_SECONDS = 0.2  # the end of a start waits for the thread
BACKLOG = 1024


@contextmanager
def serving(python: str, host: str = HOST) -> Generator[tuple[str, int]]:
    """Yield an address to which the ranks of a script connect; the first connection starts the server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    port: int = listener.getsockname()[1]
    has_ended = threading.Event()
    arguments = (python, listener, has_ended)
    thread = threading.Thread(target=_serve, args=arguments, name="process group's store", daemon=True)
    thread.start()
    try:
        yield host, port
    finally:
        has_ended.set()
        thread.join()


def _serve(python: str, listener: socket.socket, has_ended: threading.Event) -> None:
    """Wait for a connection, which a script without PyTorch never makes, and serve it in another process."""
    with listener:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not poll.poll(POLL_SECONDS * 1000):
            if has_ended.is_set():
                return
        descriptor, (host, port, *_) = listener.fileno(), listener.getsockname()
        server = subprocess.Popen(
            [python, "-I", __file__, str(descriptor), host, str(port), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,
        )
    while not has_ended.wait(POLL_SECONDS):
        if server.poll() is not None:  # the script, which waits for it, fails
            logger.warning(f"{python} can't serve the process group's store; that needs PyTorch 2.1")
            return
    server.kill()
    server.wait()


def main() -> None:
    """Serve."""
    from torch.distributed import TCPStore

    host = sys.argv.pop(2)
    descriptor, port, pid = map(int, sys.argv[1:])
    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)
    while os.getppid() == pid:
        time.sleep(POLL_SECONDS)
    del store


if __name__ == "__main__":
    main()
