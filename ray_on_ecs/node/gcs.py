"""Ask Ray's GCS, the state of a cluster, whether it is alive.

Over plain gRPC: Ray's own client would take seconds to import, and retries for ever where nothing answers.
"""

import os

import grpc

from ray_on_ecs.node import address, ports

# An RPC of Ray's own that its dashboard asks, too: the GCS itself answers it. gRPC's standard health service would
# answer on a thread beside it.
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
