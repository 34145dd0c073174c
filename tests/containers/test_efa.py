"""Libraries of EFA in the image: NCCL finds them, and nodes exchange messages by libfabric."""

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.containers.engine import Engine
from tests.waiting import until

pytestmark = pytest.mark.skipif(os.environ.get("EFA_SOURCES") == "", reason="the image is built without EFA")

# Newest interface of NCCL's network plugins, as the names of their symbols.
INTERFACE = """
import ctypes, pathlib, re, sysconfig
[nccl] = pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/nccl/lib/libnccl.so.2")
newest = max(map(int, re.findall(rb"ncclNetPlugin_v(\\d+)", nccl.read_bytes())))
print(newest, hasattr(ctypes.CDLL("libnccl-net.so"), f"ncclNetPlugin_v{newest}"))
"""
CUDA_RUNTIMES = """
import ctypes, pathlib, torch
ctypes.CDLL("libcudart.so").cudaRuntimeGetVersion
print(len({line.split()[-1] for line in pathlib.Path("/proc/self/maps").open() if "libcudart" in line}))
"""
PINGPONG = ("/opt/efa/bin/fi_pingpong", "-p", "tcp", "-e", "rdm")


@pytest.fixture(scope="module")
def node(engine: Engine, image: str) -> Iterator[str]:
    """A container without EFA."""
    name = f"efa-{secrets.token_hex(3)}"
    engine.run("run", "--detach", "--init", "--name", name, image, "sleep", "infinity")
    yield name
    engine.remove(name)


def test_libraries_of_efa_are_complete(engine: Engine, node: str) -> None:
    linked = engine.execute(node, "sh", "-c", "ldd /opt/efa/lib/*.so* /opt/efa/bin/fi_pingpong").stdout
    assert "libibverbs.so.1 => /opt/efa/lib/" in linked
    assert "not found" not in linked


def test_plugin_has_newest_interface_of_nccl(engine: Engine, node: str) -> None:
    interface, has_it = engine.python(node, INTERFACE).split()
    assert int(interface) > 9, "NCCL's library names its interfaces"
    assert has_it == "True"


def test_libfabric_has_providers_efa_and_tcp(engine: Engine, node: str) -> None:
    listed = engine.execute(node, "env", "--unset=FI_PROVIDER", "/opt/efa/bin/fi_info", "--list").stdout
    assert {"efa:", "tcp:"} <= set(listed.split())


def test_node_without_efa_leaves_sockets_to_nccl(engine: Engine, node: str) -> None:
    offered = engine.execute(node, "/opt/efa/bin/fi_info", check=False)
    assert offered.returncode
    assert "No data available" in offered.stdout + offered.stderr


def test_libfabric_and_torch_share_one_cuda_runtime(engine: Engine, node: str) -> None:
    assert engine.python(node, CUDA_RUNTIMES) == "1"


def test_nodes_exchange_messages_by_libfabric(engine: Engine, image: str) -> None:
    server = f"efa-{secrets.token_hex(3)}"
    with engine.network(f"{server}-network") as network:
        command = ("--env=FI_PROVIDER=tcp", f"--network={network}", image, *PINGPONG)
        try:
            engine.run("run", "--detach", "--name", server, *command)
            address = engine.address(server, network)
            assert "MB/sec" in until(lambda: exchanged(engine, *command, address))
            assert engine.wait(server)[0] == 0
        finally:
            engine.remove(server)


def exchanged(engine: Engine, *command: str) -> str:
    """Return a client's table of the messages, or nothing while the server does not listen yet."""
    done = engine.run("run", "--rm", *command, check=False)
    return "" if done.returncode else done.stdout
