"""image_classifier.py: its options and data, the same curve on any number of workers, and exact resumption."""

import json
import os
import struct
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ray_on_ecs import DistributedSampler, sdk
from tests.lazy import Lazy

image_classifier = Lazy("training.image_classifier")
SCRIPT = Path(__file__).parents[2] / "training" / "image_classifier.py"
NO_TORCH = "raise SystemExit('torch is imported')"
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

def broken(channels, classes):
    raise KeyError("no such layer")

def number(channels, classes):
    return 3
"""
SMALL = ("--data=digits", "--samples=272", "--batch-size=16", "--epochs=3", "--max-shift=1", "--flip")


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
        patch.setattr(sys, "argv", [str(SCRIPT), *SMALL, *flags])
        for name, value in variables.items():
            patch.setenv(name, value)
        image_classifier.main(image_classifier.parse())
    return load_file(folder / "model.safetensors")


def options(**given: Any) -> Namespace:
    defaults = {"max_workers": None, "batch_size": None, "epochs": None, "flip": None, "precision": "auto", "seed": 0}
    return Namespace(**defaults | {"max_shift": 0, "image_size": 32, "data": "digits"} | given)


def refused(capsys: pytest.CaptureFixture[str], function: Any, *arguments: Any) -> str:
    with pytest.raises(SystemExit) as end:
        function(*arguments)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("image_classifier.py: error: argument ")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--epochs", "0"], "--epochs: 0 must be at least 1"),
        (["--epochs", "many"], "--epochs: invalid int value: 'many'"),
        (["--lr", "nan"], "--lr, --weight-decay, --seed: a positive number, one of at least 0"),
        (["--weight-decay", "-1"], "--lr, --weight-decay, --seed: a positive number"),
        (
            ["--data", "nowhere"],
            "--data: 'nowhere' is neither a folder nor one of auto, fashion-mnist, digits",
        ),
        (["--momentum", "1"], "image_classifier.py: error: unrecognized arguments: --momentum 1"),
    ],
)
def test_bad_option_is_one_line(
    flags: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    assert refused(capsys, image_classifier.parse).startswith(line)


def test_bad_option_fails_before_torch_import(folder: Path) -> None:
    (folder / "torch.py").write_text(NO_TORCH)
    bad = run(folder / "run", "--epochs", "0")
    assert (bad.returncode, len(bad.stderr.splitlines())) == (2, 1)
    assert "torch is imported" in run(folder / "run").stderr


def test_options_are_checked_against_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    data, cpu = image_classifier.digits(), torch.device("cpu")
    line = refused(capsys, image_classifier.resolve_defaults, options(batch_size=5000), data, cpu)
    assert line.startswith("--batch-size: 5000 on each of 1 workers is more than the 1438 training images; use 1438 or")
    assert "use 719 or less" in refused(
        capsys, image_classifier.resolve_defaults, options(batch_size=5000, max_workers=2), data, cpu
    )
    found = options()
    image_classifier.resolve_defaults(found, data, cpu)
    steps = 1438 // found.batch_size
    assert (found.batch_size, found.precision, found.flip) == (64, "fp32", False)
    assert steps * (found.epochs - 1) < 400 <= steps * found.epochs
    many = options(max_workers=50)
    image_classifier.resolve_defaults(many, data, cpu)
    assert 1438 // (50 * many.batch_size) >= 8


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("resnet19", "'resnet19' is neither a model of torchvision nor package.module:function"),
        ("fasterrcnn_resnet50_fpn", "is neither a model of torchvision"),
        ("models:broken", "'models:broken' can't be built (KeyError: 'no such layer')"),
        ("models:number", "'models:number' returned int, not a torch.nn.Module"),
        ("nowhere:mlp", "'nowhere:mlp' can't be built (ModuleNotFoundError: No module named 'nowhere')"),
    ],
)
def test_a_model_that_can_not_be_built(name: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, image_classifier.build_model, name, 1, 10)


class Pair(nn.Module):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, images


@pytest.mark.parametrize(
    ("network", "line"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 3), nn.BatchNorm1d(3)), None),
        (nn.Conv2d(1, 3, 64), "'mine' can't take images of 1x28x28 ("),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 4)), "doesn't return one logit for each of 3 classes, but (2, 4)"),
        (Pair(), "doesn't return one logit for each of 3 classes, but tuple"),
    ],
    ids=["fits", "larger images", "another number of classes", "several outputs"],
)
def test_a_model_is_tried_before_it_is_trained(
    network: nn.Module, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    arguments = ("mine", network, (1, 28, 28), 3, torch.device("cpu"))
    if line is None:
        image_classifier.check_model(*arguments)
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    else:
        assert line in refused(capsys, image_classifier.check_model, *arguments)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_models_of_torchvision_take_images_of_one_channel(name: str) -> None:
    model = image_classifier.build_model(name, 1, 7).eval()
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 7)


def idx(values: torch.Tensor) -> bytes:
    return bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape) + values.numpy().tobytes()


@pytest.fixture
def torchvision_folder(tmp_path: Path) -> Path:
    (raw := tmp_path / "FashionMNIST" / "raw").mkdir(parents=True)
    numbers = torch.arange(6 * 28 * 28).to(torch.uint8).reshape(6, 28, 28)
    for name in image_classifier.FILES:
        (raw / name).write_bytes(idx(numbers if "images" in name else torch.arange(6, dtype=torch.uint8)))
    return tmp_path


def test_fashion_mnist_in_torchvisions_folder(torchvision_folder: Path) -> None:
    data = image_classifier.load(options(data=str(torchvision_folder)))
    for images, labels in (data.train, data.test):
        assert torch.equal(images, torch.arange(6 * 28 * 28).to(torch.uint8).reshape(6, 1, 28, 28))
        assert labels.tolist() == list(range(6))
        assert labels.dtype == torch.int64
    assert data.name == "fashion-mnist"


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x03", None])
def test_broken_or_missing_files_cost_one_line(
    torchvision_folder: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = torchvision_folder / "FashionMNIST" / "raw" / image_classifier.FILES[2]
    file.unlink() if content is None else file.write_bytes(content)
    line = refused(capsys, image_classifier.load, options(data=str(torchvision_folder)))
    assert line.startswith(f"--data: {str(torchvision_folder)!r} can't be read (")


def test_run_on_digits_keeps_digits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_classifier, "CACHE", folder / "cache")
    monkeypatch.setattr(image_classifier.FashionMNIST, "mirrors", [(folder / "nothing").as_uri() + "/"])
    assert image_classifier.load(options(data="auto")).name == "digits"
    monkeypatch.setattr(image_classifier.FashionMNIST, "mirrors", [folder.as_uri() + "/"])
    (folder / image_classifier.FashionMNIST.resources[-1][0]).touch()  # now a mirror answers
    assert image_classifier.load(options(data="auto")).name == "digits"
    (folder / "auto-data.txt").unlink()
    assert image_classifier.fashion_mnist_or_digits() == "fashion-mnist"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for part, each, color in (("train", "cat", 10), ("train", "dog", 200), ("test", "cat", 10), ("test", "dog", 200)):
        (tmp_path / part / each).mkdir(parents=True)
        Image.new("RGB", (50, 40), (color, 0, 0)).save(tmp_path / part / each / "1.png")
    return tmp_path


def test_a_folder_of_images(pictures: Path) -> None:
    data = image_classifier.class_folders(pictures, options())
    assert data.classes == ["cat", "dog"]
    assert data.train[0].shape == (2, 3, 32, 32)
    assert data.train[0][:, 0, 0, 0].tolist() == [10, 200]
    assert data.test[1].tolist() == [0, 1]


def test_folders_that_can_not_be_used(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options(data=str(pictures))
    (pictures / "test").rename(pictures / "val")
    assert "it has neither FashionMNIST/raw/ nor train/CLASS/" in refused(capsys, image_classifier.load, chosen)
    (pictures / "val").rename(pictures / "test")
    (pictures / "test" / "dog").rename(pictures / "test" / "wolf")
    assert "train has the classes cat, dog, and test cat, wolf" in refused(capsys, image_classifier.load, chosen)
    (pictures / "test" / "wolf").rename(pictures / "test" / "dog")
    line = refused(capsys, image_classifier.load, options(data=str(pictures), image_size=10**6))
    assert "GiB is over half of the node's memory" in line
    (pictures / "train" / "cat" / "1.png").write_bytes(b"not a picture")
    assert "cannot identify image file" in refused(capsys, image_classifier.load, chosen)


def steps_of(data: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """The micro-batches of each step of an epoch, in the order of the whole step."""
    chosen, steps = options(batch_size=4, max_workers=3, flip=True, max_shift=2), []
    for rank in range(ranks):
        monkeypatch.setattr(image_classifier, "RANK", rank)
        monkeypatch.setattr(image_classifier, "RANKS", ranks)
        batches = image_classifier.Batches(data, chosen, torch.device("cpu"))
        steps.append([[images for images, _ in step] for step in batches.train(DistributedSampler(data.train[1]))])
    return [[step[n % ranks][n // ranks] for n in range(3)] for step in zip(*steps, strict=True)]


def test_world_size_does_not_change_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    data = image_classifier.digits()
    data.train = data.train[0][:50], data.train[1][:50]
    alone = steps_of(data, 1, monkeypatch)
    assert len(alone) == 50 // 12
    for ranks in (2, 3):
        shared = steps_of(data, ranks, monkeypatch)
        assert all(torch.equal(a, b) for x, y in zip(alone, shared, strict=True) for a, b in zip(x, y, strict=True))


def test_each_image_is_flipped_and_shifted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = torch.zeros(1, 28, 28, dtype=torch.uint8)
    picture[0, 10, 5] = 255
    train = picture.expand(240, 1, 28, 28), torch.zeros(240, dtype=torch.int64)
    data = image_classifier.Data("one", train, image_classifier.digits().test, ["a"])
    places = {
        (spot // 28, spot % 28)
        for step in steps_of(data, 1, monkeypatch)
        for images in step
        for spot in images.flatten(1).argmax(1).tolist()
    }
    rows, columns = {row for row, _ in places}, {column for _, column in places}
    assert rows == set(range(8, 13))
    assert columns == {*range(3, 8), *range(20, 25)}
    assert len(places) > 30


def test_every_test_image_is_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    data, seen = image_classifier.digits(), []
    for rank in range(3):
        monkeypatch.setattr(image_classifier, "RANK", rank)
        monkeypatch.setattr(image_classifier, "RANKS", 3)
        batches = image_classifier.Batches(data, options(batch_size=4, max_workers=3), torch.device("cpu"))
        seen += [label for _, labels in batches.test() for label in labels.tolist()]
    assert sorted(seen) == sorted(data.test[1].tolist())


def test_a_rank_without_test_images_has_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = image_classifier.digits()
    data.test = data.test[0][:2], data.test[1][:2]
    monkeypatch.setattr(image_classifier, "RANK", 2)
    monkeypatch.setattr(image_classifier, "RANKS", 3)
    assert not [*image_classifier.Batches(data, options(batch_size=4, max_workers=3), torch.device("cpu")).test()]


def test_metrics_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.eye(4), torch.tensor([0, 1, 2, 0])
    monkeypatch.setattr(image_classifier, "RANKS", 2)
    # The other rank has four images, too: a loss of 3, and one correct prediction.
    monkeypatch.setattr("torch.distributed.all_reduce", lambda sums: sums.add_(torch.tensor([12, 1, 4])))
    sums = image_classifier.Sums(torch.device("cpu"))
    sums.add(torch.tensor(1.0), logits, labels)
    assert sums.means("test") == {"test_loss": 2.0, "test_accuracy": 0.5}
    assert not sums.sums.any(), "the next epoch begins at 0"


@pytest.mark.parametrize("of", [1, 2, 5])
def test_running_statistics_move_once_per_step(of: int) -> None:
    batches = [torch.randn(8, 4) * (1 + number) + number for number in range(of)]
    norm, separate = nn.BatchNorm1d(4), [nn.BatchNorm1d(4) for _ in range(of)]
    for _ in range(2):
        for number, batch in enumerate(batches, start=1):
            image_classifier.move_once_per_step({norm: 0.1}, number, of)
            norm(batch)
    for _ in range(2):
        for each, batch in zip(separate, batches, strict=True):
            each(batch)
    for name in ("running_mean", "running_var"):
        expected = torch.stack([getattr(each, name) for each in separate]).mean(0)
        torch.testing.assert_close(getattr(norm, name), expected)


@pytest.mark.ray  # takes half a minute
def test_one_worker_of_two_learns_what_two_do(folder: Path) -> None:
    done = run(folder / "two", *SMALL, "--model=models:mlp", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    two = load_file(folder / "two" / "model.safetensors")
    one = train(folder / "one", "--model=models:mlp", MAX_WORLD_SIZE="2")
    assert two.pop("2.num_batches_tracked") * 2 == one.pop("2.num_batches_tracked")
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_resume_within_an_epoch_has_equal_weights(folder: Path) -> None:
    reports = folder / "reports"
    reports.mkdir()
    variables: dict[str, Any] = {sdk.FOLDER_VARIABLE: str(reports)}
    undisturbed = train(folder / "undisturbed", "--model=models:Reclaimed")
    stopped = run(folder / "run", *SMALL, "--model=models:Reclaimed", **variables)
    assert not (folder / "run" / "model.safetensors").exists(), stopped.stdout
    assert [each.name for each in (folder / "run" / "checkpoints").glob("*0007")], "after the seventh step of seventeen"
    (reports / sdk.DEADLINE).unlink()
    weights = train(folder / "run", "--model=models:Reclaimed", **variables)
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
    logged = [json.loads(line) for line in (reports / sdk.REPORTS).read_text().splitlines()]
    epochs = [each[sdk.STEP] for each in logged if "test_accuracy" in each.get(sdk.VALUES, {})]
    assert epochs == [17, 34, 51]
    with safe_open(folder / "run" / "model.safetensors", "pt") as file:
        known = json.loads(file.metadata()["image_classifier"])
    assert (known["classes"], known["shape"]) == (list("0123456789"), [1, 28, 28])
    assert (folder / "run" / "best.safetensors").exists()
