"""An epoch of ray_train_ddp.py's loop on a GPU, compared with the arithmetic that it needs."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet18

from bench.harness import Bench
from bench.report import Comparison, spread
from training import ray_train_ddp

EPOCHS = 3
SAMPLES = 12_000
BATCH_SIZE = 128
SIDE = 4096  # of the square matrices whose product says what the GPU can do
NAME = "an epoch on a GPU, above the arithmetic floor"


def measure(bench: Bench) -> list[Comparison]:
    """Return the times on a machine with a GPU."""
    if not torch.cuda.is_available():
        return [Comparison(name=NAME, reference="-", ours="-", ratio=None, note="no GPU here")]
    bench.log("gpu: an epoch of resnet18")
    return [on(torch.device("cuda", 0), SAMPLES, EPOCHS)]


def on(device: torch.device, samples: int, epochs: int) -> Comparison:
    """Compare the loop's epochs on generated images with the arithmetic of a step."""
    images, _ = ray_train_ddp.load({"data": "synthetic", "synthetic": samples})
    seconds = _train(device, images, epochs)
    flops, rate = _flops(device) * samples, _rate(device)
    floor = flops / rate
    return Comparison(
        name=NAME,
        reference=f"{floor:.3g} s: {flops / 1e12:.2f} TFLOP at {rate / 1e12:.1f} TFLOP/s",
        ours=f"{spread(seconds)} s",
        ratio=statistics.median(seconds) / floor,
        n=epochs,
        note=f"{samples} images, {BATCH_SIZE} a step, no tests; counted by torch's FlopCounterMode, at the speed of a "
        f"{SIDE} x {SIDE} matrix product in bf16",
        data={"flop": flops, "flop_per_second": rate, "seconds": seconds},
    )


def _network() -> nn.Module:
    network = resnet18(num_classes=ray_train_ddp.CLASSES)
    network.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return network


def _train(device: torch.device, images: Dataset[tuple[Tensor, Tensor]], epochs: int) -> list[float]:
    """Return the seconds of the epochs after the first."""
    torch.manual_seed(0)
    model = _network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(images, BATCH_SIZE, shuffle=True)
    seconds = []
    for _ in range(epochs + 1):
        began = time.perf_counter()
        for pixels, labels in loader:
            loss = cross_entropy(model(ray_train_ddp.normalize(pixels.to(device))), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _flops(device: torch.device) -> float:
    """Count the floating point operations of one image, forward and backward."""
    model = _network().to(device)
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
