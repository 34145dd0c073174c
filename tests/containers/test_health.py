"""The health check reports faults while the container still runs.

The check of a worker that the head has lost takes minutes and is in test_failures.py.
"""

from tests.containers.cluster import Cluster
from tests.waiting import until


def test_head_with_a_frozen_gcs_is_unhealthy(cluster: Cluster) -> None:
    cluster.signal(cluster.head, "gcs_server", "SIGSTOP")
    try:
        assert not cluster.is_well(cluster.head), "it could accept neither nodes nor jobs"
    finally:
        cluster.signal(cluster.head, "gcs_server", "SIGCONT")
    until(lambda: cluster.is_well(cluster.head))


def test_worker_of_a_frozen_head_is_healthy(cluster: Cluster) -> None:
    cluster.signal_all(cluster.head, "SIGSTOP")
    try:
        assert cluster.is_well(cluster.workers[0])
    finally:
        cluster.signal_all(cluster.head, "SIGCONT")
    until(lambda: cluster.is_well(cluster.head))
