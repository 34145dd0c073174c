"""Client of Ray's servers, HTTP and GCS, with the cluster's token and a time limit. Another program may answer there.

The laptop's commands, the node's commands and the driver use it: Ray's own clients take seconds to import, have no time
limits, and send the token through the environment's proxy.
"""

import json
import os
import re
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from ray_on_ecs.errors import ResourceError, UsageError, one_line

# Shorter than a health check's timeout of ten seconds.
TIMEOUT_SECONDS = 4.0
CHUNK_BYTES = 2**16
# An RPC of Ray's dashboard and drivers, which the GCS's event loop answers. gRPC's standard health service answers on
# another thread, also while the GCS hangs.
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"
BUSY = ("UNAVAILABLE", "DEADLINE_EXCEEDED")

Job = dict[str, Any]
# Fields of a job and of a node that commands use; all but the first may be missing.
JOB = ("status", "submission_id", "metadata", "start_time", "end_time", "driver_exit_code", "error_type", "message")
NODE = ("state", "node_id", "is_head_node", "labels", "resources_total", "start_time_ms")


class AnswerError(ResourceError, OSError):
    """A server doesn't answer, which may pass, refuses a request (with an HTTP status), or is not Ray."""

    def __init__(self, address: str, reason: object, status: int = 0, *, is_passing: bool = False) -> None:
        self.reason, self.status, self.is_passing = one_line(reason), status, is_passing
        what, hint = "the Ray head doesn't answer at", "is it the address of a Ray head?"
        if is_passing or status >= 500:
            hint = "try again in a minute"
        elif status:
            what = "the request is refused at"
        super().__init__(f"{what} {address} ({self.reason}); {hint}")


class TokenError(UsageError, OSError):
    """The Ray head refuses the token."""

    def __init__(self) -> None:
        super().__init__("the Ray head refuses the token")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Raises HTTPError for a redirect: Ray sends none, and another host would get the token."""

    def redirect_request(self, *_: Any) -> None:  # ty: ignore[incompatible-method-override]
        """See HTTPRedirectHandler."""


# Ignore the proxies of the environment: the nodes are near, or behind a tunnel, and a proxy would read the token.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def ask(
    url: str,
    timeout: float = TIMEOUT_SECONDS,
    token: str | None = None,
    *,
    method: str = "GET",
    body: object = None,
    longest: float = 0,
) -> Any:
    """Send a request, with a JSON body if there is one; return the JSON document, or the text.

    It is given up after `timeout` seconds of silence, or if the body has not come within them, or within `longest`. The
    token is this process's if it is None. TokenError if Ray refuses it; AnswerError if the server doesn't answer,
    refuses the request, or is not Ray.
    """
    token = own_token() if token is None else token
    headers = {"Content-Type": "application/json", **bearer(token)}
    address = url.partition("?")[0]
    try:
        data = None if body is None else json.dumps(body).encode()
        question = urllib.request.Request(url, data, headers, method=method)
        with OPENER.open(question, timeout=timeout) as response:
            text = _read(response, longest or timeout).decode()
            is_json = response.headers.get_content_type() == "application/json" or text.startswith(("{", "["))
            return json.loads(text) if is_json else text
    except HTTPError as refusal:
        with refusal:
            raise _refusal(address, refusal, timeout) from refusal
    except (ConnectionError, IncompleteRead) as cause:  # some are also an HTTPException
        raise AnswerError(address, cause, is_passing=True) from cause
    except (HTTPException, RecursionError, ValueError) as cause:
        raise AnswerError(address, f"not an answer of Ray's: {cause!r}") from cause
    except OSError as cause:
        raise AnswerError(address, cause.reason if isinstance(cause, URLError) else cause, is_passing=True) from cause


def own_token() -> str:
    """Return this process's token from where Ray looks for it; empty if it is not there."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    if token:
        return token
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def bearer(token: str) -> dict[str, str]:
    """Return the header with a token; empty without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def below(url: str, document: Any, *keys: str) -> Any:
    """Return what a document has below these keys; AnswerError if it has another form."""
    try:
        for key in keys:
            document = document[key]
    except (LookupError, TypeError) as cause:
        raise AnswerError(url, f"not an answer of Ray's: {cause!r}") from cause
    return document


def items_in(url: str, answer: Any, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return an answer that has to be a list of objects, with None for missing fields; else AnswerError."""
    if isinstance(answer, list) and all(isinstance(item, dict) and item.get(fields[0]) for item in answer):
        return [{**dict.fromkeys(fields), **item} for item in answer]
    raise AnswerError(url, f"not what Ray lists: {answer!r:.100}")


def check_gcs(address: str, timeout: float = TIMEOUT_SECONDS, token: str | None = None) -> None:
    """Return if the GCS at `host:port`, which holds the state of a cluster, is alive; else raise as `ask` does."""
    import grpc  # a command on a laptop doesn't need it

    token = own_token() if token is None else token
    metadata = [(name.lower(), value) for name, value in bearer(token).items()]
    # Ignore the proxies of the environment, as above.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(CHECK)(b"", timeout=timeout, metadata=metadata)
        except grpc.RpcError as cause:
            code, details = cause.code().name, cause.details()  # ty: ignore[missing-attribute]
            if code == "UNAUTHENTICATED":
                raise TokenError from cause
            raise AnswerError(address, f"{code}, {details}", is_passing=code in BUSY) from cause


def _refusal(address: str, refusal: HTTPError, timeout: float) -> TokenError | AnswerError:
    """Return the error for an HTTP status; its reason is the last line of the body with a word, as of a traceback."""
    if refusal.code in (401, 403):
        return TokenError()
    try:
        lines = re.findall(r".*\w.*", _read(refusal, timeout).decode(errors="replace"))
    except (OSError, HTTPException):
        lines = []
    return AnswerError(address, f"{refusal.code}: {lines[-1] if lines else refusal.reason}", refusal.code)


def _read(response: Any, seconds: float) -> bytes:
    """Read a body, which may come byte by byte."""
    body, deadline = b"", time.monotonic() + seconds
    while chunk := response.read1(CHUNK_BYTES):
        body += chunk
        if time.monotonic() > deadline:
            raise TimeoutError("the answer does not end")
    if response.length:
        raise ConnectionError(f"the connection ended {response.length} bytes before the answer did")
    return body
