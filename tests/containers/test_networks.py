"""A container in several networks uses the one with the route to the head."""

from tests.containers.cluster import Cluster, Trained

BY_NAME = "import socket; print(socket.gethostbyname(socket.gethostname()))"


def test_ray_and_gloo_use_the_network_of_head(cluster: Cluster, trained: Trained, other_network: str) -> None:
    engine, name = cluster.engine, cluster.on_two_networks
    inside, outside = engine.address(name, cluster.network), engine.address(name, other_network)
    assert engine.python(name, BY_NAME) == outside, "by default Gloo would listen on this address"
    known = {node["node_ip"] for node in cluster.nodes()}
    assert inside in known
    assert outside not in known, "other nodes could not reach this address"
    assert inside in cluster.trained_on()
