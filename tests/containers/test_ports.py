"""What a node listens on is what docs/image.md says, and nobody outside the network reaches any of it."""

import re
import secrets

from raynode import ports
from tests.containers.cluster import ROOT, Cluster

DOCUMENT = (ROOT / "docs" / "image.md").read_text()
# Whole IPv4 port range of a node, as a process of another container sees it.
SCAN = """
import asyncio, sys
async def knock(host, port, gate):
    async with gate:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 3)
        except (OSError, asyncio.TimeoutError):
            return None
        writer.close()
        return port
async def main(host):
    gate = asyncio.Semaphore(500)
    found = await asyncio.gather(*(knock(host, port, gate) for port in range(1, 65536)))
    print(*(port for port in found if port))
asyncio.run(main(sys.argv[1]))
"""
REACH = """
import socket, sys
for host in sys.argv[1:]:
    for port in (6379, 8265):
        try:
            socket.create_connection((host, port), timeout=3).close()
            print(host, port)
        except OSError:
            pass
"""


def documented(kind: str) -> set[int]:
    """The ports that the document's table has for a kind of node."""
    rows = re.findall(r"^\| (\d{4,5})(?: to (\d+))? \| (.*?) \|", DOCUMENT, flags=re.MULTILINE)
    spans = [range(int(low), int(high or low) + 1) for low, high, on in rows if kind in on or on == "both"]
    return {port for span in spans for port in span}


def listening(cluster: Cluster, name: str) -> set[int]:
    """The ports of a node that take a connection from another container of the network."""
    other = cluster.workers[0] if name != cluster.workers[0] else cluster.workers[1]
    found = cluster.engine.execute(other, "python", "-c", SCAN, cluster.addresses()[name]).stdout
    return set(map(int, found.split()))


def test_nodes_listen_on_documented_ports_alone(cluster: Cluster) -> None:
    head = listening(cluster, cluster.head)
    assert {ports.GCS, ports.DASHBOARD} <= head, "the scan finds what is there"
    assert head <= documented("head"), f"not in docs/image.md: {head - documented('head')}"
    worker = listening(cluster, cluster.workers[0])
    assert ports.AGENT in worker
    assert worker <= documented("worker"), f"not in docs/image.md: {worker - documented('worker')}"


def test_another_network_reaches_nothing(cluster: Cluster) -> None:
    """The network stands for the security group: both let in nobody but their own."""
    outside = f"outside-{secrets.token_hex(3)}"
    cluster.engine.run("network", "create", outside)
    try:
        with cluster.one_more("worker", "outsider", f"--network={outside}", command=("sleep", "120")) as name:
            reached = cluster.engine.execute(name, "python", "-c", REACH, *cluster.addresses().values()).stdout
    finally:
        cluster.engine.run("network", "rm", outside, check=False)
    assert not reached, "reached from another network"
