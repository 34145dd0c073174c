"""A bad line to an S3: a share of the calls over it fails."""

import http.client
import random
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

OF_THE_LINE = ("content-length", "transfer-encoding", "connection", "date", "server", "expect")


class BadLine(ThreadingHTTPServer):
    """Hands requests on to `behind`, but a share of them: those are refused with 503, or their connection is cut."""

    daemon_threads = True

    def __init__(self, behind: str, share: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind, self.share, self.failed = behind.removeprefix("http://"), share, 0
        self.chance = random.Random(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def hand_on(self) -> None:
        line = cast(BadLine, self.server)
        body = self._body()
        if line.chance.random() < line.share:
            self._fail(line)
            return
        behind = http.client.HTTPConnection(line.behind, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OF_THE_LINE}
        if self._is_chunked:  # moto takes the two kinds of body apart in different ways
            chunks = iter([body])
            behind.request(
                self.command, self.path, chunks, {**headers, "Transfer-Encoding": "chunked"}, encode_chunked=True
            )
        else:
            behind.request(self.command, self.path, body, headers)
        answer = behind.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in OF_THE_LINE:
                self.send_header(name, value)
        # Of HEAD the length is the object's, of which nothing follows.
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)
        behind.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = hand_on

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

    def _fail(self, line: BadLine) -> None:
        line.failed += 1
        self.close_connection = True
        if line.failed % 2:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Tests say what went wrong themselves."""


@contextmanager
def bad_line(behind: str, share: float) -> Generator[BadLine]:
    """A line to `behind` that loses a share of the requests."""
    line = BadLine(behind, share)
    threading.Thread(target=line.serve_forever, daemon=True).start()
    try:
        yield line
    finally:
        line.shutdown()
        line.server_close()
