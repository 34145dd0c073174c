"""The environment variables of NCCL and Gloo in a worker: above all the network interface that leads to the Ray head.

An ECS task in awsvpc mode has two interfaces (`eth0`, and `ecs-eth0` to the agent's bridge), a laptop several more; the
collectives must use the one that the other nodes can reach, whatever its name.
"""

import ipaddress
import os
import socket

import psutil
import ray

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# The number of collectives that NCCL's flight recorder keeps for the report of a hang.
FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "2000")


def use_route_to_head() -> None:
    """Point NCCL and Gloo at the interface that leads to the head.

    Ray calls this in every worker process before it makes the process group.
    """
    use_route_to(ray.get_runtime_context().gcs_address.rpartition(":")[0])


def use_route_to(host: str) -> None:
    """Point NCCL and Gloo at the interface that leads to a host, unless the user has set another."""
    os.environ.setdefault(*FLIGHT_RECORDER)
    if all(name in os.environ for name in VARIABLES):
        return
    if interface := interface_towards(host):
        nccl, gloo = VARIABLES
        os.environ.setdefault(nccl, f"={interface}")  # '=' is NCCL's sign for the exact name instead of a prefix
        os.environ.setdefault(gloo, interface)


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
