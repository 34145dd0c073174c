import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from training import data, model
from training.config import TrainingConfig
from training.data import Dataset
from training.errors import UsageError
from training.loop import Replica, Tally

CPU = torch.device("cpu")
Config = Callable[..., TrainingConfig]


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.MODELS, "small", small)


def small(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(648, classes),
    )


def train_rank(rank: int, ranks: int, config: TrainingConfig, dataset: Dataset, folder: str) -> None:
    """Two epochs on one of several ranks, each leaving its metrics and weights in `folder`."""
    model.MODELS["small"] = small
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    replica = Replica(config, dataset, CPU)
    for _ in range(config.epochs):
        replica.run_epoch()
    logits = _logits(replica, dataset)
    torch.save(
        {"history": replica.history, "weights": replica.model.state_dict(), "logits": logits}, f"{folder}/{rank}"
    )
    dist.destroy_process_group()


def test_any_number_of_workers_makes_the_same_curve(config: Config, digits: Dataset, tmp_path: Path) -> None:
    curves = {}
    for ranks in (1, 2, 4):
        # Groups of 32 are half of what one worker takes, all that each of two does, and what two of four take together.
        settings = config(model="small", epochs=3, batch_size=64 // ranks, norm_batch=32)
        folder = tmp_path / str(ranks)
        folder.mkdir()
        mp.spawn(train_rank, (ranks, settings, digits, str(folder)), nprocs=ranks)
        curves[ranks] = torch.load(folder / "0", weights_only=True)
    for ranks in (2, 4):
        for one, several in zip(curves[1]["history"], curves[ranks]["history"], strict=True):
            for name in ("train_loss", "test_loss"):
                assert several[name] == pytest.approx(one[name], rel=1e-3), f"{name} depends on the number of workers"
            assert several["test_accuracy"] == pytest.approx(one["test_accuracy"], abs=2 / len(digits.test))
            assert several["learning_rate"] == one["learning_rate"], "it follows the global batch"
        for name, weights in curves[1]["weights"].items():
            torch.testing.assert_close(curves[ranks]["weights"][name], weights, atol=1e-4, rtol=1e-3)


def first_gradients(rank: int, ranks: int, config: TrainingConfig, dataset: Dataset, folder: str) -> None:
    """The gradients of the first step, as each rank has them after the exchange."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    replica = Replica(config, dataset, CPU)
    replica.replicated.train()
    replica._step([next(replica.batches.train(0))], Tally(CPU))
    gradients = [weight.grad for weight in replica.model.parameters()]
    torch.save({"gradients": gradients, "buffers": list(replica.model.buffers())}, f"{folder}/{rank}")
    dist.destroy_process_group()


def test_resnet18_has_the_same_gradients_on_any_number_of_workers(config: Config, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2, 4):
        settings = config(dataset="synthetic", samples=32, batch_size=32 // ranks, norm_batch=32)
        folder = tmp_path / str(ranks)
        folder.mkdir()
        mp.spawn(first_gradients, (ranks, settings, data.load("synthetic", settings), str(folder)), nprocs=ranks)
        found.append(torch.load(folder / "0", weights_only=True))
    assert max(each.abs().max() for each in found[0]["gradients"]) > 0.01, "far above the tolerance"
    for several in found[1:]:
        torch.testing.assert_close(several["gradients"], found[0]["gradients"], atol=1e-5, rtol=1e-3)


def _logits(replica: Replica, dataset: Dataset) -> torch.Tensor:
    replica.model.eval()
    with torch.no_grad():
        return replica.model(dataset.normalize(dataset.test.images))


def test_metrics_are_those_of_all_ranks_and_the_same_on_each(config: Config, digits: Dataset, tmp_path: Path) -> None:
    settings = config(model="small", epochs=2)
    mp.spawn(train_rank, (2, settings, digits, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / rank, weights_only=True) for rank in ("0", "1"))
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "test_samples"):
        assert first["history"][-1][name] == second["history"][-1][name], f"{name} is one rank's, not the run's"
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items()), (
        "the ranks have drifted apart, batch-norm statistics included"
    )
    accuracy = (first["logits"].argmax(1) == digits.test.labels).double().mean().item()
    assert first["history"][-1]["test_accuracy"] == pytest.approx(accuracy), "not the accuracy of the saved weights"
    assert first["history"][-1]["test_samples"] == len(digits.test), "test images were left out or counted twice"


def test_the_loop_learns_alone_without_ray(config: Config, digits: Dataset) -> None:
    replica = Replica(config(model="small", epochs=5), digits, CPU)
    for _ in range(5):
        metrics = replica.run_epoch()
    assert metrics["test_accuracy"] > 0.9, "a small network reaches 0.9 on digits in a few epochs"
    assert metrics["train_loss"] < replica.history[0]["train_loss"]


def test_the_loop_imports_without_ray() -> None:
    check = "import sys, training.plain; sys.exit('ray' in sys.modules)"
    status = subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[2], env=dict(os.environ))
    assert status.returncode == 0, "the step must run under torchrun and alone"


def test_every_step_is_announced(config: Config, digits: Dataset) -> None:
    steps: list[tuple[int, int]] = []
    replica = Replica(config(model="small", epochs=1), digits, CPU)
    replica.run_epoch(on_step=lambda step, of: steps.append((step, of)))
    assert steps == [(n, replica.steps) for n in range(1, replica.steps + 1)], "the progress bar would stand still"


@pytest.mark.parametrize(
    "choice",
    [
        {"optimizer": "sgd"},
        {"shift": 2},
        {"precision": "bf16"},
        {"channels_last": "on"},
        {"fused_optimizer": "off"},
        {"data_on_device": "off"},
        {"label_smoothing": 0.1},
    ],
)
def test_every_choice_learns(config: Config, digits: Dataset, choice: dict[str, Any]) -> None:
    replica = Replica(config(model="small", epochs=4, **choice), digits, CPU)
    for _ in range(4):
        metrics = replica.run_epoch()
    assert metrics["test_accuracy"] > 0.8


@pytest.mark.parametrize("norm_batch", [64, 32])
def test_compiling_changes_neither_the_curve_nor_the_names(config: Config, digits: Dataset, norm_batch: int) -> None:
    settings = config(model="small", epochs=1, norm_batch=norm_batch)
    plain, compiled = (Replica(replace(settings, compile=c), digits, CPU) for c in ("off", "on"))
    one, other = plain.run_epoch(), compiled.run_epoch()
    assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict()), "the weights keep their names"


def test_compiling_without_a_compiler_is_refused(
    config: Config, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="--compile: 'on' needs a compiler"):
        Replica(config(model="small", compile="on"), digits, CPU)


def test_an_epoch_tells_how_its_steps_went(config: Config, digits: Dataset) -> None:
    metrics = Replica(config(model="small", epochs=1), digits, CPU).run_epoch()
    assert 0 < metrics["step_seconds_median"] <= metrics["step_seconds_p95"]
    assert 0 < metrics["data_wait_share"] < 1
    assert metrics["network_wait_share"] == 0, "one worker has no network to wait for"
    assert metrics["steps"] * metrics["step_seconds_median"] / 2 <= metrics["train_seconds"], "half are no faster"


@pytest.mark.parametrize("static_graph", ["on", "off"])
def test_gradients_in_bf16_learn_as_well(config: Config, digits: Dataset, tmp_path: Path, static_graph: str) -> None:
    settings = config(model="small", epochs=4, gradient_dtype="bf16", static_graph=static_graph, bucket_mb=0.01)
    mp.spawn(train_rank, (2, settings, digits, str(tmp_path)), nprocs=2)
    history = torch.load(tmp_path / "0", weights_only=True)["history"]
    assert history[-1]["test_accuracy"] > 0.8
    assert 0 < history[-1]["network_wait_share"] < 1, "two workers wait for each other's gradients"


def test_a_function_that_gives_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match="'operator:add' returned int"):
        model.build("operator:add", 1, 10)


def test_resnet18_takes_one_channel_and_gives_a_logit_for_each_class() -> None:
    network = model.find("resnet18")(1, 10)
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet19", "no.such.module:build", "math:nothing", "math:pi", "./own.py:build"])
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--model: '{name}'"):
        model.find(name)
