"""A run of image_classifier.py survives killed and failing processes of a Ray cluster with two worker nodes.

test_scripts.py and test_checkpointer_scripts.py kill the processes that every script has.
"""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, NOTICES_FILE, REBALANCE, SPOT_ACTION
from ray_on_ecs.node import notice
from ray_on_ecs.node.protection import AGENT_VARIABLE
from tests import failing_monitor
from tests.aws import BUCKET
from tests.disturbed_run import AT_ONCE, CLASSIFIER, FOLDER_VARIABLE, DisturbedRun, S3Run
from tests.ecs_agent import PROTECT, RELEASE, Agent
from tests.failing_monitor import CloudWatch
from tests.flaky_s3 import FlakyProxy, flaky_proxy
from tests.local_cluster import REPOSITORY, LocalCluster, have_ended, kill, kill_tree
from tests.serving import serving
from tests.waiting import LIMIT_SECONDS, until

# In the middle of the second epoch, with a checkpoint of that epoch.
EPOCH = CLASSIFIER.steps_per_epoch
MIDDLE, SAVED = EPOCH + 5, EPOCH + 1
# A draining node's time for its work.
DRAIN_SECONDS = 120
STALL_SECONDS = 60
Start = Callable[..., DisturbedRun]
# The threads of `ray-worker` on a node; it reports each drain to the agent's stand-in. Arguments: the GCS, the node.
WATCH = """
import os, sys
from ray_on_ecs.node import api, notice, protection
from ray_on_ecs.node.draining import Draining

protection.POLL_SECONDS = 0.2
release, draining = protection.start(lambda: True), Draining(*sys.argv[1:])

def drain(deadline, reason):
    draining.drain(deadline, reason)
    api.ask(os.environ[protection.AGENT_VARIABLE] + "/drained", 10, token="", method="PUT", body={"until": deadline})

notice.Watch(release, drain, lambda: None).run()
"""


@pytest.fixture(scope="module")
def proxy(aws_server: str) -> Iterator[FlakyProxy]:
    """An S3 that loses two fifths of its answers, never two in a row to the same request."""
    with flaky_proxy(aws_server, 0.05, 0.7, spared=1) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def cloudwatch(aws_server: str) -> Iterator[CloudWatch]:
    with failing_monitor.cloudwatch(aws_server) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, proxy: FlakyProxy, cloudwatch: CloudWatch, aws_variables: dict[str, str]
) -> Iterator[LocalCluster]:
    variables = {
        **aws_variables,
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ENDPOINT_URL_CLOUDWATCH": cloudwatch.url,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS),
        FOLDER_VARIABLE: str(tmp_path_factory.mktemp("runs")),
        INSTANCE_FILE_VARIABLE: str(tmp_path_factory.mktemp("instance") / "instance.json"),
    }
    with LocalCluster(2, variables) as cluster:
        yield cluster


@pytest.fixture
def start(cluster: LocalCluster) -> Iterator[Start]:
    """Start a run with this name and these flags on two nodes; its command is killed after the test."""
    cluster.replace_ended()
    runs: list[DisturbedRun] = []

    def start(
        name: str, *flags: str, s3_client: Any = None, every_seconds: float | None = AT_ONCE, **options: Any
    ) -> DisturbedRun:
        kind = partial(S3Run, client=s3_client) if s3_client else DisturbedRun
        run = kind(cluster, name, flags, every_seconds=every_seconds)
        runs.append(run)
        return run.start(**options)

    yield start
    for run in runs:
        if run.command:
            kill_tree(run.command.pid)
            run.command.wait()


@pytest.fixture(scope="module")
def uninterrupted(cluster: LocalCluster) -> DisturbedRun:
    """An undisturbed run."""
    run = DisturbedRun(cluster, "uninterrupted").start(step_seconds=0.0)
    assert run.finish() == 0, run.log
    assert len(run.step_times) == run.steps
    return run


def both_new(cluster: LocalCluster, ended: set[int]) -> list[psutil.Process]:
    """Return the workers, once both exist beside those that have ended."""
    workers = [actor for actor in cluster.actors() if actor.pid not in ended]
    return workers if len(workers) == 2 else []


def test_workers_killed_during_startup_are_restarted(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("starting")
    ended: set[int] = set()
    for _ in range(2):
        workers = until(partial(both_new, cluster, ended), between=0.1)
        kill(workers[0].pid)
        ended.add(workers[0].pid)
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert "restarting from the beginning (failure 2 in a row, --max-restarts is 3)" in run.log


def test_killed_worker_is_replaced_while_the_other_stays(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("worker")
    run.wait_for_steps(MIDDLE, SAVED)
    saved_step = run.saved_step
    killed, other = cluster.actors()
    kill(killed.pid)
    until(lambda: len(both_new(cluster, {killed.pid})) == 2, between=0.1)
    assert other in cluster.actors()
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert int(re.findall(r"resuming after step (\d+)", run.log)[-1]) >= saved_step
    records = [json.loads(line) for line in run.read("metrics.jsonl").splitlines()]
    assert [record["step"] for record in records if "test_loss" in record] == [EPOCH, 2 * EPOCH, 3 * EPOCH]


def test_draining_node_stores_all_steps_before_it_stops(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    # No checkpoint is due within an epoch, and no failure is allowed.
    run = start("notice", "--max-restarts", "0", every_seconds=None, step_seconds=0.4)
    run.wait_for_steps(MIDDLE - 3)
    cluster.workers[0].send_signal(signal.SIGTERM)
    cluster.workers[0].wait(LIMIT_SECONDS)
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert len(run.step_times) == run.steps, "no step was repeated"
    assert "the scripts are being ended: saving after step " in run.log
    assert "nodes are being reclaimed; restarting from checkpoints/step-" in run.log


@pytest.fixture
def notices(cluster: LocalCluster) -> Iterator[Path]:
    """The file with the notices of the nodes' machine."""
    file = Path(cluster.environment[INSTANCE_FILE_VARIABLE]).with_name(NOTICES_FILE)
    yield file
    file.unlink()


def test_spot_notice_releases_the_task_and_loses_no_step(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun, notices: Path
) -> None:
    node = cluster.workers[0]
    run = start("spot", "--max-restarts", "0", every_seconds=None, step_seconds=0.4)
    with serving(Agent()) as agent:
        environment = {**cluster.environment, AGENT_VARIABLE: f"http://127.0.0.1:{agent.server_port}"}
        command = (sys.executable, "-c", WATCH, cluster.environment["RAY_ADDRESS"], cluster.addresses[node.pid])
        watch = subprocess.Popen(command, env=environment)
        try:
            until(lambda: PROTECT in agent.states)
            run.wait_for_steps(MIDDLE - 3)
            at = time.time() + 120
            notices.write_text(json.dumps({SPOT_ACTION: json.dumps({"action": "terminate", "time": iso(at)})}))
            until(
                lambda: "nodes are being reclaimed; restarting from checkpoints/step-" in run.log, why=lambda: run.log
            )
            assert time.time() < at - notice.STORE_SECONDS
        finally:
            watch.kill()
            watch.wait()
    told = [(path.rpartition("/")[2], state) for path, state in agent.put]
    released, drained = told.index(("state", RELEASE)), ("drained", {"until": pytest.approx(at - 30, abs=2)})
    assert {str(each) for each in told[:released]} == {str(("state", PROTECT))}
    assert set(map(str, told[released + 1 :])) == {str(told[-1])}
    assert told[-1] == drained
    node.send_signal(signal.SIGTERM)  # as ECS does, once it may
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert len(run.step_times) == run.steps, "no step was repeated"


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_recommendation_costs_one_save_and_ends_nothing(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun, notices: Path
) -> None:
    pattern = re.compile(r"a node may be reclaimed: saving after step (\d+)")
    run = start("recommendation", every_seconds=None, step_seconds=0.4)
    run.wait_for_steps(EPOCH + 2)
    notices.write_text(json.dumps({REBALANCE: json.dumps({"noticeTime": iso(time.time())})}))
    until(lambda: pattern.findall(run.log) and run.saved_step > EPOCH, why=lambda: run.log)
    saved = run.saved_step
    before = len(run.step_times)
    run.wait_for_steps(before + 3)
    assert "restarting" not in run.log
    kill(run.ranks[0].pid)
    assert run.finish() == 0, run.log
    # Nodes that share a machine repeat some lines.
    assert set(pattern.findall(run.log)) == {str(saved)}, "the start that follows has this checkpoint"
    assert f"resuming after step {saved} " in run.log
    assert run.has_weights_of(uninterrupted)


def test_run_is_unaffected_by_a_failing_monitor(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun, cloudwatch: CloudWatch
) -> None:
    run = start("monitor", "--cloudwatch-namespace", "monitor", step_seconds=0.3)
    run.wait_for_steps(MIDDLE, SAVED)
    [dashboard] = cluster.head_processes("dashboard/dashboard.py")
    dashboard.suspend()
    try:
        with cloudwatch.outage():
            assert run.finish() == 0, run.log
    finally:
        dashboard.resume()
    assert cloudwatch.refused
    assert len(run.step_times) == run.steps, "no step was repeated"
    assert "restarting" not in run.log
    assert run.has_weights_of(uninterrupted)


def test_lost_s3_requests_cost_only_time(
    start: Start, uninterrupted: DisturbedRun, proxy: FlakyProxy, s3_client: Any
) -> None:
    proxy.decide("lose", "PUT .*/run.lock", 2)
    proxy.decide("pass", "PUT .*/run.lock")  # botocore tries three times
    run = start("lost-calls", s3_client=s3_client, step_seconds=0.2)
    assert run.finish() == 0, run.log
    requests = proxy.failed + proxy.lost + proxy.answered
    assert proxy.failed > 0
    assert proxy.lost > 0.3 * requests, f"{proxy.lost} of {requests} answers were lost"
    assert "could not be" not in run.log
    assert run.has_weights_of(uninterrupted)
    objects = s3_client.list_objects_v2(Bucket=BUCKET, Prefix="runs/lost-calls/")["Contents"]
    assert "runs/lost-calls/run.lock" not in {each["Key"] for each in objects}


def test_stalled_run_stores_all_stacks_and_can_resume(start: Start, uninterrupted: DisturbedRun) -> None:
    run = start("stall", "--max-restarts", "0", "--hang-timeout", str(STALL_SECONDS))
    run.wait_for_steps(MIDDLE)
    frozen = run.ranks[0]
    rank = int(frozen.environ()["RANK"])
    frozen.suspend()
    assert run.finish() == 1, run.log
    assert have_ended([frozen]), "it would keep the GPU"
    [folder] = (run.folder / "stalls").iterdir()
    stacks = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(stacks) == {"stacks.txt", "rank_0.txt", "rank_1.txt"}
    assert "image_classifier.py" in stacks[f"rank_{1 - rank}.txt"]
    error = json.loads(run.read("error.json"))
    assert error["what"].startswith(f"no progress for {STALL_SECONDS} s: ")
    assert "is stopped by a signal (SIGSTOP)" in error["what"]
    assert error["rank"] == rank
    assert error["stacks"] == str(folder)
    assert f"see {run.folder}/error.json" in run.log
    run.start("--hang-timeout", "600")
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert not (run.folder / "error.json").exists()


def test_permanent_failure_leaves_a_resumable_run(start: Start, uninterrupted: DisturbedRun) -> None:
    run = start("broken", "--max-restarts", "0", fail_at=MIDDLE)
    assert run.finish() == 1
    output = run.log[run.log.index("ray-on-ecs: training failed on rank") :]
    assert "image_classifier.py ended with exit status 1: ValueError: this step is broken; see " in output
    assert "Traceback" not in output
    error = json.loads(run.read("error.json"))
    assert error["what"] == "image_classifier.py ended with exit status 1: ValueError: this step is broken"
    assert error["rank"] in (0, 1)
    assert "image_classifier.py" in error["where"]
    assert "about to fail" in error["log"]
    assert run.saved_step
    run.set_steps(0.0)
    code = REPOSITORY / "training"  # the command is for the folder with the code
    run.start_command("--working-dir", str(code), *shlex.split(error["next"])[2:])
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
