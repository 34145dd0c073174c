"""The language recipe on a cluster of which a part dies: sharded weights, and losses that are the same ones."""

import json
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.disturbed_run import FOLDER_VARIABLE, DisturbedRun
from tests.local_cluster import LocalCluster, kill, kill_tree
from tests.waiting import until

STEPS, EPOCHS, MIDDLE = 150, 3, 60
MODEL = ("--layers", "2", "--width", "32", "--heads", "2", "--kv-heads", "1", "--context", "32", "--vocab-size", "300")
FLAGS = (
    *("--recipe", "language", *MODEL, "--sharding", "full", "--batch-size", "1", "--global-batch", "4"),
    *("--max-steps", str(STEPS), "--epochs", str(EPOCHS), "--sample-tokens", "4"),
    *("--num-workers", "2", "--max-restarts", "3", "--checkpoint-seconds", "0"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(2, {FOLDER_VARIABLE: str(tmp_path_factory.mktemp("runs"))}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of Python's library."""
    folder = tmp_path_factory.mktemp("texts")
    shutil.copy(Path(sysconfig.get_paths()["stdlib"], "argparse.py"), folder)
    return folder


def started(cluster: LocalCluster, texts: Path, name: str) -> DisturbedRun:
    run = DisturbedRun(cluster, name)
    where = ("--corpus", str(texts), "--storage-path", run.storage_path, "--run-name", name)
    with run.log_file.open("wb") as log:
        run.command = cluster.start_training(*FLAGS, *where, log=log, module="training")
    return run


def saved_step(run: DisturbedRun) -> int:
    saved = run.folder.glob("checkpoint_*/checkpoint.json")
    return max((int(each.parent.name.rpartition("_")[2]) for each in saved), default=0)


def losses(run: DisturbedRun) -> list[tuple[float, float]]:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [(metrics["train_loss"], metrics["test_loss"]) for metrics in map(json.loads, lines)]


@pytest.fixture(scope="module")
def uninterrupted(cluster: LocalCluster, texts: Path) -> DisturbedRun:
    """A run that nothing happens to."""
    run = started(cluster, texts, "uninterrupted")
    assert run.finish() == 0, run.log
    assert len(losses(run)) == EPOCHS
    return run


def kill_worker(cluster: LocalCluster) -> None:
    kill(cluster.train_workers()[0].pid)


def kill_node(cluster: LocalCluster) -> None:
    [raylet] = cluster.worker_processes(cluster.workers[1], "raylet/raylet")
    kill(raylet.pid)


@pytest.mark.parametrize(("name", "disturb"), [("worker", kill_worker), ("node", kill_node)])
def test_it_goes_on_from_its_shards_with_the_same_losses(
    cluster: LocalCluster, texts: Path, uninterrupted: DisturbedRun, name: str, disturb: Callable[[LocalCluster], None]
) -> None:
    cluster.replace_ended()
    run = started(cluster, texts, name)
    try:
        until(lambda: run.has_ended or saved_step(run) >= MIDDLE, 300)
        assert not run.has_ended, run.log
        disturb(cluster)
        assert run.finish() == 0, run.log
    finally:
        if run.command:
            kill_tree(run.command.pid)
    resumed = [int(step) for step in re.findall(r"resuming from checkpoint_(\d+)", run.log)]
    assert resumed, run.log
    assert MIDDLE <= resumed[-1] < STEPS, "in the middle of the training"
    assert losses(run) == losses(uninterrupted), "to the last digit"
    assert json.loads(run.read("result.json"))["metrics"]["test_loss"] == losses(uninterrupted)[-1][1]
