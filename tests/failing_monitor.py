"""A CloudWatch that can be cut off: a proxy in front of the tests' AWS."""

import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

from tests.serving import serving

SECONDS = 60.0


class CloudWatch(ThreadingHTTPServer):
    """Passes requests on to an AWS, unless it is cut off: then it closes each connection without an answer.

    Args:
        aws: The URL of the AWS.

    Attributes:
        answered: The number of requests that were passed on.
        refused: The number of refused requests.
    """

    daemon_threads = True

    def __init__(self, aws: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.aws = aws
        self.is_cut = False
        self.answered = self.refused = 0

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def outage(self) -> Generator[None]:
        """Cut it off within this context."""
        self.is_cut = True
        try:
            yield
        finally:
            self.is_cut = False


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = cast(CloudWatch, self.server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if server.is_cut:
            server.refused += 1
            return
        request = urllib.request.Request(server.aws + self.path, body, dict(self.headers), method="POST")
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(content)
        server.answered += 1

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the tests report errors."""


@contextmanager
def cloudwatch(aws: str) -> Generator[CloudWatch]:
    """A CloudWatch in front of this AWS."""
    with serving(CloudWatch(aws)) as server:
        yield server
