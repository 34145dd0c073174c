"""An epoch on a GPU: the reference's loop beside ours, and how far ours is from the arithmetic that it needs."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import reference
from bench.harness import Bench
from bench.report import Comparison, Target, at_least, spread
from training.recipes.images.config import ImageConfig
from training.recipes.images.models import resnet18_classifier
from training.recipes.images.trainer import ImageTrainer

TARGET = 20
EPOCHS = 3
BATCH_SIZE = 512
SIDE = 4096  # of the square matrices whose product says what the GPU can do


def measure(bench: Bench) -> list[Comparison]:
    """Nothing where there is no GPU but a line that says so."""
    if not torch.cuda.is_available():
        target = Target(f"at least {TARGET}")
        return [
            Comparison(name="an epoch on a GPU", reference="-", ours="-", ratio=None, target=target, note="no GPU here")
        ]
    bench.log("gpu: the reference and ours")
    return on(torch.device("cuda", 0), bench, EPOCHS)


def on(device: torch.device, bench: Bench, epochs: int) -> list[Comparison]:
    """The comparison, and the floor."""
    theirs = _reference(device, bench, epochs)
    ours = _ours(device, bench, epochs)
    flops, rate = _flops(device) * len(bench.dataset.train), _rate(device)
    floor = flops / rate
    best = statistics.median(ours)
    ratio = statistics.median(theirs) / best
    return [
        Comparison(
            name=f"an epoch on {device.type}",
            reference=f"{spread(theirs)} s",
            ours=f"{spread(ours)} s",
            ratio=ratio,
            target=at_least(ratio, TARGET),
            n=len(ours),
            note=f"no tests; {reference.BATCH_SIZE} images a step there, here {BATCH_SIZE} normalized together",
            data={"reference": theirs, "ours": ours},
        ),
        Comparison(
            name="above the arithmetic floor",
            reference=f"{floor:.3g} s: {flops / 1e12:.2f} TFLOP at {rate / 1e12:.1f} TFLOP/s",
            ours=f"{best:.3g} s",
            ratio=best / floor,
            n=len(ours),
            note=f"counted by torch's FlopCounterMode, at the speed of a {SIDE} x {SIDE} matrix product in bf16",
            data={"flop": flops, "flop_per_second": rate},
        ),
    ]


def _reference(device: torch.device, bench: Bench, epochs: int) -> list[float]:
    """Seconds of the reference's epochs after the first, without the tests."""
    torch.manual_seed(0)
    model = resnet18_classifier(1, 10).to(device)
    parts = [reference.loader(bench.folder, train) for train in (True, False)]
    return [each["train_seconds"] for each in reference.epochs(model, *parts, device, epochs + 1)][1:]


def _ours(device: torch.device, bench: Bench, epochs: int) -> list[float]:
    """Seconds of our epochs after the first, without the tests."""
    trainer = ImageTrainer(ImageConfig(batch_size=BATCH_SIZE, norm_batch=0, epochs=epochs + 1), bench.dataset, device)
    return [trainer.run_epoch()["train_seconds"] for _ in range(epochs + 1)][1:]


def _flops(device: torch.device) -> float:
    """Floating point operations, forward and backward, that one image needs."""
    model: nn.Module = resnet18_classifier(1, 10).to(device)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 1, 28, 28, device=device)).sum().backward()
    return counter.get_total_flops() / 2


def _rate(device: torch.device) -> float:
    """Operations a second of a large matrix product in bf16, the best of several."""
    matrix = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds)
