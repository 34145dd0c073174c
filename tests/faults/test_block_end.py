"""A run in a Capacity Block saves its last step before EC2 ends all of its nodes, and resumes on others."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ray_on_ecs.contract import BLOCK_VARIABLE, INSTANCE_FILE_VARIABLE
from ray_on_ecs.reservations import TERMINATED
from tests.disturbed_run import CLASSIFIER, FOLDER_VARIABLE, DisturbedRun
from tests.ec2_reservations import BLOCK_ID, Ec2
from tests.local_cluster import LocalCluster
from tests.serving import serving
from tests.waiting import LIMIT_SECONDS, until

# Seconds until EC2 terminates the instances; less than its warning of ten minutes, so that the notice is due.
LEFT_SECONDS = 300
# The watch of `ray-worker` on a node. Arguments: the GCS, and the node's address.
WATCH = """
import sys
from ray_on_ecs.node import block, notice
from ray_on_ecs.node.draining import Draining

block.READ_SECONDS = 0.2
notice.Watch(lambda: None, Draining(*sys.argv[1:]).drain, lambda: None).run()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    variables = {FOLDER_VARIABLE: str(tmp_path), INSTANCE_FILE_VARIABLE: str(tmp_path / "instance.json")}
    with LocalCluster(2, variables) as cluster:
        yield cluster


def test_run_in_an_ending_block_saves_and_resumes(cluster: LocalCluster, tmp_path: Path) -> None:
    flags = ("--max-restarts", "0", "--worker-timeout", "300")
    with serving(Ec2(datetime.now(UTC) + timedelta(days=2))) as ec2, ExitStack() as stack:
        environment = {**cluster.environment, **ec2.variables, BLOCK_VARIABLE: BLOCK_ID}
        for number, node in enumerate(cluster.workers):
            command = (sys.executable, "-c", WATCH, cluster.environment["RAY_ADDRESS"], cluster.addresses[node.pid])
            environment["AWS_ACCESS_KEY_ID"] = str(number)
            watch = stack.enter_context(subprocess.Popen(command, env=environment))
            stack.callback(watch.kill)
        until(lambda: len(ec2.askers) == len(cluster.workers))
        run = DisturbedRun(cluster, "block", flags, every_seconds=None).start(step_seconds=0.4)
        run.wait_for_steps(CLASSIFIER.steps_per_epoch + 3)
        ec2.end = end = datetime.now(UTC) + TERMINATED + timedelta(seconds=LEFT_SECONDS)
        until(lambda: "nodes are being reclaimed; restarting from" in run.log, why=lambda: run.log)
        assert datetime.now(UTC) < end - TERMINATED, "before EC2 terminates the first instance"
        before = len(run.step_times)
        assert before == run.saved_step
        for node in cluster.workers:  # EC2 terminates the instances
            node.send_signal(signal.SIGKILL)
            node.wait(LIMIT_SECONDS)
        run.set_steps(0.0)
        assert run.finish() == 0, run.log  # on those of another pool
    assert re.findall(r"resuming after step (\d+)", run.log)[-1] == str(before)
    assert len(run.step_times) == run.steps, "no step was repeated"
