"""The networks of this machine."""

import ipaddress
import socket

import psutil

from ray_on_ecs.run.nccl_interface import network_of


def test_network_of_an_address_has_other_addresses() -> None:
    addresses = [each for found in psutil.net_if_addrs().values() for each in found if each.family == socket.AF_INET]
    assert addresses
    for each in addresses:
        network = network_of(each.address)
        if each.address.startswith("127."):
            assert network is None
        else:
            assert network
            assert ipaddress.ip_address(each.address) in ipaddress.ip_network(network)


def test_address_of_another_machine_has_no_network() -> None:
    assert network_of("203.0.113.7") is None
