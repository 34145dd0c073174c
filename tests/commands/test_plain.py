"""The training without Ray, as a user types it."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ray_on_ecs.errors import TrainingError
from tests.commands.conftest import Run
from tests.commands.head import SECONDS
from tests.training.ranks import Ranks
from training import plain
from training.recipes.images.config import ImageConfig
from training.recipes.images.recipe import IMAGES

TINY = ("--model", "own:build", "--dataset", "synthetic", "--samples", "256", "--epochs", "2")
Start = Callable[..., Run]
pytestmark = pytest.mark.fault
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Start:
    def start(*arguments: str, launcher: tuple[str, ...] = ()) -> Run:
        command = [sys.executable, *launcher, "-m", "training.plain", *arguments, "--storage-path", str(tmp_path)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)

    return start


def test_it_leaves_what_a_run_on_ray_does(run: Start, tmp_path: Path) -> None:
    done = run(*TINY, "--run-name", "mine", launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "mine"
    result = json.loads((folder / "result.json").read_text())
    assert result["hardware"]["workers"] == 2
    assert result["times"]["to_first_step_seconds"] > 0
    for name in result["files"].values():
        assert (folder / name).exists(), f"{name} is promised and not there"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert "[Epoch 1 | CPU: Process rank 0" in done.stdout


def test_a_finished_run_is_refused_and_nothing_is_lost(run: Start, tmp_path: Path) -> None:
    assert run(*TINY, "--run-name", "mine").returncode == 0
    before = (tmp_path / "mine" / "result.json").read_text()
    again = run(*TINY, "--run-name", "mine")
    assert again.returncode == 2
    assert again.stderr.startswith("ray-on-ecs: --run-name: run 'mine' is finished (2 epochs"), again.stderr
    assert (tmp_path / "mine" / "result.json").read_text() == before


def test_a_run_that_was_cut_off_is_continued_with_the_same_settings(run: Start, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert run(*TINY, "--run-name", "mine", "--checkpoint-seconds", "0").returncode == 0
    (folder / "result.json").unlink()
    last = max(folder.glob("checkpoint_*"))
    shutil.rmtree(last)
    left = max(folder.glob("checkpoint_*"))
    (folder / "model.pt").rename(folder / "before.pt")
    refused = run(*TINY, "--run-name", "mine", "--seed", "1")
    assert refused.returncode == 2
    assert "--seed 0 (now 1)" in refused.stderr
    done = run(*TINY, "--run-name", "mine")
    assert done.returncode == 0, done.stderr
    assert f"resuming from {left.name}: " in done.stdout, "it goes on from the checkpoint"
    is_within_epoch_0 = int(left.name.rpartition("_")[2]) < 4  # as checkpoints are skipped while one is stored
    assert ("[Epoch 0 |" in done.stdout) == is_within_epoch_0, "an epoch that is done is not trained again"
    before, after = (torch.load(folder / name, weights_only=True) for name in ("before.pt", "model.pt"))
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_gpus_that_are_not_there_are_one_line(run: Start) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    refused = run(*TINY, "--device", "cuda")
    assert refused.returncode == 2
    assert refused.stderr == (
        "ray-on-ecs: --device: 'cuda' needs a GPU for each process (1 here), and there are 0; start fewer processes, "
        "or use --device cpu\n"
    )


def test_the_number_of_workers_is_torchrun_s(run: Start) -> None:
    refused = run(*TINY, "--num-workers", "3")
    assert refused.returncode == 2
    assert "--num-workers: 3 is not torchrun's number, 1" in refused.stderr


def test_ctrl_c_is_a_line_and_an_exit_status(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training.plain", *TINY, "--epochs", "100000", "--storage-path", str(tmp_path)]
    run = subprocess.Popen(
        [*command, "--run-name", "mine"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline().startswith("[Epoch 0 |"), "it trains"
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=SECONDS)
    assert stderr == "ray-on-ecs: interrupted; continue with --run-name mine\n"
    assert run.returncode == 130


def refused(rank: int, ranks: int, config: ImageConfig) -> str:
    """The error with which a rank ends."""
    with pytest.raises(TrainingError) as caught:
        plain.train(IMAGES, config, torch.device("cpu"))
    return f"{caught.value.exit_status} {caught.value}"


def test_what_rank_0_refuses_ends_every_rank(tmp_path: Path) -> None:
    config = ImageConfig(dataset="digits", storage_path=str(tmp_path), run_name="mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "result.json").write_text('{"metrics": {"epoch": 1}}')
    with Ranks() as on_ranks:
        for error in on_ranks(2, refused, config):
            assert error.startswith("2 --run-name: run 'mine' is finished"), "it would wait for rank 0 in vain"
