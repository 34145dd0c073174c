"""Ask the cluster of `RAY_ADDRESS` whether it accepts this process's token, before Ray joins it.

Ray itself would try for 20 seconds to join a cluster that refuses it, and print as many errors.
"""

import os
import time
from collections.abc import Sequence

import grpc

from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.run.queue import LOCAL
from ray_on_ecs.run.ray_private import (
    AUTH_MODE_ENV_VAR,
    AuthenticationTokenLoader,
    authentication_metadata,
    enable_token_authentication,
)

# An RPC of Ray's GCS that drivers ask, too.
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"
ANSWER_SECONDS = 3.0
# A GCS is busy, for instance, just after its head has restarted.
BUSY_SECONDS = 30.0
RETRY_SECONDS = 1.0
REFUSED = grpc.StatusCode.UNAUTHENTICATED
BUSY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def check(address: str) -> None:
    """Return if the Ray cluster at `host:port` accepts this process.

    If `RAY_AUTH_MODE` is unset and the cluster wants a token, this process sends the one that it has: in
    `RAY_AUTH_TOKEN`, or in the file `~/.ray/auth_token` that Ray makes.

    Raises:
        UsageError: The cluster wants another token, or any, or has none.
        ResourceError: The process that listens there is not a Ray cluster.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while (error := _ask(address)) in BUSY and time.monotonic() < deadline:
        time.sleep(RETRY_SECONDS)
    if error not in (None, REFUSED):
        raise ResourceError(
            f"RAY_ADDRESS: what listens at {address!r} does not answer as a Ray cluster does ({error.name}); correct "
            f"it, or train on this machine by {LOCAL}"
        )
    mode = os.environ.get(AUTH_MODE_ENV_VAR)
    if error is None:
        if mode == "token":  # its actors' calls to this process would be refused
            raise UsageError(f"RAY_AUTH_MODE: the Ray cluster at {address!r} has no token; unset RAY_AUTH_MODE")
        return
    if mode not in (None, "token") or not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        raise UsageError(
            f"RAY_AUTH_MODE: the Ray cluster at {address!r} wants a token; set RAY_AUTH_MODE=token, and its token in "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
    if mode is None:
        enable_token_authentication()
    if _ask(address, authentication_metadata()) is REFUSED:
        where = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else "~/.ray/auth_token"
        raise UsageError(f"{where}: is not the token of the Ray cluster at {address!r}; set RAY_AUTH_TOKEN to it")


def _ask(address: str, token: Sequence[tuple[str, str]] = ()) -> grpc.StatusCode | None:
    """Return why the cluster doesn't answer, or None if it does."""
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            channel.unary_unary(CHECK)(b"", timeout=ANSWER_SECONDS, metadata=token)
        except grpc.RpcError as cause:
            return cause.code()  # ty: ignore[missing-attribute]
    return None
