"""Nodes listen only on the ports in docs/design/nodes.md, and other networks reach none of them."""

import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ray_on_ecs.node import ports
from tests.containers.cluster import ROOT, Cluster

DOCUMENT = (ROOT / "docs" / "design" / "nodes.md").read_text()
# The first port that the kernel assigns; the nodes are idle here, so these ports must be closed.
FROM_THE_KERNEL = "32768"
# Scans all IPv4 ports of a node from another container.
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
import itertools, socket, sys
from concurrent.futures import ThreadPoolExecutor
def knock(target):
    try:
        socket.create_connection(target, timeout=3).close()
        print(*target)
    except OSError:
        pass
with ThreadPoolExecutor(8) as pool:
    list(pool.map(knock, itertools.product(sys.argv[1:], (6379, 8265))))
"""


def documented(kind: str) -> set[int]:
    """Return the ports that the document lists for a kind of node while nothing trains."""
    rows = re.findall(r"^\| (\d{4,5})(?: to (\d+))? \| (head|worker|both) \|", DOCUMENT, flags=re.MULTILINE)
    fixed = [row for row in rows if row[0] != FROM_THE_KERNEL]
    spans = [range(int(low), int(high or low) + 1) for low, high, on in fixed if on in (kind, "both")]
    return {port for span in spans for port in span}


def listening(cluster: Cluster, name: str) -> set[int]:
    """Return the ports of a node that accept a connection from another container of the network."""
    other = cluster.workers[0] if name != cluster.workers[0] else cluster.workers[1]
    found = cluster.engine.python(other, SCAN, cluster.addresses()[name])
    return set(map(int, found.split()))


def test_nodes_listen_only_on_documented_ports(cluster: Cluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        head, worker = pool.map(partial(listening, cluster), (cluster.head, cluster.workers[0]))
    assert {ports.GCS, ports.DASHBOARD} <= head, "the scan works"
    assert head <= documented("head"), f"not in docs/design/nodes.md: {head - documented('head')}"
    assert ports.AGENT in worker
    assert worker <= documented("worker"), f"not in docs/design/nodes.md: {worker - documented('worker')}"


def test_other_networks_reach_no_port(cluster: Cluster) -> None:
    """The network stands for the security group: both admit only their members."""
    addresses = cluster.addresses().values()
    assert cluster.engine.python(cluster.workers[0], REACH, *addresses)
    with (
        cluster.engine.network(f"outside-{secrets.token_hex(3)}") as outside,
        cluster.one_more("worker", "outsider", f"--network={outside}", command=("sleep", "120")) as name,
    ):
        assert not cluster.engine.python(name, REACH, *addresses)
