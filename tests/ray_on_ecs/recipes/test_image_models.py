"""Models that classify images, and pretrained weights for them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.lazy import Lazy
from tests.training.refused import refused

image_models = Lazy("ray_on_ecs.recipes.image_models")
MODULE = """
import torch

def mlp(channels, classes):
    return torch.nn.Linear(channels, classes)

def broken(channels, classes):
    raise KeyError("no such layer")

def number(channels, classes):
    return 3
"""


@pytest.mark.parametrize("name", ["my_models:mlp", "my_models.py:mlp"])
def test_function_of_a_module_or_file_builds_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    assert image_models.build_model(name, 3, 5).out_features == 5


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("resnet19", "'resnet19' is neither a model of torchvision nor module:function, such as "),
        ("fasterrcnn_resnet50_fpn", "is neither a model of torchvision"),
        ("my_models:broken", "'my_models:broken' can't be built (KeyError: 'no such layer')"),
        ("my_models:number", "'my_models:number' returned int, not a torch.nn.Module"),
        ("nowhere:mlp", "'nowhere:mlp' can't be built (ModuleNotFoundError: No module named 'nowhere')"),
    ],
)
def test_a_model_that_can_not_be_built(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_models.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert line in refused(capsys, image_models.build_model, name, 1, 10)


class Pair(nn.Module):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, images


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 3), nn.BatchNorm1d(3)), None),
        (nn.Conv2d(1, 3, 64), "'mine' can't take images of 1x28x28 ("),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 4)), "doesn't return one logit for each of 3 classes, but (2, 4)"),
        (Pair(), "doesn't return one logit for each of 3 classes, but tuple"),
    ],
    ids=["fits", "larger images", "another number of classes", "several outputs"],
)
def test_a_model_is_tried_before_it_is_trained(
    model: nn.Module, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    arguments = ("mine", model, (1, 28, 28), 3)
    if line is None:
        image_models.check_model(*arguments)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    else:
        assert line in refused(capsys, image_models.check_model, *arguments)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_models_of_torchvision_take_images_of_one_channel(name: str) -> None:
    model = image_models.build_model(name, 1, 7).eval()
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 7)


HEADS = {"squeezenet1_1": "classifier.1", "shufflenet_v2_x0_5": "fc", "mobilenet_v3_small": "classifier.3"}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_of_a_file_keep_a_new_last_layer(name: str, suffix: str, tmp_path: Path) -> None:
    state = image_models.build_model(name, 3, 1000).state_dict()
    file = tmp_path / f"weights.{suffix}"
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    model = image_models.build_model(name, 3, 5)
    last = model.get_submodule(HEADS[name]).weight.clone()
    mean, std = image_models.load_weights(model, name, str(tmp_path if suffix == "pth" else file))
    assert [round(each, 2) for each in (*mean, *std)] == [123.67, 116.28, 103.53, 58.4, 57.12, 57.38]
    assert torch.equal(model.get_submodule(HEADS[name]).weight, last)
    assert all(
        torch.equal(value, state[key]) for key, value in model.state_dict().items() if not key.startswith(HEADS[name])
    )


def test_weights_of_photographs_start_a_model_of_gray_images(tmp_path: Path) -> None:
    state = image_models.build_model("squeezenet1_1", 3, 5).state_dict()
    torch.save(state, tmp_path / "weights.pth")
    model = image_models.build_model("squeezenet1_1", 1, 5)
    mean, std = image_models.load_weights(model, "squeezenet1_1", str(tmp_path / "weights.pth"))
    assert (len(mean), len(std)) == (1, 1)
    torch.testing.assert_close(model.get_parameter("features.0.weight")[:, 0], state["features.0.weight"].sum(1))
    torch.testing.assert_close(model.get_parameter("classifier.1.weight"), state["classifier.1.weight"])


def test_exported_weights_know_their_mean(tmp_path: Path) -> None:
    metadata = {"image_classifier": json.dumps({"mean": [100.0], "std": [50.0]})}
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    save_file(model.state_dict(), tmp_path / "best.safetensors", metadata)
    assert image_models.load_weights(model, "mine:model", str(tmp_path / "best.safetensors")) == ([100.0], [50.0])


def test_torchvisions_weights_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = image_models.get_model_weights("squeezenet1_1").DEFAULT
    state = image_models.build_model("squeezenet1_1", 3, 1000).state_dict()
    (folder := tmp_path / "checkpoints").mkdir()
    torch.save(state, folder / weights.url.rpartition("/")[2])  # as torch.hub leaves it
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    model = image_models.build_model("squeezenet1_1", 3, 1000)
    image_models.load_weights(model, "squeezenet1_1", "DEFAULT")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_missing_download_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", fail)
    model = image_models.build_model("squeezenet1_1", 3, 5)
    line = refused(capsys, image_models.load_weights, model, "squeezenet1_1", "IMAGENET1K_V1", status=1)
    assert "--weights: IMAGENET1K_V1 of squeezenet1_1 can't be downloaded (Name or service not known)" in line
    assert "download https://download.pytorch.org/models/squeezenet1_1-" in line
    assert line.endswith("--weights FILE")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "'weights.pth' is not DEFAULT, IMAGENET1K_V1, a file, a folder, or s3://bucket/key"),
        (b"", "'weights.pth' can't be read ("),
        ({"model": {"weight": torch.zeros(1)}}, "it is not a state dict; save model.state_dict() alone"),
        ({"other": torch.zeros(1)}, "does not fit --model: classifier.1.bias is missing, "),
        ("another", "'weights.pth' does not fit --model: features.0.weight is [4], not [64, 3, 3, 3]"),
    ],
    ids=["missing", "empty", "a checkpoint", "of another model", "another shape"],
)
def test_weights_that_can_not_be_used_are_one_line(
    content: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = image_models.build_model("squeezenet1_1", 3, 5)
    if content == "another":
        content = model.state_dict() | {"features.0.weight": torch.zeros(4)}
    if isinstance(content, bytes):
        Path("weights.pth").write_bytes(content)
    elif content is not None:
        torch.save(content, "weights.pth")
    assert line in refused(capsys, image_models.load_weights, model, "squeezenet1_1", "weights.pth")
