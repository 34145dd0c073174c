"""NCCL's logs of versions 2.12 to 2.29, as public issues and documents have them, shortened to what differs."""

from __future__ import annotations

import pytest

from ray_on_ecs.run.nccl_log import Transport, transport_in

NO_PLUGIN = "it did not find its plugin, libnccl-net.so of aws-ofi-nccl"

# https://github.com/NVIDIA/nccl/issues/1267
NCCL_2_19 = """
i-3:2744870:2744870 [0] NCCL INFO Bootstrap : Using ens7:10.128.0.32<0>
i-3:2744870:2744870 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v7 symbol.
NCCL version 2.19.3+cuda12.3
i-3:2744870:2745046 [0] NCCL INFO NET/IB : No device found.
i-3:2744870:2745046 [0] NCCL INFO NET/Socket : Using [0]ens7:10.128.0.32<0>
i-3:2744870:2745046 [0] NCCL INFO Using non-device net plugin version 0
i-3:2744870:2745046 [0] NCCL INFO Using network Socket
"""
# https://github.com/NVIDIA/nccl-tests/issues/188
NCCL_2_18 = """
user:835:835 [4] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared \
object file: No such file or directory
user:835:835 [4] NCCL INFO NET/Plugin : No plugin found, using internal implementation
user:835:835 [4] NCCL INFO NET/Socket : Using [0]eth0:192.168.1.14<0>
user:835:835 [4] NCCL INFO Using network Socket
"""
# https://github.com/NVIDIA/nccl/issues/1519
FAST_SOCKET = """
h100:14492:14492 [0] NCCL INFO NET/Plugin: Loaded net plugin FastSocket (v6)
h100:14492:14605 [0] NCCL INFO NET/FastSocket : Using [0]enp0s12:10.0.0.6<0> [1]enp6s0f0:10.0.1.4<0>
h100:14492:14605 [0] NCCL INFO Using network FastSocket
"""
# https://github.com/NVIDIA/nccl/issues/1357
INFINIBAND = """
g19:49357:49418 [3] NCCL INFO Using network IBext
g19:49357:49418 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [RO]; OOB ibp25s0:10.20.0.119<0>
"""
# aws-ofi-nccl of NCCL 2.12, on an instance with one interface.
EFA_2_12 = """
w-0:21:21 [0] NCCL INFO NET/OFI Selected Provider is efa (found 1 nics)
w-0:21:21 [0] NCCL INFO Using network AWS Libfabric
NCCL version 2.12.7+cuda11.4
"""
# The line that AWS's guide shows, with an asterisk and without a number.
EFA_OF_GUIDE = """
ip-192-168-2-54:14:14 [0] NCCL INFO NET/OFI Selected Provider is efa*
ip-192-168-2-54:14:14 [0] NCCL INFO Using network AWS Libfabric
"""
EFA_P4D = """
ip-10-0-0-1:10:99 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v6)
ip-10-0-0-1:10:99 [0] NCCL INFO NET/OFI Running on p4d.24xlarge platform, topology file /opt/p4d-24xl-topo.xml
ip-10-0-0-1:10:99 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
ip-10-0-0-1:10:99 [0] NCCL INFO Using network AWS Libfabric
"""
EFA_P5 = """
ip-10-0-0-1:10:99 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.18.0
ip-10-0-0-1:10:99 [0] NCCL INFO NET/OFI Using transport protocol RDMA (platform set)
ip-10-0-0-1:10:99 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
ip-10-0-0-1:10:99 [0] NCCL INFO Initialized NET plugin Libfabric
ip-10-0-0-1:10:99 [0] NCCL INFO Assigned NET plugin Libfabric to comm
ip-10-0-0-1:10:99 [0] NCCL INFO Using network Libfabric
"""
# https://github.com/NVIDIA/nccl/issues/1597, of a plugin that counts the groups: AWS's benchmark notes such ones.
EFA_GROUPS = """
8h200-3:6310:6318 [0] NCCL INFO NET/OFI Selected Provider is efa (found 2 nics)
8h200-3:6310:6318 [0] NCCL INFO NET/OFI NIC group 0 device #0 0000:56:00.0
8h200-3:6310:6318 [0] NCCL INFO NET/OFI NIC group 0 device #1 0000:55:00.0
8h200-3:6310:6318 [0] NCCL INFO NET/OFI NIC group 1 device #0 0000:58:00.0
8h200-3:6310:6318 [0] NCCL INFO NET/OFI NIC group 1 device #1 0000:57:00.0
8h200-3:6310:6318 [0] NCCL INFO Using network Libfabric
"""
# A container without the devices: https://github.com/aws/aws-ofi-nccl/issues/889
NO_DEVICE_2_21 = """
NCCL version 2.21.5+cuda12.8
libfabric:85:1747438790::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list
ip:79:88 [0] NCCL INFO NET/Socket : Using [0]eth0:10.36.29.253<0>
ip:79:88 [0] NCCL INFO Using network Socket
"""
NO_DEVICE_2_27 = """
ip-1:35116:35475 [3] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v10)
ip-1:35116:35475 [3] NCCL INFO NET/OFI Setting provider_filter to efa

[2026-01-02 10:24:28] ip-1:35116:35475 [3] nccl_net_ofi_create_plugin:353 NCCL WARN NET/OFI aws-ofi-nccl \
initialization failed
ip-1:35116:35475 [3] NCCL INFO NET/Socket : Using [0]ens32:172.31.3.153<0>
ip-1:35116:35475 [3] NCCL INFO Initialized NET plugin Socket
ip-1:35116:35475 [3] NCCL INFO Assigned NET plugin Socket to comm
ip-1:35116:35475 [3] NCCL INFO Using network Socket
"""
NCCL_2_27 = """
m:7:12 [1] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. 
m:7:12 [1] NCCL INFO NET/IB : No device found.
m:7:12 [1] NCCL INFO NET/IB : Using [RO]; OOB enp6s0:192.168.68.52<0>
m:7:12 [1] NCCL INFO NET/Socket : Using [0]enp6s0:192.168.68.52<0> [1]br-2b:fe80::2034:8eff:fea5:3cc5%br-2b<0>
m:7:12 [1] NCCL INFO Assigned NET plugin Socket to comm
"""  # noqa: W291
NCCL_2_29 = """
lab:14:14 [0] NCCL INFO NCCL version 2.29.7+cuda12.9
lab:14:14 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
lab:14:14 [0] NCCL INFO Failed to initialize NET plugin IB
lab:14:14 [0] NCCL INFO NET/Socket : Using [0]eth0:128.114.59.195<0>
lab:14:14 [0] NCCL INFO Assigned NET plugin Socket to comm
lab:14:14 [0] NCCL INFO GIN/Plugin: Could not find: libnccl-gin.so
lab:14:14 [0] NCCL INFO Using network Socket
"""
# NCCL 2.28 on another provider of libfabric.
SLINGSHOT = """
NCCL INFO NET/OFI Selected Provider is cxi (found 2 nics)
NCCL INFO Using network AWS Libfabric
"""
# libfabric's TCP has the plugin's name, too.
TCP = """
ip:79:88 [0] NCCL INFO NET/OFI Could not find an optimal provider supporting GPUDirect RDMA
NCCL INFO NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/20 (found 1 nics)
NCCL INFO Using network Libfabric
"""
# The plugin finds EFA, and a variable chooses sockets.
CHOSEN = """
ip:1:1 [0] NCCL INFO NCCL_NET set by environment to Socket.
ip:1:1 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 4 nics)
ip:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>
ip:1:1 [0] NCCL INFO Using network Socket
"""


@pytest.mark.parametrize(
    ("log", "used"),
    [
        (NCCL_2_18, Transport("NCCL", "sockets", 1, ("eth0",), NO_PLUGIN)),
        (NCCL_2_19, Transport("NCCL", "sockets", 1, ("ens7",))),
        (NCCL_2_27, Transport("NCCL", "sockets", 2, ("enp6s0", "br-2b"), NO_PLUGIN)),
        (NCCL_2_29, Transport("NCCL", "sockets", 1, ("eth0",), NO_PLUGIN)),
        (FAST_SOCKET, Transport("NCCL", "FastSocket", 2, ("enp0s12", "enp6s0f0"))),
        (INFINIBAND, Transport("NCCL", "InfiniBand", 2, ("mlx5_0", "mlx5_1"))),
        (EFA_2_12, Transport("NCCL", "EFA", 1)),
        (EFA_OF_GUIDE, Transport("NCCL", "EFA")),
        (EFA_P4D, Transport("NCCL", "EFA", 4)),
        (EFA_P5, Transport("NCCL", "EFA", 32)),
        (EFA_GROUPS, Transport("NCCL", "EFA", 4)),
        (NO_DEVICE_2_21, Transport("NCCL", "sockets", 1, ("eth0",), "its plugin found no EFA device")),
        (NO_DEVICE_2_27, Transport("NCCL", "sockets", 1, ("ens32",), "its plugin for EFA could not start")),
        (SLINGSHOT, Transport("NCCL", "libfabric's provider cxi", 2)),
        (TCP, Transport("NCCL", "libfabric's provider tcp;ofi_rxm", 1, (), "its plugin found no EFA device")),
        (INFINIBAND.replace("IBext", "IBext_v8"), Transport("NCCL", "InfiniBand", 2, ("mlx5_0", "mlx5_1"))),
        (CHOSEN, Transport("NCCL", "sockets", 1, ("eth0",), "its variables choose Socket")),
    ],
)
def test_network_of_a_communicator_is_read(log: str, used: Transport) -> None:
    assert transport_in(log.splitlines()) == used


@pytest.mark.parametrize("lines", [0, 1, 2, 3])
def test_network_is_unknown_before_a_communicator_takes_it(lines: int) -> None:
    assert transport_in(EFA_P5.splitlines()[: lines + 1]) is None


@pytest.mark.parametrize("name", ["AWS Libfabric", "Libfabric"])
def test_libfabric_without_a_provider_is_unknown(name: str) -> None:
    assert transport_in([f"ip-1:1:1 [0] NCCL INFO Using network {name}"]) is None


def test_last_communicator_counts() -> None:
    assert transport_in([*EFA_P4D.splitlines(), *NCCL_2_19.splitlines()]) == Transport("NCCL", "sockets", 1, ("ens7",))
