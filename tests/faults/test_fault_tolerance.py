"""What a run survives: processes of a Ray cluster with two worker nodes are killed halfway through the training."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest

from tests import failing_monitor
from tests.aws import BUCKET
from tests.disturbed_run import EPOCHS, EVERY_STEP, STEPS_PER_EPOCH, DisturbedRun, S3Run
from tests.failing_monitor import CloudWatch
from tests.flaky_s3 import FlakyProxy, flaky_proxy
from tests.local_cluster import LocalCluster, have_ended, kill, kill_tree
from tests.slow_model import FOLDER_VARIABLE
from tests.waiting import until

# In the middle of the second epoch, with a checkpoint of that epoch.
MIDDLE, SAVED = STEPS_PER_EPOCH + 5, STEPS_PER_EPOCH + 1
# A draining node's time for its work.
DRAIN_SECONDS = 120
STALL_SECONDS = 60
Start = Callable[..., DisturbedRun]


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
    }
    with LocalCluster(2, variables) as cluster:
        yield cluster


@pytest.fixture
def start(cluster: LocalCluster) -> Iterator[Start]:
    """Start a run with this name and these flags on two nodes; its command is killed after the test."""
    cluster.replace_ended()
    runs: list[DisturbedRun] = []

    def start(name: str, *flags: str, s3_client: Any = None, **options: Any) -> DisturbedRun:
        flags = flags or EVERY_STEP
        run = S3Run(cluster, name, flags, client=s3_client) if s3_client else DisturbedRun(cluster, name, flags)
        runs.append(run)
        return run.start(**options)

    yield start
    for run in runs:
        if run.command:
            kill_tree(run.command.pid)
            run.command.wait()


@pytest.fixture(scope="module")
def uninterrupted(cluster: LocalCluster) -> DisturbedRun:
    """A run that nothing happens to."""
    run = DisturbedRun(cluster, "uninterrupted").start(step_seconds=0.0)
    assert run.finish() == 0, run.log
    assert len(run.step_times) == EPOCHS * STEPS_PER_EPOCH
    return run


class Interrupt:
    """The moment at which a run was interrupted: the steps that it had made, and its last saved checkpoint."""

    def __init__(self, run: DisturbedRun) -> None:
        self._run = run
        self._steps = len(run.step_times)
        self._saved_step = run.saved_step

    def cost_little(self) -> bool:
        """Whether the run resumed within an epoch, from that checkpoint or a later one, and repeated no earlier step.

        A checkpoint is taken as soon as the previous one is saved. One rank alone may have been within a step.
        """
        resumed_step = int(re.findall(r"resuming from checkpoint_(\d+)", self._run.log)[-1])
        repeated = len(self._run.step_times) - EPOCHS * STEPS_PER_EPOCH
        return STEPS_PER_EPOCH < self._saved_step <= resumed_step and repeated <= self._steps - resumed_step + 1


def assert_it_resumes(run: DisturbedRun, workers: list[psutil.Process], uninterrupted: DisturbedRun) -> None:
    """Wait for the workers' end and for the run's, which must have lost little and none of its result."""
    until(lambda: have_ended(workers), 180)
    interrupt = Interrupt(run)
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert interrupt.cost_little()


def test_a_killed_worker_is_started_again(start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun) -> None:
    run = start("worker")
    run.wait_for_steps(MIDDLE, SAVED)
    workers = cluster.train_workers()
    kill(workers[0].pid)
    assert_it_resumes(run, workers, uninterrupted)


def test_a_killed_raylet_takes_its_node_and_the_run_goes_on(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("raylet")
    run.wait_for_steps(MIDDLE, SAVED)
    [raylet] = cluster.worker_processes(cluster.workers[1], "raylet/raylet")
    workers = cluster.train_workers()
    kill(raylet.pid)
    assert_it_resumes(run, workers, uninterrupted)


def both_new(cluster: LocalCluster, ended: set[int]) -> list[psutil.Process]:
    """Return the workers of a group that has just started, once both are there."""
    workers = [each for each in cluster.train_workers() if each.pid not in ended]
    return workers if len(workers) == 2 else []


def test_workers_that_die_while_they_start_are_started_again(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("starting")
    ended: set[int] = set()
    for _ in range(2):
        workers = until(partial(both_new, cluster, ended), 180, between=0.02)
        kill(workers[0].pid)
        ended |= {each.pid for each in workers}
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert "restarting from the beginning (failure 2 in a row, --max-restarts is 3)" in run.log


def test_a_run_loses_nothing_with_its_run_state_actor(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("run-state", *EVERY_STEP, "--max-restarts", "0", step_seconds=0.3)
    run.wait_for_steps(MIDDLE)
    [actor] = cluster.head_processes("RunActor")
    kill(actor.pid)
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert len(run.step_times) == EPOCHS * STEPS_PER_EPOCH, "no step was repeated"
    assert run.log.count("the actor of the run was lost and restarted; training continues") == 1
    shown = re.findall(r"^epoch (\d)/", run.log, flags=re.MULTILINE)
    assert shown == [str(epoch + 1) for epoch in range(EPOCHS)], "each epoch once"


def test_a_run_goes_on_with_the_workers_that_are_left(start: Start, cluster: LocalCluster) -> None:
    # Must run before the tests that kill a controller or a driver: Ray withholds its placement group from elastic runs
    # for minutes.
    run = start("elastic", *EVERY_STEP, "--num-workers", "1:2")
    run.wait_for_steps(MIDDLE)
    kill_tree(cluster.workers[0].pid)
    assert run.finish(replace=False) == 0, run.log
    history = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["world_size"] for each in history] == [2, 1, 1]
    assert {each["global_batch"] for each in history} == {128}
    assert history[-1]["test_accuracy"] > 0.5, "it kept learning"


def test_a_controller_that_dies_while_the_workers_start_holds_no_resources(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("early-controller")
    until(cluster.train_workers, 180, between=0.02)
    [controller] = cluster.head_processes("TrainController")
    kill(controller.pid)
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)


def test_a_killed_controller_is_replaced_by_another(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("controller")
    run.wait_for_steps(MIDDLE, SAVED)
    workers = cluster.train_workers()
    [controller] = cluster.head_processes("TrainController")
    kill(controller.pid)
    assert_it_resumes(run, workers, uninterrupted)


def test_the_same_command_continues_after_the_driver_was_killed(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("driver")
    run.wait_for_steps(MIDDLE, SAVED)
    assert run.command is not None
    kill(run.command.pid)
    assert run.command.wait(180) == -signal.SIGKILL
    until(lambda: not cluster.train_workers(), 180)
    interrupt = Interrupt(run)
    run.start()
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert "continued from its last checkpoint" in run.log
    assert interrupt.cost_little()


def test_a_node_that_is_told_to_stop_has_all_steps_stored_first(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    # No checkpoint is due within an epoch, and no failure is allowed.
    run = start("notice", "--max-restarts", "0", step_seconds=0.4)
    run.wait_for_steps(MIDDLE - 3)
    began = time.monotonic()
    cluster.workers[0].send_signal(signal.SIGTERM)
    cluster.workers[0].wait(2 * DRAIN_SECONDS)
    assert time.monotonic() - began < DRAIN_SECONDS - 10, "the workers left the node before its deadline"
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert len(run.step_times) == EPOCHS * STEPS_PER_EPOCH, "no step was repeated"
    assert "are being preempted; stopped after step" in run.log


def test_a_run_does_not_notice_that_its_monitor_fails(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun, cloudwatch: CloudWatch
) -> None:
    run = start("monitor", *EVERY_STEP, "--cloudwatch-namespace", "monitor", step_seconds=0.3)
    run.wait_for_steps(MIDDLE, SAVED)
    [dashboard] = cluster.head_processes("dashboard/dashboard.py")
    dashboard.suspend()
    try:
        with cloudwatch.outage():
            assert run.finish() == 0, run.log
    finally:
        dashboard.resume()
    assert cloudwatch.refused
    assert len(run.step_times) == EPOCHS * STEPS_PER_EPOCH, "no step was repeated"
    assert "restarting" not in run.log
    assert run.has_weights_of(uninterrupted)


def test_a_bucket_that_loses_calls_costs_time_alone(
    start: Start, uninterrupted: DisturbedRun, proxy: FlakyProxy, s3_client: Any
) -> None:
    proxy.decide("lose", "PUT .*/run.lock", 2)
    proxy.decide("pass", "PUT .*/run.lock")  # botocore tries three times
    run = start("lost-calls", "--checkpoint-seconds", "1", s3_client=s3_client, step_seconds=0.2)
    assert run.finish() == 0, run.log
    requests = proxy.failed + proxy.lost + proxy.answered
    assert proxy.failed > 0
    assert proxy.lost > 0.3 * requests, f"{proxy.lost} of {requests} answers were lost"
    assert "could not be" not in run.log, "every request was retried in time"
    assert run.has_weights_of(uninterrupted)
    found = s3_client.list_objects_v2(Bucket=BUCKET, Prefix="runs/lost-calls/")["Contents"]
    assert "runs/lost-calls/run.lock" not in {each["Key"] for each in found}


def test_a_stall_leaves_the_stacks_of_all_ranks_and_the_run_can_go_on(
    start: Start, cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    run = start("stall", *EVERY_STEP, "--max-restarts", "0", "--hang-timeout", str(STALL_SECONDS))
    run.wait_for_steps(MIDDLE)
    frozen = cluster.train_workers()[0]
    frozen.suspend()
    assert run.finish() == 1, run.log
    assert have_ended([frozen]), "it would keep its GPU"
    [folder] = (run.folder / "stalls").iterdir()
    stacks = {each.name: each.read_text() for each in folder.iterdir()}
    assert set(stacks) == {"rank_0.txt", "rank_1.txt"}
    assert any("recipes/images/trainer.py" in each for each in stacks.values()), "where the other rank waits"
    assert any("It wrote none" in each for each in stacks.values()), "the rank that hangs"
    error = run.read_json("error.json")
    assert error["what"] == f"no progress for {STALL_SECONDS} s"
    assert error["stacks"] == str(folder)
    assert f"see {run.folder}/error.json" in run.log
    run.start("--hang-timeout", "600")
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted)
    assert not (run.folder / "error.json").exists(), "the failure is over"


def test_a_failure_that_stays_leaves_what_is_needed_to_go_on(start: Start, uninterrupted: DisturbedRun) -> None:
    run = start("broken", *EVERY_STEP, "--max-restarts", "0", fail_at=MIDDLE)
    assert run.finish() == 1
    said = run.log[run.log.index("ray-on-ecs: training failed on rank") :]
    assert "ValueError: this model is broken; see " in said
    assert "Traceback" not in said, "one line"
    error = run.read_json("error.json")
    assert error["what"] == "ValueError: this model is broken"
    assert error["rank"] in (0, 1)
    assert "slow_model.py" in error["where"], "the line that raised it"
    assert "about to fail" in error["log"], "the end of that rank's log"
    assert (run.folder / error["checkpoint"] / "checkpoint.json").exists()
    (run.runs_folder / "broken.json").unlink()
    run.start_command(*error["next"].split()[3:])
    assert run.finish() == 0, run.log
    assert run.has_weights_of(uninterrupted), "the command in `next` works unchanged"


def test_a_run_that_is_being_trained_is_not_started_again(start: Start, cluster: LocalCluster) -> None:
    run = start("twice", "--epochs", "50")
    run.wait_for_steps(1)
    first = run.command
    assert first is not None
    run.start("--epochs", "50")
    assert run.finish() == 2
    assert f"run 'twice' is being trained by another command (process {first.pid} on " in run.log
    assert first.poll() is None, "the first command continues"
    kill_tree(first.pid)
    first.wait()
    until(lambda: not cluster.train_workers(), 180)
    shutil.rmtree(run.folder)
