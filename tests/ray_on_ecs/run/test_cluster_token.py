"""An address of RAY_ADDRESS that is not a Ray cluster's is one line."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ray_on_ecs.errors import ResourceError
from ray_on_ecs.run import cluster_token


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def http() -> Iterator[int]:
    """The port of a server of web pages."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("server", ["silent", "http"])
def test_address_without_a_ray_cluster_is_named(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_token, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(cluster_token, "ANSWER_SECONDS", 0.5)
    address = f"127.0.0.1:{request.getfixturevalue(server)}"
    with pytest.raises(ResourceError, match=f"what listens at '{address}' does not answer as a Ray cluster"):
        cluster_token.check(address)
