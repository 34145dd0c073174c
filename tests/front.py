"""A server in front of moto's, which answers operations unknown to moto, and refuses operations that a test names."""

from __future__ import annotations

import json
import time
import urllib.parse
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

SECONDS = 120
ONLINE = {"InstanceInformationList": [{"InstanceId": "i-1", "PingStatus": "Online"}]}
SESSION = {"SessionId": "tests-0123456789abcdef0", "TokenValue": "of-session", "StreamUrl": "wss://ssmmessages/"}


class Front(ThreadingHTTPServer):
    """A server in front of moto's.

    Attributes:
        answers: The JSON answers to operations unknown to moto.
        texts: The XML answers.
        refused: Operations that are answered with AccessDenied; of S3, such as "PUT /bucket".
        codes: The codes of their errors in JSON, if it is not AccessDeniedException.
        asked: The operations so far, with their bodies.
        is_silent: True if it answers only HEAD.
        page: The status, headers and body of another program's answers, as of a proxy or a portal.
        replaced: The operations that it answers; empty for all.
    """

    daemon_threads = True

    def __init__(self, url: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Forward)
        self.behind = urllib.parse.urlparse(url).netloc
        self.reset()

    def reset(self) -> None:
        """Refuse nothing."""
        self.answers: dict[str, Any] = {
            "DescribeInstanceInformation": ONLINE,
            "StartSession": SESSION,
            "TerminateSession": {"SessionId": SESSION["SessionId"]},
        }
        self.texts: dict[str, str] = {}
        self.refused: set[str] = set()
        self.codes: dict[str, str] = {}
        self.asked: list[tuple[str, bytes]] = []
        self.is_silent = False
        self.page: tuple[int, dict[str, str], bytes] | None = None
        self.replaced: set[str] = set()

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client may disconnect before it has the answer."""


class Forward(BaseHTTPRequestHandler):
    """Answers directly, or passes requests on to moto."""

    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        front = cast(Front, self.server)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        operation = self._operation(body)
        front.asked.append((operation, body))
        while front.is_silent and self.command != "HEAD":
            time.sleep(0.1)
        if front.page and (operation in front.replaced or not front.replaced):
            status, headers, body = front.page
            self._answer(status, "text/html", body, headers)
        elif operation in front.codes or any(operation.startswith(refused) for refused in front.refused):
            self._refuse(operation)
        elif operation in front.answers:
            self._answer(200, "application/x-amz-json-1.1", json.dumps(front.answers[operation]).encode())
        elif operation in front.texts:
            self._answer(200, "text/xml", front.texts[operation].encode())
        else:
            self._forward(front.behind, body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_one

    def _operation(self, body: bytes) -> str:
        if target := self.headers.get("X-Amz-Target"):
            return target.rpartition(".")[2]
        if "/operation/" in self.path:
            return self.path.rpartition("/")[2]
        action = urllib.parse.parse_qs(body.decode(errors="replace")).get("Action")
        return action[0] if action else f"{self.command} {self.path}"

    def _refuse(self, operation: str) -> None:
        if self.headers.get("X-Amz-Target") or "/operation/" in self.path:
            code = cast(Front, self.server).codes.get(operation, "AccessDeniedException")
            refusal = json.dumps({"__type": code, "message": f"may not {operation}"})
            return self._answer(400, "application/x-amz-json-1.1", refusal.encode())
        error = f"<Error><Code>AccessDenied</Code><Message>may not {operation}</Message></Error>"
        text = error if " " in operation else f"<ErrorResponse>{error}</ErrorResponse>"
        return self._answer(403, "text/xml", text.encode())

    def _forward(self, behind: str, body: bytes) -> None:
        with closing(HTTPConnection(behind, timeout=SECONDS)) as connection:
            parts = urllib.parse.urlsplit(self.path)  # with a host if this is the client's proxy
            path = urllib.parse.urlunsplit(parts._replace(scheme="", netloc=""))
            connection.request(self.command, path, body, {**dict(self.headers), "Host": behind})
            answer = connection.getresponse()
            content = answer.read()
        own = ("connection", "date", "server", "transfer-encoding")
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in own}
        self._answer(answer.status, answer.headers.get("Content-Type", "text/plain"), content, headers)

    def _answer(self, status: int, content_type: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
