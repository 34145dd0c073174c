"""The networks of this machine, and the interface of its collectives."""

import ipaddress
import socket

import psutil
import pytest

from ray_on_ecs.run import nccl_interface
from ray_on_ecs.run.nccl_interface import network_of


def test_network_of_an_address_has_other_addresses() -> None:
    addresses = [each for found in psutil.net_if_addrs().values() for each in found if each.family == socket.AF_INET]
    assert addresses
    for address in addresses:
        network = network_of(address.address)
        if address.address.startswith("127."):
            assert network is None
        else:
            assert network
            assert ipaddress.ip_address(address.address) in ipaddress.ip_network(network)


def test_address_of_another_machine_has_no_network() -> None:
    assert network_of("203.0.113.7") is None


def test_interface_is_on_the_route_to_the_head() -> None:
    interfaces = psutil.net_if_addrs().items()
    loopback = next(name for name, found in interfaces if "127.0.0.1" in [each.address for each in found])
    assert nccl_interface.interface_towards("127.0.0.1") == loopback, "the route decides, not the name"
    assert nccl_interface.interface_towards("no-such-host.invalid") is None


@pytest.mark.parametrize("users", [{}, {"NCCL_SOCKET_IFNAME": "mine"}])
def test_nccl_and_gloo_use_the_interface(monkeypatch: pytest.MonkeyPatch, users: dict[str, str]) -> None:
    monkeypatch.setattr(nccl_interface, "interface_towards", lambda host: {"127.0.0.1": "eth7"}[host])
    found = {**nccl_interface.variables("127.0.0.1", users), **users}
    assert found["NCCL_SOCKET_IFNAME"] == users.get("NCCL_SOCKET_IFNAME", "=eth7"), "without '=' also eth70"
    assert found.get("GLOO_SOCKET_IFNAME", "eth7") == "eth7"
