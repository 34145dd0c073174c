import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ray_on_ecs.errors import DivergedError, UsageError
from tests.training.ranks import Ranks
from training.engine import ddp
from training.engine.step_timer import StepTimer
from training.recipes.images import datasets, models
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset, Split
from training.recipes.images.trainer import ImageTrainer, MetricSums

CPU = torch.device("cpu")
Config = Callable[..., ImageConfig]


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "small", small)


def small(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(648, classes),
    )


def without_batch_norm(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(648, classes))


def train_rank(rank: int, ranks: int, config: ImageConfig, dataset: Dataset) -> dict[str, Any]:
    """All epochs on one of several ranks: its metrics, its weights, and what they make of the test set."""
    models.MODELS["small"] = small
    trainer = ImageTrainer(config, dataset, CPU)
    for _ in range(config.epochs):
        trainer.run_epoch()
    return {"history": trainer.history, "weights": trainer.model.state_dict(), "logits": _logits(trainer, dataset)}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_any_number_of_workers_makes_the_same_curve(
    config: Config, digits: Dataset, on_ranks: Ranks, batch_norm: bool
) -> None:
    curves = {}
    for ranks in (1, 2, 4):
        # Batch norm depends on the size of a micro-batch, which stays the same in a range of workers.
        settings = (
            config(model="small", epochs=3, batch_size=16, num_workers="1:4")
            if batch_norm
            else config(model=f"{__name__}:without_batch_norm", epochs=3, batch_size=64 // ranks)
        )
        curves[ranks] = on_ranks(ranks, train_rank, settings, digits)[0]
    for ranks in (2, 4):
        for one, several in zip(curves[1]["history"], curves[ranks]["history"], strict=True):
            for name in ("train_loss", "test_loss"):
                assert several[name] == pytest.approx(one[name], rel=1e-3), f"{name} depends on the number of workers"
            assert several["test_accuracy"] == pytest.approx(one["test_accuracy"], abs=2 / len(digits.test))
            assert several["learning_rate"] == one["learning_rate"], "it follows the global batch"
        for name, weights in curves[1]["weights"].items():
            torch.testing.assert_close(curves[ranks]["weights"][name], weights, atol=1e-4, rtol=1e-3)


def test_an_elastic_run_is_one_model_on_any_number_of_workers(config: Config, digits: Dataset, on_ranks: Ranks) -> None:
    settings = config(model="small", epochs=1, batch_size=64, num_workers="1:4")
    four, three, one = (on_ranks(ranks, train_rank, settings, digits)[0] for ranks in (4, 3, 1))
    for fewer in (three, one):
        for name, expected in four["weights"].items():  # the running statistics among them
            torch.testing.assert_close(fewer["weights"][name], expected, atol=1e-5, rtol=1e-4)
        assert fewer["history"][0]["test_loss"] == pytest.approx(four["history"][0]["test_loss"], rel=1e-4)


def first_gradients(rank: int, ranks: int, config: ImageConfig, dataset: Dataset) -> list[Any]:
    """The gradients of the first step, as each rank has them after the exchange."""
    trainer = ImageTrainer(config, dataset, CPU)
    trainer.ddp_model.train()
    trainer._step(next(trainer.batches.train(0)), MetricSums(CPU))
    return [weight.grad for weight in trainer.model.parameters()]


def test_resnet18_has_the_same_gradients_on_any_number_of_workers(config: Config, on_ranks: Ranks) -> None:
    found = []
    for ranks in (1, 2, 4):
        settings = config(dataset="synthetic", samples=32, batch_size=8, num_workers="1:4")
        found.append(on_ranks(ranks, first_gradients, settings, datasets.load("synthetic", settings))[0])
    assert max(each.abs().max() for each in found[0]) > 0.01, "far above the tolerance"
    for several in found[1:]:
        torch.testing.assert_close(several, found[0], atol=1e-5, rtol=1e-3)


def _logits(trainer: ImageTrainer, dataset: Dataset) -> torch.Tensor:
    trainer.model.eval()
    with torch.no_grad():
        return trainer.model(dataset.normalize(dataset.test.images))


def test_metrics_are_those_of_all_ranks_and_the_same_on_each(config: Config, digits: Dataset, on_ranks: Ranks) -> None:
    first, second = on_ranks(2, train_rank, config(model="small", epochs=2), digits)
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "test_samples"):
        assert first["history"][-1][name] == second["history"][-1][name], f"{name} is one rank's, not the run's"
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items()), (
        "the ranks have drifted apart, batch-norm statistics included"
    )
    accuracy = (first["logits"].argmax(1) == digits.test.labels).double().mean().item()
    assert first["history"][-1]["test_accuracy"] == pytest.approx(accuracy), "not the accuracy of the saved weights"
    assert first["history"][-1]["test_samples"] == len(digits.test), "test images were left out or counted twice"


def test_the_loop_learns_alone_without_ray(config: Config, digits: Dataset) -> None:
    trainer = ImageTrainer(config(model="small", epochs=5), digits, CPU)
    for _ in range(5):
        metrics = trainer.run_epoch()
    assert metrics["test_accuracy"] > 0.9, "a small network reaches 0.9 on digits in a few epochs"
    assert metrics["train_loss"] < trainer.history[0]["train_loss"]


def test_the_loop_imports_without_ray() -> None:
    check = "import sys, training.plain; sys.exit('ray' in sys.modules)"
    status = subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[3], env=dict(os.environ))
    assert status.returncode == 0, "the step must run under torchrun and alone"


def test_every_step_is_announced(config: Config, digits: Dataset) -> None:
    steps: list[tuple[int, int]] = []
    trainer = ImageTrainer(config(model="small", epochs=1), digits, CPU)
    trainer.run_epoch(on_step=lambda step, of: steps.append((step, of)))
    assert steps == [(n, trainer.steps_per_epoch) for n in range(1, trainer.steps_per_epoch + 1)], (
        "the progress bar would stand still"
    )


@pytest.mark.parametrize(
    "choice",
    [
        {"optimizer": "sgd"},
        {"max_shift": 2},
        {"precision": "bf16"},
        {"channels_last": "on"},
        {"fused_optimizer": "off"},
        {"data_on_device": "off"},
        {"label_smoothing": 0.1},
    ],
)
def test_every_choice_learns(config: Config, digits: Dataset, choice: dict[str, Any]) -> None:
    trainer = ImageTrainer(config(model="small", epochs=4, **choice), digits, CPU)
    for _ in range(4):
        metrics = trainer.run_epoch()
    assert metrics["test_accuracy"] > 0.8


def test_compiling_changes_neither_the_curve_nor_the_names(config: Config, digits: Dataset) -> None:
    settings = config(model="small", epochs=1)
    plain, compiled = (ImageTrainer(replace(settings, compile=c), digits, CPU) for c in ("off", "on"))
    one, other = plain.run_epoch(), compiled.run_epoch()
    assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict()), "the weights keep their names"


def test_compiling_without_a_compiler_is_refused(
    config: Config, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="--compile: 'on' needs a compiler"):
        ImageTrainer(config(model="small", compile="on"), digits, CPU)


def test_an_epoch_tells_how_its_steps_went(config: Config, digits: Dataset) -> None:
    metrics = ImageTrainer(config(model="small", epochs=1), digits, CPU).run_epoch()
    assert 0 < metrics["step_seconds_median"] <= metrics["step_seconds_p95"]
    assert 0 < metrics["data_wait_fraction"] < 1
    assert metrics["exposed_comm_fraction"] == 0, "one worker has no network to wait for"
    assert metrics["steps"] * metrics["step_seconds_median"] / 2 <= metrics["train_seconds"], "half are no faster"


@pytest.mark.parametrize("static_graph", ["on", "off"])
def test_gradients_in_bf16_learn_as_well(config: Config, digits: Dataset, on_ranks: Ranks, static_graph: str) -> None:
    settings = config(model="small", epochs=4, gradient_dtype="bf16", static_graph=static_graph, bucket_mb=0.01)
    history = on_ranks(2, train_rank, settings, digits)[0]["history"]
    assert history[-1]["test_accuracy"] > 0.8
    assert 0 < history[-1]["exposed_comm_fraction"] < 1, "two workers wait for each other's gradients"


def gradients_of_a_step(rank: int, ranks: int, config: ImageConfig) -> tuple[list[torch.Tensor], int]:
    """The gradients after one step, and how many Python functions were left to other threads for it."""
    left: list[Any] = []
    network = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    for number, weight in enumerate(network.parameters()):
        nn.init.constant_(weight, number + 1.0)
    ddp_model = ddp.wrap_ddp(network, config, CPU, bf16=False, static_graph=True, timer=StepTimer(CPU))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("then", "add_done_callback"):
            original = getattr(torch._C.Future, name)
            patch.setattr(torch._C.Future, name, lambda *given, call=original: left.append(given) or call(*given))
        ddp_model(torch.full((1, 4), rank + 1.0)).sum().backward()
    return [weight.grad for weight in network.parameters() if weight.grad is not None], len(left)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_exchange_is_a_mean_and_leaves_no_python_to_the_threads_of_gloo(
    config: Config, on_ranks: Ranks, dtype: str
) -> None:
    for gradients, left in on_ranks(2, gradients_of_a_step, config(gradient_dtype=dtype, bucket_mb=1e-5)):
        first, second = gradients
        assert torch.equal(first, torch.full((3, 4), 6.0)), "4, by two weights of 2, times the mean of 1 and 2"
        assert torch.equal(second, torch.full((2, 3), 6.0)), "4, by four weights of 1, times the mean of 1 and 2"
        assert not left, "a thread that waits for the interpreter when the process ends takes it down with SIGABRT"


class SkipsALayer(nn.Module):
    """Leaves its second layer out of every third step."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(784, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, classes)
        self.steps = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        values = self.first(images.flatten(1)).relu()
        if not self.training or self.steps % 3:
            values = values + self.second(values).relu()
        return self.last(values)


def skips_a_layer(channels: int, classes: int) -> nn.Module:
    return SkipsALayer(classes)


def test_a_model_of_the_user_may_skip_layers(config: Config, digits: Dataset, on_ranks: Ranks) -> None:
    settings = config(model=f"{__name__}:skips_a_layer", epochs=1)
    first, second = on_ranks(2, train_rank, settings, digits)
    for name, weights in first["weights"].items():
        assert torch.equal(weights, second["weights"][name]), f"{name} was trained on gradients of one rank"


@pytest.mark.parametrize("static_graph", ["on", "auto"])
def test_fewer_workers_than_micro_batches_search_for_no_unused_parameters(
    config: Config, digits: Dataset, on_ranks: Ranks, static_graph: str
) -> None:
    settings = config(model="small", num_workers="1:3", static_graph=static_graph)
    assert on_ranks(2, searches_for_unused, settings, digits) == [False, False], "it costs a walk of the graph per step"


def searches_for_unused(rank: int, ranks: int, config: ImageConfig, dataset: Dataset) -> bool:
    models.MODELS["small"] = small
    ddp_model = ImageTrainer(config, dataset, CPU).ddp_model
    assert isinstance(ddp_model, nn.parallel.DistributedDataParallel)
    return ddp_model.find_unused_parameters


def test_the_optimizer_is_fused_as_the_config_says_after_loading_too(config: Config, digits: Dataset) -> None:
    fused = ImageTrainer(config(model="small", epochs=1, fused_optimizer="on"), digits, CPU)
    fused.run_epoch()
    other = ImageTrainer(config(model="small", epochs=1, fused_optimizer="off"), digits, CPU)
    other.load_state_dict(fused.state_dict())
    assert not other.optimizer.param_groups[0]["fused"]


def of_shape(*shape: int) -> Dataset:
    """A data set of 64 samples of any shape."""
    samples = torch.randint(0, 50, (64, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Split(samples, torch.arange(64) % 4)
    return Dataset.from_splits("shaped", split, split, classes=4)


def flat(channels: int, classes: int) -> nn.Module:
    return nn.Linear(channels, classes)


def video(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv3d(channels, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, classes))


@pytest.mark.parametrize(("model", "shape"), [(flat, (10,)), (video, (3, 4, 8, 8))])
@pytest.mark.parametrize("channels_last", ["off", "on"])  # on is the default of GPUs
def test_samples_may_have_any_number_of_dimensions(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[int, int], nn.Module],
    shape: tuple[int, ...],
    channels_last: str,
) -> None:
    monkeypatch.setitem(models.MODELS, "shaped", model)
    settings = config(model="shaped", batch_size=32, epochs=1, channels_last=channels_last)
    metrics = ImageTrainer(settings, of_shape(*shape), CPU).run_epoch()
    assert metrics["train_samples"] == 64


def test_channels_last_reaches_a_stem_of_one_channel(config: Config, digits: Dataset) -> None:
    trainer = ImageTrainer(config(model="small", channels_last="on"), digits, CPU)
    strides = []
    assert isinstance(trainer.model, nn.Sequential)
    trainer.model[0].register_forward_hook(lambda layer, given, output: strides.append(output.stride(1)))
    trainer.run_epoch()
    assert set(strides) == {1}, "the stem has the largest activations, and the next layer would convert them"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(config: Config, digits: Dataset, on_ranks: Ranks, ranks: int) -> None:
    settings = config(model="small", epochs=2, optimizer="sgd", lr=1e9, precision="bf16")
    for message in on_ranks(ranks, diverges, settings, digits):
        assert "loss is nan in epoch 0" in message
        assert "lower --lr (now 1e+09) or --precision fp32" in message
        assert "\n" not in message


def diverges(rank: int, ranks: int, config: ImageConfig, dataset: Dataset) -> str:
    models.MODELS["small"] = small
    with pytest.raises(DivergedError) as caught:
        ImageTrainer(config, dataset, CPU).run_epoch()
    return str(caught.value)


def test_a_long_epoch_is_not_trained_to_its_end_on_a_loss_that_is_not_finite(config: Config, digits: Dataset) -> None:
    trainer = ImageTrainer(config(model="small", epochs=1, batch_size=8, optimizer="sgd", lr=1e9), digits, CPU)
    steps: list[int] = []
    with pytest.raises(DivergedError, match=rf"by step 100 of {trainer.steps_per_epoch}; "):
        trainer.run_epoch(lambda step, of: steps.append(step))
    assert steps[-1] == 99, "no checkpoint is taken of it any more"


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_not_finite_are_not_saved(
    config: Config, digits: Dataset, on_ranks: Ranks, ranks: int
) -> None:
    settings = config(model="small", epochs=1, batch_size=8)
    for message in on_ranks(ranks, saves_after_step_3, settings, digits):
        assert "the largest weight is nan in epoch 0 by step 3 of " in message


def saves_after_step_3(rank: int, ranks: int, config: ImageConfig, dataset: Dataset) -> str:
    models.MODELS["small"] = small
    trainer = ImageTrainer(config, dataset, CPU)

    def save(step: int, steps: int) -> None:
        trainer.state_dict()
        if step == 2:  # as a gradient that overflows leaves them, after a step of a finite loss
            with torch.no_grad():
                next(trainer.model.parameters()).view(-1)[0] = float("nan")

    with pytest.raises(DivergedError) as caught:
        trainer.run_epoch(save)
    return str(caught.value)


def test_the_message_of_a_divergence_tells_the_last_finite_loss(config: Config, digits: Dataset) -> None:
    trainer = ImageTrainer(config(model="small", epochs=2), digits, CPU)
    before = trainer.run_epoch()["train_loss"]
    nn.init.constant_(next(trainer.model.parameters()), float("inf"))
    with pytest.raises(DivergedError, match=f"nan in epoch 1 .* it was {before:.4g} in epoch 0;"):
        trainer.run_epoch()


def test_ranks_of_neighbouring_seeds_draw_different_numbers(config: Config, digits: Dataset, on_ranks: Ranks) -> None:
    draws = [on_ranks(2, dropout_of_rank, config(model="small", seed=seed), digits) for seed in (0, 1)]
    numbers = [number for ranks in draws for number in ranks]
    assert len(set(numbers)) == 4, "rank 1 of one seed drew the dropout of rank 0 of the next"


def dropout_of_rank(rank: int, ranks: int, config: ImageConfig, dataset: Dataset) -> float:
    models.MODELS["small"] = small
    ImageTrainer(config, dataset, CPU)
    return torch.rand(()).item()


def test_a_function_that_gives_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match="'operator:add' returned int"):
        models.build("operator:add", 1, 10)


def test_resnet18_takes_one_channel_and_gives_a_logit_for_each_class() -> None:
    network = models.find("resnet18")(1, 10)
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet19", "no.such.module:build", "math:nothing", "math:pi", "./own.py:build"])
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--model: '{name}'"):
        models.find(name)
