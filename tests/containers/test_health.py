"""A health check says what is the matter, while the container itself still runs.

That of a worker which the head has lost is in test_failures.py, as it takes its time.
"""

from tests.containers.cluster import Cluster
from tests.waiting import until


def test_a_head_whose_state_hangs_is_ill(cluster: Cluster) -> None:
    cluster.signal(cluster.head, "gcs_server", "SIGSTOP")
    try:
        assert not cluster.is_well(cluster.head), "nothing could join it or start on it"
    finally:
        cluster.signal(cluster.head, "gcs_server", "SIGCONT")
    until(lambda: cluster.is_well(cluster.head), 180)


def test_a_worker_whose_head_hangs_is_well(cluster: Cluster) -> None:
    cluster.engine.run("pause", cluster.head)
    try:
        assert cluster.is_well(cluster.workers[0]), "it is the head that has to be replaced"
    finally:
        cluster.engine.run("unpause", cluster.head)
    until(lambda: cluster.is_well(cluster.head), 180)
