"""After SIGTERM a node ends in time with exit status 0. test_failures.py stops nodes that train."""

from infra.definitions.containers import WORKER_DRAIN_SECONDS
from tests.containers.cluster import Cluster
from tests.waiting import until


def test_idle_worker_stops_in_time(cluster: Cluster) -> None:
    name = cluster.workers[0]
    status, seconds = cluster.stop(name)
    log = cluster.engine.logs(name)
    assert status == 0, log
    assert "asked to stop" in log
    assert seconds < WORKER_DRAIN_SECONDS


def test_waiting_worker_stops_in_time(cluster: Cluster) -> None:
    with cluster.one_more("worker", "waiting", RAY_HEAD_HOST="nobody.internal") as name:
        until(lambda: "waiting for the head" in cluster.engine.logs(name))
        status, seconds = cluster.stop(name)
        assert status == 0
        assert seconds < WORKER_DRAIN_SECONDS
