"""IP address of this node for the other nodes, also in a container with several interfaces."""

import socket

UNROUTABLE = "192.0.2.1"  # reserved for documentation (RFC 5737), so the kernel takes the default route to it


def source_address_for(host: str) -> str:
    """Return this node's IP address on the route to `host`.

    An ECS task in awsvpc mode has a network interface in the VPC and another one to the agent, and a container may be
    on several networks: the other nodes are on the network of the head.

    Raises:
        OSError: `host` does not resolve, or is not routable.
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
