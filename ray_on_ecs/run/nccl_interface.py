"""The environment variables of NCCL and Gloo: above all the network interface that leads to the Ray head.

An ECS task in awsvpc mode has two interfaces (`eth0`, and `ecs-eth0` to the agent's bridge), a laptop several more; the
collectives must use the one that the other nodes can reach, whatever its name.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil
import ray

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# The number of collectives that NCCL's flight recorder keeps for the report of a hang.
FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "2000")


def use_route_to_head() -> None:
    """Point NCCL and Gloo of this worker process at the interface that leads to the head, before a process group."""
    os.environ.update(variables(ray.get_runtime_context().gcs_address.rpartition(":")[0], os.environ))


def variables(host: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return what points NCCL and Gloo at the interface that leads to a host, and is not among the known variables."""
    found = dict([FLIGHT_RECORDER])
    if any(name not in known for name in VARIABLES) and (interface := interface_towards(host)):
        # '=' is NCCL's sign for the exact name instead of a prefix.
        found |= dict(zip(VARIABLES, (f"={interface}", interface), strict=True))
    return {name: value for name, value in found.items() if name not in known}


def interface_towards(host: str) -> str | None:
    """Return the name of the interface that packets to `host` leave by, or None if there is no route."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # UDP: asks the kernel for a route and sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == source for each in addresses):
            return name
    return None


def network_of(address: str) -> str | None:
    """Return the network of one of this node's IPv4 addresses, such as 10.0.0.0/20; None if only this node has it."""
    for found in (each for addresses in psutil.net_if_addrs().values() for each in addresses):
        if found.family == socket.AF_INET and found.address == address and found.netmask:
            network = ipaddress.ip_interface(f"{address}/{found.netmask}").network
            return None if network.is_loopback else str(network)
    return None
