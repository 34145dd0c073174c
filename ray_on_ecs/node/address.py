"""The address under which the other nodes reach this one, even if the container has several."""

import socket

UNROUTABLE = "192.0.2.1"  # reserved for documentation (RFC 5737), so the kernel takes the default route to it


def source_address_for(host: str) -> str:
    """Return this node's IP address on the route to `host`.

    An ECS task in awsvpc mode has its own network interface and another one to the agent, and a container may be on
    several networks: the other nodes are on the one that leads to the head.

    Raises:
        OSError: `host` has no address, or no route leads there.
    """
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: asks the kernel for a route and sends nothing
        return probe.getsockname()[0]


def default_address() -> str:
    """Return the head's own IP address: the one on the default route, or the one of its host name if there is none."""
    try:
        return source_address_for(UNROUTABLE)
    except OSError:
        return socket.gethostbyname(socket.gethostname())
