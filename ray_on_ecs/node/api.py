"""HTTP requests to Ray's servers, with the cluster's token. What answers there may be another program."""

import json
import os
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError

# Shorter than a health check's timeout of ten seconds.
TIMEOUT_SECONDS = 4.0
CHUNK_BYTES = 2**16


class AnswerError(OSError):
    """What answers is not Ray: not HTTP, not JSON, or JSON of another form."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Raises HTTPError for a redirect: Ray sends none, and another host would get the token."""

    def redirect_request(self, *_: Any) -> None:  # ty: ignore[incompatible-method-override]
        """See HTTPRedirectHandler."""


# Ignore the proxies of the environment: the nodes are near, and a proxy would read the token.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


def get(url: str, timeout: float = TIMEOUT_SECONDS, token: str | None = None) -> Any:
    """Return the JSON document, or the text, at `url`; raise as `ask` does."""
    return ask(url, timeout, token)[0]


def post(url: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS) -> Any:
    """Send a POST request, with a JSON body if there is one; return and raise as `get` does."""
    data = None if body is None else json.dumps(body).encode()
    return ask(url, timeout, data=data, headers={"Content-Type": "application/json"}, method="POST")[0]


def ask(url: str, timeout: float, token: str | None = None, **request: Any) -> tuple[Any, Mapping[str, str]]:
    """Send a request; return the JSON document, or the text, and the headers of the response.

    Args:
        url: The URL.
        timeout: Seconds until the response begins, and as many until it ends.
        token: The cluster's token; None for the environment's.
        request: Arguments of `urllib.request.Request`.

    Raises:
        urllib.error.HTTPError: The server refuses; it is an OSError.
        AnswerError: The server is not Ray.
        OSError: No server answers.
    """
    token = os.environ.get("RAY_AUTH_TOKEN", "") if token is None else token
    try:
        question = urllib.request.Request(url, **request)
        if token:
            question.add_header("Authorization", f"Bearer {token}")
        with OPENER.open(question, timeout=timeout) as response:
            text = _read(response, time.monotonic() + timeout).decode()
            is_json = response.headers.get_content_type() == "application/json" or text.startswith(("{", "["))
            return (json.loads(text) if is_json else text), response.headers
    except (ConnectionError, HTTPError):
        raise
    except URLError as cause:
        raise OSError(str(cause.reason)) from cause
    except (HTTPException, RecursionError, ValueError) as cause:
        raise AnswerError(f"not the expected answer: {cause!r}") from cause


def jobs_in(answer: Any, *keys: str) -> list[dict[str, Any]]:
    """Return an answer that has to be a list of jobs with these keys.

    Raises:
        AnswerError: It has another form.
    """
    if isinstance(answer, list) and all(isinstance(job, dict) and job.keys() >= {*keys} for job in answer):
        return answer
    raise AnswerError(f"not a list of jobs: {answer!r:.100}")


def _read(response: Any, deadline: float) -> bytes:
    """Read a body that may come byte by byte."""
    body = b""
    while chunk := response.read1(CHUNK_BYTES):
        body += chunk
        if time.monotonic() > deadline:
            raise TimeoutError("the answer does not end")
    if response.length:
        raise ConnectionError(f"the connection ended {response.length} bytes before the answer did")
    return body
