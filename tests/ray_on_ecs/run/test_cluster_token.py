"""The token of this process and the cluster of RAY_ADDRESS; what doesn't fit is one line."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from ray._private.authentication_test_utils import reset_auth_token_state

from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.node import api
from tests.lazy import Lazy

cluster_token = Lazy("ray_on_ecs.run.cluster_token")
interceptor = Lazy("ray._private.authentication.grpc_authentication_client_interceptor")
RIGHT, WRONG = "right", "another"
MODE = {"RAY_AUTH_MODE": "token"}


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


class Gcs(grpc.GenericRpcHandler):
    """The GCS of a cluster with this token, or without one; tests/commands/test_token.py has real ones."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        sent = dict(handler_call_details.invocation_metadata).get("authorization")

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._token and sent != f"Bearer {self._token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "another token")
            return b""

        is_check = handler_call_details.method == api.CHECK
        return grpc.unary_unary_rpc_method_handler(answer) if is_check else None


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a cluster, whose token is the parameter or RIGHT."""
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers([Gcs(getattr(request, "param", RIGHT))])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


without_token = pytest.mark.parametrize("cluster", [None], indirect=True, ids=["open"])


@pytest.fixture
def process(file: str | None, variables: dict[str, str], tmp_path: Path) -> Iterator[None]:
    """This process with a token in Ray's file, or without the file, and with these variables of Ray."""
    if file is not None:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.setenv(name, variables.get(name, ""))  # restored after the test
            if name not in variables:
                patch.delenv(name)
        reset_auth_token_state()
        yield
    reset_auth_token_state()


@pytest.mark.parametrize(
    ("file", "variables", "message"),
    [
        (None, {}, "RAY_AUTH_MODE: the Ray cluster at {!r} wants a token; set RAY_AUTH_MODE=token, and its"),
        (None, MODE, "RAY_AUTH_MODE: the Ray cluster at {!r} wants a token; set RAY_AUTH_MODE=token, and its"),
        (RIGHT, {"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE: the Ray cluster at {!r} wants a token"),
        (WRONG, {}, "~/.ray/auth_token: is not the token of the Ray cluster at {!r}; set RAY_AUTH_TOKEN to it"),
        (RIGHT, {"RAY_AUTH_TOKEN": WRONG}, "RAY_AUTH_TOKEN: is not the token of the Ray cluster at {!r}"),
        (None, {**MODE, "RAY_AUTH_TOKEN": WRONG}, "RAY_AUTH_TOKEN: is not the token of the Ray cluster at {!r}"),
    ],
    ids=["none", "a mode alone", "not to be sent", "a wrong file", "a wrong variable", "mode and a wrong variable"],
)
@pytest.mark.usefixtures("process")
def test_refused_token_is_one_line(cluster: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cluster_token.check(cluster)
    assert str(caught.value).startswith(message.format(cluster))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "variables"),
    [(f"{RIGHT}\n", {}), (None, {"RAY_AUTH_TOKEN": RIGHT}), (WRONG, {**MODE, "RAY_AUTH_TOKEN": RIGHT})],
    ids=["a file with a line break", "a variable without a mode", "the variable before the file"],
)
@pytest.mark.usefixtures("process")
def test_available_token_is_sent(cluster: str) -> None:
    cluster_token.check(cluster)
    assert interceptor._get_authentication_metadata_tuple() == (("authorization", f"Bearer {RIGHT}"),)
    assert os.environ["RAY_AUTH_MODE"] == "token", "its children send it, too"


@without_token
@pytest.mark.parametrize(
    ("file", "variables"), [(WRONG, {}), (WRONG, {"RAY_AUTH_TOKEN": WRONG})], ids=["a file", "a variable"]
)
@pytest.mark.usefixtures("process")
def test_cluster_without_a_token_gets_none(cluster: str) -> None:
    cluster_token.check(cluster)
    assert "RAY_AUTH_MODE" not in os.environ
    assert interceptor._get_authentication_metadata_tuple() == ()


@without_token
@pytest.mark.parametrize(("file", "variables"), [(WRONG, MODE)])
@pytest.mark.usefixtures("process")
def test_token_mode_for_open_cluster_is_one_line(cluster: str) -> None:
    with pytest.raises(UsageError) as caught:  # its actors would die
        cluster_token.check(cluster)
    line = f"RAY_AUTH_MODE: the Ray cluster at {cluster!r} has no token; unset RAY_AUTH_MODE"
    assert str(caught.value) == line
