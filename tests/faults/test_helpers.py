"""A run whose images a CPU helper decodes, on a cluster of which a part dies: the same weights as undisturbed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import prepared_batches
from tests.disturbed_run import EPOCHS, EVERY_STEP, STEPS_PER_EPOCH, WORKERS, DisturbedRun
from tests.local_cluster import LocalCluster, kill, kill_tree
from tests.slow_model import FOLDER_VARIABLE

BATCH, SIZE = 4, 28
# In the middle of the second epoch.
MIDDLE = STEPS_PER_EPOCH + 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two nodes of workers, and a helper."""
    with LocalCluster(WORKERS, {FOLDER_VARIABLE: str(tmp_path_factory.mktemp("runs"))}) as cluster:
        cluster.add_helper()
        yield cluster


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise around a shade for each of two classes, for the steps of an epoch and some more."""
    folder = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for part, count in (("train", STEPS_PER_EPOCH * WORKERS * BATCH + 3), ("test", 8)):
        for number in range(count):
            pixels = numbers.integers(0, 128, (40, 50, 3), dtype=np.uint8) + 100 * np.uint8(number % 2)
            path = folder / part / f"class-{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


def run_of(cluster: LocalCluster, pictures: Path, name: str) -> DisturbedRun:
    images = ("--dataset", "folder", "--data-dir", str(pictures), "--image-size", str(SIZE), "--random-crop", "on")
    return DisturbedRun(cluster, name, (*EVERY_STEP, *images, "--batch-size", str(BATCH)))


@pytest.fixture(scope="module")
def uninterrupted(cluster: LocalCluster, pictures: Path) -> DisturbedRun:
    """A run that nothing happens to."""
    run = run_of(cluster, pictures, "uninterrupted").start(step_seconds=0.0)
    assert run.finish() == 0, run.log
    assert len(run.step_times) == EPOCHS * STEPS_PER_EPOCH
    return run


def test_the_helper_prepares_batches_and_the_workers_nodes_none(
    cluster: LocalCluster, uninterrupted: DisturbedRun
) -> None:
    program = [sys.executable, "-c", prepared_batches.PROGRAM]
    done = subprocess.run(program, env=cluster.environment, stdout=subprocess.PIPE, text=True, check=True)
    [(address, count)] = prepared_batches.by_address(done.stdout).items()
    assert cluster.addresses[cluster.helpers[0].pid] == address
    assert count >= EPOCHS * WORKERS, "one task prepares several batches"


def kill_worker(cluster: LocalCluster) -> None:
    kill(cluster.train_workers()[0].pid)


def replace_helper(cluster: LocalCluster) -> None:
    kill_tree(cluster.helpers[-1].pid)
    cluster.add_helper()


@pytest.mark.parametrize(("name", "disturb"), [("worker", kill_worker), ("helper", replace_helper)])
def test_it_ends_with_the_same_weights(
    cluster: LocalCluster,
    pictures: Path,
    uninterrupted: DisturbedRun,
    name: str,
    disturb: Callable[[LocalCluster], None],
) -> None:
    cluster.replace_ended()
    run = run_of(cluster, pictures, name).start()
    try:
        run.wait_for_steps(MIDDLE)
        disturb(cluster)
        assert run.finish() == 0, run.log
    finally:
        if run.command:
            kill_tree(run.command.pid)
    assert run.has_weights_of(uninterrupted)
    assert len(run.step_times) >= EPOCHS * STEPS_PER_EPOCH
    assert ("resuming from checkpoint_" in run.log) == (name == "worker"), "a helper's end interrupts no training"
