"""A proxy in front of an S3 that fails a fraction of the requests, or all of them for a while."""

import http.client
import random
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from tests.serving import serving

HOP_BY_HOP = ("content-length", "transfer-encoding", "connection", "date", "server", "expect")


class FlakyProxy(ThreadingHTTPServer):
    """Forwards requests to a server, except those that fail: they get a 503, or their connection is closed.

    Args:
        target: The server's URL.
        failure_rate: The fraction of the requests that fail, 0..1.

    Attributes:
        failed: The number of requests that have failed.
    """

    daemon_threads = True

    def __init__(self, target: str, failure_rate: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target.removeprefix("http://")
        self.failure_rate = failure_rate
        self.failed = 0
        self._random = random.Random(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error that a request has caused here, unless the client has gone: drills kill clients."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def fails_next(self) -> bool:
        """Draw whether a request fails."""
        return self._random.random() < self.failure_rate

    @contextmanager
    def outage(self) -> Generator[None]:
        """Fail every request within this context."""
        before = self.failure_rate
        self.failure_rate = 1.0
        try:
            yield
        finally:
            self.failure_rate = before


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self) -> None:
        proxy = cast(FlakyProxy, self.server)
        body = self._body()
        if proxy.fails_next():
            self._fail(proxy)
            return
        target = http.client.HTTPConnection(proxy.target, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        if self._is_chunked:  # moto parses the two kinds of body differently
            chunks = iter([body])
            target.request(
                self.command, self.path, chunks, {**headers, "Transfer-Encoding": "chunked"}, encode_chunked=True
            )
        else:
            target.request(self.command, self.path, body, headers)
        answer = target.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        # A response to HEAD has the object's length and no body.
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)
        target.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

    @property
    def _is_chunked(self) -> bool:
        return self.headers.get("Transfer-Encoding", "").lower() == "chunked"

    def _body(self) -> bytes:
        if not self._is_chunked:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _fail(self, proxy: FlakyProxy) -> None:
        proxy.failed += 1
        self.close_connection = True
        if proxy.failed % 2:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def flaky_proxy(target: str, failure_rate: float) -> Generator[FlakyProxy]:
    """Run a proxy to `target` that fails a fraction of the requests."""
    with serving(FlakyProxy(target, failure_rate)) as proxy:
        yield proxy
