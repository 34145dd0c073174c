"""Liveness check of Ray's GCS, which holds the state of a cluster.

It uses plain gRPC: Ray's client takes seconds to import, and retries for ever if the GCS doesn't answer.
"""

import os

import grpc

from ray_on_ecs.node import address, ports

# The RPC of Ray's dashboard, which the GCS's event loop answers. gRPC's standard health service answers on another
# thread, also while the GCS hangs.
CHECK = "/ray.rpc.NodeInfoGcsService/CheckAlive"
TIMEOUT_SECONDS = 4.0
# Ignore the proxies of the environment: the nodes are near, and a proxy would read the token.
OPTIONS = (("grpc.enable_http_proxy", 0),)


def own_address() -> str:
    """Return the address of the GCS on this head, `host:port`."""
    return f"{address.default_address()}:{ports.GCS}"


def check(gcs_address: str) -> None:
    """Return if the GCS at `host:port` is alive and accepts our token.

    Raises:
        OSError: It doesn't answer, or refuses.
    """
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    with grpc.insecure_channel(gcs_address, options=OPTIONS) as channel:
        call = channel.unary_unary(CHECK)
        try:
            call(b"", timeout=TIMEOUT_SECONDS, metadata=(("authorization", f"Bearer {token}"),))
        except grpc.RpcError as cause:
            code, details = cause.code(), cause.details()  # ty: ignore[missing-attribute]
            raise OSError(f"the GCS at {gcs_address} does not answer: {code.name}, {details}") from cause
