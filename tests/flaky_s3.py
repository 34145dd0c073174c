"""A proxy in front of an S3 that fails some requests or loses their responses, or fails all for a while."""

import http.client
import random
import re
import socket
import sys
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast

from tests.serving import serving

Fate = Literal["pass", "fail", "lose", "conflict"]
HOP_BY_HOP = ("content-length", "transfer-encoding", "connection", "date", "server", "expect")


class FlakyProxy(ThreadingHTTPServer):
    """Forwards requests to a server, and lets some requests to S3 fail in two ways.

    A request is dropped before it is forwarded: it gets a 503, or its connection is closed. Or the server executes it,
    and its response is dropped: the connection is closed afterwards.

    Args:
        target: The server's URL.
        failure_rate: The fraction of the requests that are dropped, 0..1.
        lost_rate: The fraction of the requests whose answer is dropped, 0..1.
        spared: The number of requests of a method and path that pass after a failed one. With enough of them a client
            that repeats its requests never fails.

    Attributes:
        failed: The number of requests that have been dropped.
        lost: The number of answers that have been dropped.
        lost_requests: Method and path of the latest lost requests.
        answered: The number of requests that have passed.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str, failure_rate: float, lost_rate: float = 0.0, spared: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target.removeprefix("http://")
        self.failure_rate = failure_rate
        self.lost_rate = lost_rate
        self.failed = self.lost = self.answered = 0
        self.lost_requests: deque[str] = deque(maxlen=1000)
        self._spared = spared
        self._spared_left: dict[str, int] = {}
        self._decided: list[tuple[Fate, str, int]] = []
        self._random = random.Random(0)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request here, unless the client has disconnected: drills kill clients."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def decide(self, fate: Fate, pattern: str, count: int = 1) -> None:
        """Set the outcome of the next requests whose method and path match a pattern, such as `PUT .*lock`."""
        with self._lock:
            self._decided.append((fate, pattern, count))

    def draw(self, request: str) -> Fate:
        """Draw the outcome of a request, given its method and path."""
        with self._lock:
            fate = self._draw(request)
            if fate == "fail":
                self.failed += 1
            elif fate == "lose":
                self.lost += 1
                self.lost_requests.append(request)
            else:
                self.answered += 1
        return fate

    def _draw(self, request: str) -> Fate:
        for index, (fate, pattern, count) in enumerate(self._decided):
            if re.match(pattern, request):
                self._decided[index : index + 1] = [(fate, pattern, count - 1)] if count > 1 else []
                return fate
        drawn = self._random.random()
        if left := self._spared_left.pop(request, 0):
            if left > 1:
                self._spared_left[request] = left - 1
            return "pass"
        if drawn >= self.failure_rate + self.lost_rate:
            return "pass"
        if self._spared:
            self._spared_left[request] = self._spared
        return "fail" if drawn < self.failure_rate else "lose"

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
        fate = proxy.draw(f"{self.command} {self.path}") if self._is_of_s3 else "pass"
        if fate in ("fail", "conflict"):
            self._fail(proxy) if fate == "fail" else self._refuse()
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
        target.close()
        if fate == "lose":
            self._close()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        # A response to HEAD has the object's length and no body.
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

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

    @property
    def _is_of_s3(self) -> bool:
        """Return whether it is signed for S3 or unsigned."""
        return "/s3/" in self.headers.get("Authorization", "/s3/")

    def _fail(self, proxy: FlakyProxy) -> None:
        if proxy.failed % 2:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")  # or the client would send the next request to a closed one
            self.end_headers()
        else:
            self._close()

    def _refuse(self) -> None:
        """Answer as S3 does to a conditional write while another one is in progress."""
        body = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
        self.send_response(409)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _close(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def flaky_proxy(target: str, failure_rate: float, lost_rate: float = 0.0, spared: int = 0) -> Generator[FlakyProxy]:
    """Run a proxy to `target` that fails a fraction of the requests, and loses a fraction of the answers."""
    with serving(FlakyProxy(target, failure_rate, lost_rate, spared)) as proxy:
        yield proxy
