"""HTTP requests to the servers of a Ray node, with the cluster's token."""

import json
import os
import urllib.request
from http.client import HTTPException
from typing import Any

# Shorter than a health check's timeout of ten seconds.
TIMEOUT_SECONDS = 4.0
# Ignore the proxies of the environment: the nodes are near, and a proxy would read the token.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout: float = TIMEOUT_SECONDS) -> Any:
    """Return the JSON document, or the text, at `url`.

    Raises:
        OSError: The server doesn't answer, refuses (`urllib.error.HTTPError`), or is not Ray.
    """
    return _send(urllib.request.Request(url), timeout)


def post(url: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_SECONDS) -> Any:
    """Send a POST request, with a JSON body if there is one; return and raise as `get` does."""
    data = None if body is None else json.dumps(body).encode()
    return _send(urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST"), timeout)


def _send(request: urllib.request.Request, timeout: float) -> Any:
    request.add_header("Authorization", f"Bearer {os.environ.get('RAY_AUTH_TOKEN', '')}")
    try:
        with OPENER.open(request, timeout=timeout) as response:
            body = response.read().decode()
            return json.loads(body) if response.headers.get_content_type() == "application/json" else body
    except (HTTPException, ValueError) as cause:  # not HTTP, or not JSON
        raise OSError(f"not an answer of Ray's: {cause!r}") from cause
