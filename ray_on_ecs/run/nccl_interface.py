"""The environment variables of NCCL and Gloo: above all the network interface that leads to the Ray head.

An ECS task in awsvpc mode has two interfaces (`eth0`, and `ecs-eth0` to the agent's bridge), a laptop several more; the
collectives must use the one that the other nodes can reach, whatever its name.
"""

import ipaddress
import itertools
import socket
from collections.abc import Mapping

import psutil

from ray_on_ecs.node.ports import source_address_for

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# The number of collectives that PyTorch's flight recorder keeps, for the report of a hang and to find slow ranks.
FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "2000")


def variables(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that point NCCL and Gloo at the interface that leads to a host, unless they are set."""
    values = dict([FLIGHT_RECORDER])
    if any(name not in environment for name in VARIABLES) and (interface := interface_towards(host)):
        # '=' is NCCL's sign for the exact name instead of a prefix.
        values |= dict(zip(VARIABLES, (f"={interface}", interface), strict=True))
    return {name: value for name, value in values.items() if name not in environment}


def interface_towards(host: str) -> str | None:
    """Return the name of the interface that packets to `host` leave by, or None if there is no route."""
    try:
        source = source_address_for(host.strip("[]"))
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == source for entry in addresses):
            return name
    return None


def network_of(address: str) -> str | None:
    """Return the network of one of this node's IPv4 addresses, such as 10.0.0.0/20; None if only this node has it."""
    for entry in itertools.chain.from_iterable(psutil.net_if_addrs().values()):
        if entry.family == socket.AF_INET and entry.address == address and entry.netmask:
            network = ipaddress.ip_interface(f"{address}/{entry.netmask}").network
            return None if network.is_loopback else str(network)
    return None
