"""Requests to the HTTP servers of a Ray node, with the cluster's token."""

import json
import os
import urllib.request
from http.client import HTTPException
from typing import Any

# Two of them fit into the ten seconds that a health check has.
TIMEOUT_SECONDS = 4.0
# No proxy of the environment: the nodes are near, and a proxy would read the token.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str) -> Any:
    """The JSON document, or the text, that `url` answers with; OSError where it doesn't or refuses."""
    return _send(urllib.request.Request(url))


def post(url: str) -> Any:
    """Like `get`, for a request without a body that changes something."""
    return _send(urllib.request.Request(url, method="POST"))


def _send(request: urllib.request.Request) -> Any:
    request.add_header("Authorization", f"Bearer {os.environ.get('RAY_AUTH_TOKEN', '')}")
    try:
        with OPENER.open(request, timeout=TIMEOUT_SECONDS) as response:
            body = response.read().decode()
            return json.loads(body) if response.headers.get_content_type() == "application/json" else body
    except (HTTPException, ValueError) as cause:  # no HTTP, or no JSON
        raise OSError(f"not an answer of Ray's: {cause!r}") from cause
