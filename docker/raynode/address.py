"""The address under which the other nodes reach this one, where the container has several."""

import socket

ANYWHERE = "192.0.2.1"  # of a network that exists nowhere (RFC 5737): its route is the default one


def towards(host: str) -> str:
    """This node's address on the route to `host`; OSError where there is none.

    An ECS task in awsvpc mode has its own network interface and another to the agent, a container may be on several
    networks: the one that leads to the head is where the other nodes are.
    """
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: asks the kernel for a route and sends nothing
        return probe.getsockname()[0]


def own() -> str:
    """The head's own address: on the default route, or without one that of its host name."""
    try:
        return towards(ANYWHERE)
    except OSError:
        return socket.gethostbyname(socket.gethostname())
