"""An epoch on a GPU, by several settings, compared with ray_train_ddp.py's loop and with the arithmetic that it needs.

It takes less than ten minutes on one GPU. What can't be done there, such as compiling without a compiler, it says. The
kernels of a step are counted on CPUs too: each operation that computes or copies is one kernel on a GPU, or a few.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from bench.harness import Bench
from bench.report import Comparison, Target, at_least, spread
from ray_on_ecs.errors import UsageError
from training import ray_train_ddp
from training.recipes.images import datasets
from training.recipes.images.config import ImageConfig
from training.recipes.images.loader import Batch
from training.recipes.images.models import resnet18_classifier
from training.recipes.images.trainer import ImageTrainer, MetricSums

TARGET = 20
EPOCHS = 3
BATCH_SIZE = 128  # the reference's
SIDE = 4096  # of the square matrices whose product says what the GPU can do
# What may make it faster, by the settings that differ from the default.
WAYS: dict[str, dict[str, Any]] = {
    "default settings": {},
    "--compile on": {"compile": "on"},
}
SMALL = 128  # the kernels of a step are as many for any number of images


def measure(bench: Bench) -> list[Comparison]:
    """Return the kernels of a step and, on a machine with a GPU, the times."""
    kernels = count_kernels()
    if not torch.cuda.is_available():
        target = Target(f"at least {TARGET}")
        missing = Comparison(
            name="an epoch on a GPU", reference="-", ours="-", ratio=None, target=target, note="no GPU here"
        )
        return [kernels, missing]
    bench.log("gpu: the reference and ours")
    return [kernels, *on(torch.device("cuda", 0), bench, EPOCHS)]


class KernelCount(TorchDispatchMode):
    """Counts the operations that would be kernels on a GPU: those that write new values, and no views."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        result = func(*args, **(kwargs or {}))
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        writes = func._schema.is_mutable or any(_storage(each) not in given for each in made)
        if writes and "empty" not in func.name() and "profiler" not in func.name():
            self.total += 1
        return result


def count_kernels() -> Comparison:
    """Count the kernels of a step after the first, with the defaults of a GPU, and of the reference's in fp32."""
    config = ImageConfig(
        dataset="synthetic", samples=2 * SMALL, batch_size=SMALL, epochs=1, precision="bf16", channels_last="on"
    )
    trainer = ImageTrainer(config, datasets.load("synthetic", config), torch.device("cpu"))
    first, second = trainer.batches.train(0)
    model = resnet18_classifier(1, 10)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)  # its default on GPUs
    sums = MetricSums(torch.device("cpu"))
    theirs = _kernels(lambda batches: _reference_step(model, optimizer, *batches[0]), first, second)
    ours = _kernels(lambda batches: trainer._step(batches, sums), first, second)
    return Comparison(
        name="kernels of a step",
        reference=f"{theirs} in fp32",
        ours=f"{ours} in bf16",
        ratio=theirs / ours,
        note="operations of a resnet18's step that compute or copy, counted on a CPU; autocast casts the weights",
        data={"reference": theirs, "ours": ours},
    )


def _kernels(step: Callable[[list[Batch]], object], first: list[Batch], second: list[Batch]) -> int:
    """Count those of the second step; the first one also makes the optimizer's state."""
    step(first)
    with KernelCount() as count:
        step(second)
    return count.total


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def on(device: torch.device, bench: Bench, epochs: int) -> list[Comparison]:
    """Compare our epochs with the reference's, in each way that can be had, and the best with the arithmetic needed."""
    theirs = _reference(device, bench, epochs)
    found: list[Comparison] = []
    best: dict[str, float] = {}
    for way, settings in WAYS.items():
        bench.log(f"gpu: {way}")
        try:
            ours = _ours(device, bench, epochs, settings)
        except UsageError as error:
            found.append(Comparison(name=_name(device, way), reference="-", ours="-", ratio=None, note=str(error)))
            continue
        best[way] = statistics.median(ours)
        found.append(_compare(_name(device, way), theirs, ours, with_target=not settings))
    flops, rate = _flops(device) * len(bench.dataset.train), _rate(device)
    floor = flops / rate
    fastest = min(best, key=lambda way: best[way])
    above = Comparison(
        name="above the arithmetic floor",
        reference=f"{floor:.3g} s: {flops / 1e12:.2f} TFLOP at {rate / 1e12:.1f} TFLOP/s",
        ours=f"{best[fastest]:.3g} s, {fastest}",
        ratio=best[fastest] / floor,
        n=epochs,
        note=f"counted by torch's FlopCounterMode, at the speed of a {SIDE} x {SIDE} matrix product in bf16",
        data={"flop": flops, "flop_per_second": rate, **best},
    )
    return [*found, above]


def _name(device: torch.device, way: str) -> str:
    return f"an epoch on {device.type}, {way}"


def _compare(name: str, theirs: list[float], ours: list[float], *, with_target: bool) -> Comparison:
    ratio = statistics.median(theirs) / statistics.median(ours)
    return Comparison(
        name=name,
        reference=f"{spread(theirs)} s",
        ours=f"{spread(ours)} s",
        ratio=ratio,
        target=at_least(ratio, TARGET) if with_target else None,
        n=len(ours),
        note=f"no tests; {BATCH_SIZE} images a step there, here {_config(len(ours), {}).batch_size}",
        data={"reference": theirs, "ours": ours},
    )


def _reference(device: torch.device, bench: Bench, epochs: int) -> list[float]:
    """Return the seconds of the reference's epochs on one device after the first, without the tests."""
    torch.manual_seed(0)
    model = resnet18_classifier(1, 10).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, _ = ray_train_ddp.load({"data": "fashion-mnist", "data_dir": bench.folder})
    loader = DataLoader(images, BATCH_SIZE, shuffle=True)
    seconds = []
    for _ in range(epochs + 1):
        began = time.perf_counter()
        for pixels, labels in loader:
            normalized = ray_train_ddp.normalize(pixels.to(device))
            _reference_step(model, optimizer, normalized, labels.to(device)).item()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _reference_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """Make a step, and return its loss."""
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def _ours(device: torch.device, bench: Bench, epochs: int, settings: dict[str, Any]) -> list[float]:
    """Return the seconds of our epochs after the first, without the tests."""
    trainer = ImageTrainer(_config(epochs, settings), bench.dataset, device)
    return [trainer.run_epoch()["train_seconds"] for _ in range(epochs + 1)][1:]


def _config(epochs: int, settings: dict[str, Any]) -> ImageConfig:
    """Return the default settings of a run on one GPU, but for those given."""
    return ImageConfig(num_workers=1, epochs=epochs + 1, **settings).resolve_device("cuda")


def _flops(device: torch.device) -> float:
    """Count the floating point operations of one image, forward and backward."""
    model: nn.Module = resnet18_classifier(1, 10).to(device)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 1, 28, 28, device=device)).sum().backward()
    return counter.get_total_flops() / 2


def _rate(device: torch.device) -> float:
    """Return the operations per second of a large matrix product in bf16, the best of several."""
    matrix = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds)
