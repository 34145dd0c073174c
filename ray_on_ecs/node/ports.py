"""IP address and fixed ports of a node, which docs/design/nodes.md lists, and free ports for a head on this machine."""

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress

from ray_on_ecs.contract import DASHBOARD_PORT

GCS = 6379
DASHBOARD = DASHBOARD_PORT
CLIENT = 10001
AGENT = 6384

# As flags of `ray start`. The Ray Client server can't be disabled; like all the others it requires the token.
HEAD = {"--port": GCS, "--dashboard-port": DASHBOARD, "--ray-client-server-port": CLIENT}
NODE = {
    "--node-manager-port": 6380,
    "--object-manager-port": 6381,
    "--runtime-env-agent-port": 6382,
    "--dashboard-agent-grpc-port": 6383,
    # Not Ray's default, 52365: an ephemeral port, which a connection may hold before the agent starts.
    "--dashboard-agent-listen-port": AGENT,
    "--metrics-export-port": 8080,
    "--min-worker-port": 10002,
    "--max-worker-port": 10999,
}

UNROUTABLE = "192.0.2.1"  # reserved for documentation (RFC 5737), so the kernel takes the default route to it
# Outside the ranges from which Linux and Ray choose ports, so that no connection takes one before its use.
FREE: Sequence[int] = range(20_000, 32_000)

# Ray's Prometheus servers don't check the token, so they are off; RAY_enable_metrics_collection=true enables a node's.
METRICS = {
    "RAY_enable_metrics_collection": "false",
    # These two can't be disabled, but Ray runs without a server whose port can't be bound.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}


def flags(ports: dict[str, int]) -> list[str]:
    """Return the ports as arguments of `ray start`."""
    return [f"{name}={port}" for name, port in ports.items()]


def source_address_for(host: str) -> str:
    """Return this node's IP address on the route to `host`.

    An ECS task in awsvpc mode has a network interface in the VPC and another one to the agent, and a container may be
    on several networks: the other nodes are on the network of the head. OSError if the host has no route.
    """
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: asks the kernel for a route and sends nothing
        return probe.getsockname()[0]


def default_address() -> str:
    """Return this node's IP address on the default route, or its host name's address without a default route."""
    try:
        return source_address_for(UNROUTABLE)
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def own_gcs() -> str:
    """Return the address of the GCS on this head, `host:port`."""
    return f"{default_address()}:{GCS}"


def free_ports(count: int) -> list[int]:
    """Return TCP ports of 127.0.0.1 that no process uses now, each a different one."""
    ports: set[int] = set()
    while len(ports) < count:
        port = secrets.choice(FREE)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            ports.add(port)
    return list(ports)


def listens(port: int) -> bool:
    """Return whether a server listens on a TCP port of 127.0.0.1."""
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        return True
    return False
