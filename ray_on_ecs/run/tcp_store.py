"""TCPStore for the process groups of a start, which its script may make and destroy as often as it likes.

A group's own store would end with rank 0's group, and listen on all interfaces; PyTorch's asks for no password.

https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

SERVER = str(Path(__file__).with_name("tcp_store_server.py"))
HOST = "127.0.0.1"
POLL_SECONDS = 0.2  # the end of a start waits for the thread
BACKLOG = 1024


@contextmanager
def serving(python: str, ranks: int, host: str = HOST) -> Generator[tuple[str, int]]:
    """Yield an address to which the ranks of a script connect; the first connection starts the server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    port: int = listener.getsockname()[1]
    has_ended = threading.Event()
    arguments = (python, ranks, listener, has_ended)
    thread = threading.Thread(target=_serve, args=arguments, name="process group's store", daemon=True)
    thread.start()
    try:
        yield host, port
    finally:
        has_ended.set()
        thread.join()


def _serve(python: str, ranks: int, listener: socket.socket, has_ended: threading.Event) -> None:
    """Wait for a connection, which a script without PyTorch never makes, and serve it in another process."""
    with listener:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not poll.poll(POLL_SECONDS * 1000):
            if has_ended.is_set():
                return
        descriptor = listener.fileno()
        server = subprocess.Popen(
            [python, "-I", SERVER, str(descriptor), str(ranks), str(os.getpid())],
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
