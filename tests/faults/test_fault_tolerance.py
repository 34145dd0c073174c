"""What happens to a run while it trains: real processes of a Ray cluster with two worker nodes, killed half-way."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from bench.disturbed import EPOCHS, OFTEN, STEPS, Run
from bench.nodes import Nodes, end, kill, until
from bench.slow import FOLDER
from tests.aws import BUCKET
from tests.bad_line import BadLine, bad_line

# A step of each epoch but the last, in its middle.
MIDDLE = STEPS + 5
# What a node that is told to stop has for its work, and how long a step may take before it is a stall.
DRAIN_SECONDS, STALL_SECONDS = 120, 60
Begin = Callable[..., Run]


@pytest.fixture(scope="module")
def line(aws_server: str) -> Iterator[BadLine]:
    with bad_line(aws_server, 0.2) as line:
        yield line


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, line: BadLine, aws_variables: dict[str, str]) -> Iterator[Nodes]:
    bucket = {**aws_variables, "AWS_ENDPOINT_URL": line.url}
    folder = str(tmp_path_factory.mktemp("runs"))
    ray = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS), "RAY_worker_niceness": "0"}
    with Nodes(2, {FOLDER: folder, **ray, **bucket}) as nodes:
        yield nodes


@pytest.fixture
def begin(nodes: Nodes) -> Iterator[Begin]:
    """Start a run of this name with these flags; two nodes are there, and no command is left in the end."""
    nodes.replace_ended()
    runs: list[Run] = []

    def start(name: str, *flags: str, **given: Any) -> Run:
        runs.append(Run(nodes, name, flags or OFTEN))
        return runs[-1].start(**given)

    yield start
    for run in runs:
        if run.command:
            end(run.command.pid)
            run.command.wait()


@pytest.fixture(scope="module")
def whole(nodes: Nodes) -> Run:
    """A run that nothing happens to."""
    run = Run(nodes, "whole").start(seconds=0.0)
    assert run.finish() == 0, run.log
    assert len(run.moments) == EPOCHS * STEPS
    return run


class Cut:
    """A run at the moment when it was cut: the steps made, and the last checkpoint that was stored."""

    def __init__(self, run: Run) -> None:
        self._run, self._made = run, len(run.moments)
        self._stored = max(int(each.parent.name[-8:]) for each in run.folder.glob("checkpoint_*/checkpoint.json"))

    def is_mended(self) -> bool:
        """Whether the run went on within an epoch, from that checkpoint, and repeated none but the steps since.

        A checkpoint is taken whenever the one before is stored. A step may have been under way in one rank alone.
        """
        resumed = int(re.findall(r"going on from checkpoint_(\d+)", self._run.log)[-1])
        again = len(self._run.moments) - EPOCHS * STEPS
        return STEPS < self._stored <= resumed and again <= self._made - resumed + 1


def ended(trainers: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in trainers)


def test_a_killed_worker_is_started_again(begin: Begin, nodes: Nodes, whole: Run) -> None:
    run = begin("worker")
    run.wait_for_steps(MIDDLE)
    trainers = nodes.trainers()
    kill(trainers[0].pid)
    until(lambda: ended(trainers), 180)
    cut = Cut(run)
    assert run.finish() == 0, run.log
    assert run.ends_as(whole)
    assert cut.is_mended()


def test_a_killed_raylet_takes_its_node_and_the_run_goes_on(begin: Begin, nodes: Nodes, whole: Run) -> None:
    run = begin("raylet")
    run.wait_for_steps(MIDDLE)
    [raylet] = nodes.processes(nodes.workers[1], "raylet/raylet")
    trainers = nodes.trainers()
    kill(raylet.pid)
    until(lambda: ended(trainers), 180)
    cut = Cut(run)
    assert run.finish() == 0, run.log
    assert run.ends_as(whole)
    assert cut.is_mended()


def test_a_run_goes_on_with_the_workers_that_are_left(begin: Begin, nodes: Nodes) -> None:
    # A driver that is killed, as below, keeps its workers' places for three minutes from those whose number may change.
    run = begin("elastic", *OFTEN, "--num-workers", "1:2")
    run.wait_for_steps(MIDDLE)
    end(nodes.workers[0].pid)
    assert run.finish(replace=False) == 0, run.log
    history = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["world_size"] for each in history] == [2, 1, 1]
    assert {each["global_batch"] for each in history} == {128}
    assert history[-1]["test_accuracy"] > 0.5, "it went on learning"


def test_the_same_command_continues_after_the_driver_was_killed(begin: Begin, nodes: Nodes, whole: Run) -> None:
    run = begin("driver")
    run.wait_for_steps(MIDDLE)
    assert run.command is not None
    kill(run.command.pid)
    assert run.command.wait(180) == -signal.SIGKILL
    until(lambda: not nodes.trainers(), 180)
    cut = Cut(run)
    run.start()
    assert run.finish() == 0, run.log
    assert run.ends_as(whole)
    assert "continued from the last checkpoint" in run.log
    assert cut.is_mended()


def test_a_node_that_is_told_to_stop_has_all_steps_stored_first(begin: Begin, nodes: Nodes, whole: Run) -> None:
    # No checkpoint is due within an epoch, and no failure is allowed.
    run = begin("notice", "--max-failures", "0", seconds=0.4)
    run.wait_for_steps(MIDDLE - 3)
    began = time.monotonic()
    nodes.workers[0].send_signal(signal.SIGTERM)
    nodes.workers[0].wait(2 * DRAIN_SECONDS)
    assert time.monotonic() - began < DRAIN_SECONDS - 10, "the node was left before its deadline"
    assert run.finish() == 0, run.log
    assert run.ends_as(whole)
    assert len(run.moments) == EPOCHS * STEPS, "no step was made twice"
    assert "are to be stopped; left after step" in run.log


def test_a_bucket_that_loses_calls_costs_time_alone(begin: Begin, whole: Run, line: BadLine, s3_client: Any) -> None:
    run = begin("lost-calls", "--storage-path", f"s3://{BUCKET}/lost", "--checkpoint-seconds", "1", seconds=0.2)
    assert run.finish() == 0, run.log
    assert line.failed > 10, "calls were lost"
    assert "could not be" not in run.log, "each was made again in time"
    run.folder.mkdir()
    s3_client.download_file(BUCKET, "lost/lost-calls/model.pt", str(run.folder / "model.pt"))
    assert run.ends_as(whole)


def test_a_stall_leaves_the_stacks_of_all_ranks_and_the_run_can_go_on(begin: Begin, nodes: Nodes, whole: Run) -> None:
    run = begin("stall", *OFTEN, "--max-failures", "0", "--stall-timeout", str(STALL_SECONDS))
    run.wait_for_steps(MIDDLE)
    frozen = nodes.trainers()[0]
    frozen.suspend()
    assert run.finish() == 1, run.log
    assert not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE, "it would hold its GPU for ever"
    [folder] = (run.folder / "stalls").iterdir()
    stacks = {each.name: each.read_text() for each in folder.iterdir()}
    assert set(stacks) == {"rank_0.txt", "rank_1.txt"}
    assert any("training/loop.py" in each for each in stacks.values()), "where the other waits"
    assert any("It does not answer" in each for each in stacks.values()), "the one that hangs"
    error = run.read("error.json")
    assert error["what"] == f"no step for {STALL_SECONDS} s, 1 times"
    assert error["stacks"] == [str(folder)]
    assert f"see {run.folder}/error.json" in run.log
    run.start("--stall-timeout", "600")
    assert run.finish() == 0, run.log
    assert run.ends_as(whole)
    assert not (run.folder / "error.json").exists(), "of a failure that is over"


def test_a_failure_that_stays_leaves_what_is_needed_to_go_on(begin: Begin, whole: Run) -> None:
    run = begin("broken", *OFTEN, "--max-failures", "0", break_at=MIDDLE)
    assert run.finish() == 1
    said = run.log[run.log.index("training: training failed on rank") :]
    assert "ValueError: this model is broken; see " in said
    assert "Traceback" not in said, "one line"
    error = run.read("error.json")
    assert error["what"] == "ValueError: this model is broken"
    assert error["rank"] in (0, 1)
    assert "slow.py" in error["where"], "the line that raised it"
    assert "about to break" in error["log"], "the end of that rank's log"
    assert (run.folder / error["checkpoint"] / "checkpoint.json").exists()
    (run.above / "broken.json").unlink()
    run.call(*error["next"].split()[3:])
    assert run.finish() == 0, run.log
    assert run.ends_as(whole), "what to type next is right as it stands"


def test_a_run_that_is_being_trained_is_not_started_again(begin: Begin, nodes: Nodes) -> None:
    run = begin("twice", "--epochs", "50")
    run.wait_for_steps(1)
    first = run.command
    assert first is not None
    run.start("--epochs", "50")
    assert run.finish() == 2
    assert "run 'twice' is being trained by another command on this cluster" in run.log
    assert first.poll() is None, "the first goes on"
    end(first.pid)
    first.wait()
    until(lambda: not nodes.trainers(), 180)
    shutil.rmtree(run.folder)
