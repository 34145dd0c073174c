"""Requests to the HTTP servers of a Ray node, with the cluster's token."""

import json
import os
import urllib.request
from typing import Any

TIMEOUT_SECONDS = 5.0


def get(url: str) -> Any:
    """The JSON document, or the text, that `url` answers with; OSError where it doesn't or refuses."""
    return _send(urllib.request.Request(url))


def post(url: str) -> Any:
    """Like `get`, for a request without a body that changes something."""
    return _send(urllib.request.Request(url, method="POST"))


def _send(request: urllib.request.Request) -> Any:
    request.add_header("Authorization", f"Bearer {os.environ.get('RAY_AUTH_TOKEN', '')}")
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        body = response.read().decode()
        return json.loads(body) if "json" in response.headers.get_content_type() else body
