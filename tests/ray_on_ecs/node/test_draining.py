"""Ray drains this node by the last deadline, until it is gone."""

import subprocess
import sys

import pytest

from tests.local_cluster import LocalCluster
from tests.waiting import LIMIT_SECONDS

SIGTERM_SECONDS = 90

# Arguments: the GCS, the node's address, the process of `ray start` there.
DRAIN = f"""
import os, signal, sys, time
import ray
from ray_on_ecs.node.draining import Draining
from ray_on_ecs.run.ray_private import draining_nodes
from tests.waiting import until

gcs, address, pid = sys.argv[1:]
ray.init(gcs, log_to_driver=False)

@ray.remote(num_cpus=1)
class Work:
    def node(self):
        return ray.get_runtime_context().get_node_id()

work = Work.remote()
node = ray.get(work.node.remote())
draining = Draining(gcs, address)
assert draining_nodes() == {{}}
own = float(int(time.time()) + 60)
draining.drain(own, "EC2 terminates this Spot Instance")
assert draining_nodes() == {{node: own}}, draining_nodes()
os.kill(int(pid), signal.SIGTERM)
[by_signal] = until(lambda: [at for at in draining_nodes().values() if at != own])
assert by_signal > own, "Ray's own deadline is {SIGTERM_SECONDS} s from SIGTERM"
draining.drain(own, "again")
assert draining_nodes() == {{node: own}}, draining_nodes()
assert ray.get(work.node.remote()) == node, "work goes on"
ray.kill(work)
until(lambda: not draining_nodes())
draining.drain(own, "gone")
try:
    Draining(gcs, "127.9.9.9").drain(own, "of another")
except OSError as error:
    print(error)
"""


@pytest.mark.ray
def test_own_deadline_replaces_that_of_sigterm() -> None:
    with LocalCluster(1, {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(SIGTERM_SECONDS)}) as cluster:
        [worker] = cluster.workers
        command = (sys.executable, "-c", DRAIN, cluster.environment["RAY_ADDRESS"], cluster.addresses[worker.pid])
        done = subprocess.run(
            (*command, str(worker.pid)), env=cluster.environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        assert done.stdout == "this node has not joined the cluster\n", done.stderr
        assert worker.wait(LIMIT_SECONDS) == 1
