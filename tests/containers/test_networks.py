"""A container on several networks uses the one that leads to the head."""

import re
import secrets

from tests.containers.cluster import Cluster, until

ENVIRONMENT = "cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' | grep GLOO_SOCKET_IFNAME | sort -u"
INTERFACES = """
import json, psutil
print(json.dumps({name: [each.address for each in found] for name, found in psutil.net_if_addrs().items()}))
"""


def test_ray_and_gloo_use_the_network_of_the_head(cluster: Cluster) -> None:
    engine, other = cluster.engine, f"other-{secrets.token_hex(3)}"
    replaced = cluster.workers.pop()
    engine.remove(replaced)
    name = f"{cluster.network}-two-networks"
    engine.run("network", "create", other)
    try:
        # The other network first: it has the container's first interface.
        cluster.run("worker", name, f"--network={other}", RAY_HEAD_WAIT_S="60")
        engine.run("network", "connect", cluster.network, name)
        cluster.workers.append(name)
        until(lambda: cluster.is_well(name), 90)
        cluster.settle()
        inside, outside = engine.address(name, cluster.network), engine.address(name, other)
        known = {node["NodeManagerAddress"] for node in cluster.nodes()}
        assert inside in known
        assert outside not in known, "Ray's other nodes could not reach it there"
        log = cluster.train("two-networks", "--dataset=digits", "--epochs=2")
        assert inside in re.findall(r"ip=([\d.]+)\)[^\n]*Process rank", log), "it took part"
    finally:
        cluster.workers.remove(name)
        engine.remove(name)
        engine.run("network", "rm", "--force", other, check=False)
