"""image_classifier.py: its options, the same curve on any number of workers, exact resumption, and fine-tuning."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ray_on_ecs import sdk
from tests.lazy import Lazy
from tests.photographs import write_photographs
from tests.training.refused import refused

image_classifier = Lazy("training.image_classifier")
images = Lazy("ray_on_ecs.recipes.images")
ranks = Lazy("ray_on_ecs.recipes.ranks")
SCRIPT = Path(__file__).parents[2] / "training" / "image_classifier.py"
# The second one has dropout, and announces after its first seven batches that the node is to be reclaimed.
MODELS = """
import os, pathlib, time
from torch import nn

def mlp(channels, classes):
    hidden = nn.Linear(channels * 28 * 28, 16), nn.BatchNorm1d(16), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(16, classes))

class Reclaimed(nn.Module):
    def __init__(self, *size):
        super().__init__()
        self.dropout, self.mlp, self.batches = nn.Dropout(0.1), mlp(*size), 0

    def forward(self, images):
        self.batches += self.training
        if self.batches == 7 and "RAY_ON_ECS_SDK_DIR" in os.environ and not os.path.exists("checkpoints"):
            pathlib.Path(os.environ["RAY_ON_ECS_SDK_DIR"], "deadline").write_text(str(time.time() + 60))
        return self.mlp(self.dropout(images))
"""
SMALL = ("--data=digits", "--samples=272", "--batch-size=16", "--epochs=3", "--flip")
PHOTOGRAPHS = ("--image-size=28", "--batch-size=4", "--epochs=3")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # to which the script adds its folder
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return tmp_path


def run(folder: Path, *flags: str, ranks: int = 1, **variables: Any) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder.parent}:{SCRIPT.parents[1]}",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, *launcher, str(SCRIPT), *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def train(folder: Path, *flags: str, **variables: str) -> dict[str, torch.Tensor]:
    """Train in this process, which has torch already; return the weights."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(SCRIPT), *flags])
        for name, value in variables.items():
            patch.setenv(name, value)
        image_classifier.main(image_classifier.parse())
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--epochs", "0"], "--epochs: 0 must be at least 1"),
        (["--lr", "nan"], "--lr: 'nan' is not a number"),
        (["--weight-decay", "-1"], "--weight-decay: -1 must be at least 0"),
        (["--seed", "4294967296"], "--seed: 4294967296 must be at most"),
        (["--data", "nowhere"], "--data: 'nowhere' is not auto, fashion-mnist, digits, a folder, or s3://"),
    ],
)
def test_bad_option_is_one_line(
    flags: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    assert refused(capsys, image_classifier.parse).startswith(f"argument {line}")


def options(**given: Any) -> Namespace:
    unset = dict.fromkeys(("max_workers", "batch_size", "epochs", "lr", "flip"))
    return Namespace(**unset | {"precision": "auto", "weights": "none"} | given)


def test_options_are_checked_against_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    data, resolve = images.digits(), image_classifier.resolve_defaults
    one = ranks.Ranks(0, 1, torch.device("cpu"))
    line = refused(capsys, resolve, options(batch_size=5000), data, one)
    assert "--batch-size: 5000 on each of 1 workers is more than the 1438 training images; use 1438 or less" in line
    assert "use 719 or less" in refused(capsys, resolve, options(batch_size=5000, max_workers=2), data, one)
    assert "is less than the 3 workers" in refused(
        capsys, resolve, options(max_workers=2), data, one._replace(world_size=3)
    )


def test_defaults_follow_data_and_weights() -> None:
    data, one = images.digits(), ranks.Ranks(0, 1, torch.device("cpu"))
    given = options()
    image_classifier.resolve_defaults(given, data, one)
    steps = 1438 // given.batch_size
    assert (given.batch_size, given.precision, given.flip, given.lr) == (64, "fp32", False, 3e-3)
    assert steps * (given.epochs - 1) < 400 <= steps * given.epochs
    many = options(max_workers=50, weights="DEFAULT")
    image_classifier.resolve_defaults(many, data, one)
    assert 1438 // (50 * many.batch_size) >= 8
    assert many.lr < given.lr


@pytest.mark.ray  # takes half a minute
def test_one_worker_of_two_learns_what_two_do(folder: Path) -> None:
    done = run(folder / "two", *SMALL, "--model=models:mlp", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    two = load_file(folder / "two" / "model.safetensors")
    one = train(folder / "one", *SMALL, "--model=models:mlp", MAX_WORLD_SIZE="2")
    assert two.pop("2.num_batches_tracked") * 2 == one.pop("2.num_batches_tracked")
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("data", ["digits", "photographs"])
def test_resume_within_an_epoch_has_equal_weights(folder: Path, data: str) -> None:
    """Seventeen steps of digits or ten of photographs are an epoch."""
    flags = SMALL if data == "digits" else (f"--data={write_photographs(folder / 'data', 20)}", *PHOTOGRAPHS)
    reports = folder / "reports"
    reports.mkdir()
    variables: dict[str, Any] = {sdk.FOLDER_VARIABLE: str(reports)}
    undisturbed = train(folder / "undisturbed", *flags, "--model=models:Reclaimed")
    stopped = run(folder / "run", *flags, "--model=models:Reclaimed", **variables)
    assert not (folder / "run" / "model.safetensors").exists(), stopped.stdout
    assert [path.name for path in (folder / "run" / "checkpoints").glob("*0007")], stopped.stderr
    (reports / sdk.DEADLINE).unlink()
    weights = train(folder / "run", *flags, "--model=models:Reclaimed", **variables)
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
    logged = [json.loads(line) for line in (reports / sdk.REPORTS).read_text().splitlines()]
    epochs = [each[sdk.STEP] for each in logged if "test_accuracy" in each.get(sdk.VALUES, {})]
    assert epochs == ([17, 34, 51] if data == "digits" else [10, 20, 30])
    assert (folder / "run" / "best.safetensors").exists()


def test_auto_keeps_the_data_set_of_the_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--data=auto", *SMALL[1:], "--model=models:mlp")
    monkeypatch.setattr(images, "CACHE", folder / "cache")
    monkeypatch.setattr(images.FashionMNIST, "mirrors", [(folder / "nothing").as_uri() + "/"])
    train(folder / "run", *flags)
    assert "training on handwritten digits" in capsys.readouterr().out
    monkeypatch.setattr(images.FashionMNIST, "mirrors", [folder.as_uri() + "/"])
    (folder / images.FashionMNIST.resources[-1][0]).touch()  # now a mirror answers
    train(folder / "run", *flags)
    assert "models:mlp on digits: 3 x 17 steps of 16 images, 1 x CPU, 3 epochs done" in capsys.readouterr().out


def test_fine_tuning_learns_new_classes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of a run on two colors start one on three."""
    first = write_photographs(folder / "first", 20, ("red", "green"))
    train(folder / "one", f"--data={first}", *PHOTOGRAPHS, "--model=models:mlp")
    second = write_photographs(folder / "second", 20, ("red", "green", "blue"))
    weights = folder / "one" / "best.safetensors"
    train(folder / "two", f"--data={second}", *PHOTOGRAPHS, "--model=models:mlp", f"--weights={weights}", "--lr=1e-2")
    with safe_open(folder / "two" / "best.safetensors", "pt") as file:
        known = json.loads(file.metadata()["image_classifier"])
    assert (known["classes"], known["shape"]) == (["blue", "green", "red"], [3, 28, 28])
    assert len(known["mean"]) == len(known["std"]) == 3
    assert [float(each) for each in re.findall(r"test accuracy (\S+)", capsys.readouterr().out)][-1] > 0.9
