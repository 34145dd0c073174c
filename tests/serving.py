"""Servers inside the process of a test, such as a stand-in for a Ray head's dashboard."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

Server = TypeVar("Server", bound=BaseServer)

# Seconds between a server's checks for its end. Python's 0.5 would be the longest part of many tests.
POLL_SECONDS = 0.02


@contextmanager
def serving(server: Server) -> Generator[Server]:
    """Serve from a thread until the context ends, and close the server then."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
