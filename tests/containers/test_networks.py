"""A container on several networks uses the one that leads to the head."""

import re
import secrets

from tests.containers.cluster import Cluster

BY_NAME = "import socket; print(socket.gethostbyname(socket.gethostname()))"


def test_ray_and_gloo_use_the_network_of_the_head(cluster: Cluster) -> None:
    engine = cluster.engine
    with engine.network(f"other-{secrets.token_hex(3)}") as other:
        engine.remove(cluster.workers[0])
        # The other network first: it has the container's first interface and its host name.
        name = cluster.start_worker(f"--network={other}")
        engine.run("network", "connect", cluster.network, name)
        cluster.workers.pop(0)
        try:
            cluster.settle()
            inside, outside = engine.address(name, cluster.network), engine.address(name, other)
            assert engine.python(name, BY_NAME) == outside, "left to itself Gloo listens where its host name leads"
            known = {node["NodeManagerAddress"] for node in cluster.nodes()}
            assert inside in known
            assert outside not in known, "the other nodes could not reach it there"
            log = cluster.train("two-networks", "--dataset=digits", "--epochs=1")
            assert inside in re.findall(r"ip=([\d.]+)\)[^\n]*Process rank", log), "it took part"
        finally:
            engine.remove(name)
