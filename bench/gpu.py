"""GPU benchmark: an epoch of ray_train_ddp.py's loop and tokens per second of language_model.py, against a matmul.

It takes at most ten minutes; a measurement that fails has a row with the reason.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from bench import harness
from bench.harness import REPOSITORY, Bench
from bench.report import Comparison, spread
from training.ray_train_ddp import build_model

EPOCHS = 3
SAMPLES = 12_000
BATCH_SIZE = 128
SIDE = 4096  # of the square matrices whose product says what the GPU can do
NAME = "an epoch on a GPU, above the arithmetic floor"
TOKENS_NAME = "tokens per second on a GPU, of the arithmetic limit"
# 110 million weights, about as GPT-2's smallest.
MODEL = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
NAMES = (NAME, TOKENS_NAME)
STEPS, CONTEXT = 60, 1024
FLAGS = (
    (),
    ("--attention", "masks"),
    ("--compile",),
    ("--activation-checkpointing", "selective"),
    ("--activation-checkpointing", "full"),
)
SECONDS = 100.0  # for each of these


def measure(bench: Bench) -> list[Comparison]:
    """Return the times on a machine with a GPU."""
    if not torch.cuda.is_available():
        return [Comparison(name=name, reference="-", ours="-", ratio=None, note="no GPU here") for name in NAMES]
    bench.log("gpu: an epoch of resnet18")
    device = torch.device("cuda", 0)
    rows = [on(device, SAMPLES, EPOCHS)]
    for flags in FLAGS:
        bench.log(f"gpu: language_model.py {' '.join(flags)}")
        rows.append(language(device, MODEL, ("--global-batch-size=32", f"--max-steps={STEPS}", *flags)))
    return rows


def language(device: torch.device, model: dict[str, Any], flags: tuple[str, ...]) -> Comparison:
    """Compare the tokens per second of language_model.py with the arithmetic that a matrix product does in a second."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        options = ("--model", folder, f"--context={CONTEXT}", "--log-every=10", "--precision=auto", *flags)
        command = [sys.executable, str(REPOSITORY / "training" / "language_model.py"), *options]
        environment = {**os.environ, "PYTHONPATH": harness.python_path()}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, text=True, capture_output=True, timeout=SECONDS, check=False
            )
            printed, fault = done.stdout, done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
        except subprocess.TimeoutExpired as late:
            printed, fault = str(late.stdout or ""), f"not done after {SECONDS:.0f} s"
    speeds = [float(speed) for speed in re.findall(r"tokens_per_second ([\d.e+]+)", printed)][1:]  # the first warms up
    weights = re.search(r"([\d.,]+) million weights", printed)
    note = (
        f"{' '.join(flags)}, {weights[1] if weights else '?'} million weights, context {CONTEXT}; 6 operations a weight"
    )
    if not (speeds and weights):
        return Comparison(
            name=TOKENS_NAME, reference="-", ours="-", ratio=None, note=f"{note}; could not do it: {fault}"
        )
    limit = _rate(device) / (6e6 * float(weights[1].replace(",", "")))
    return Comparison(
        name=TOKENS_NAME,
        reference=f"{limit:,.0f} tokens/s",
        ours=f"{spread(speeds)} tokens/s",
        ratio=statistics.median(speeds) / limit,
        n=len(speeds),
        note=note + (f"; {fault}" if fault else ""),
        data={"tokens_per_second": speeds},
    )


def on(device: torch.device, samples: int, epochs: int) -> Comparison:
    """Compare the loop's epochs on generated images with the arithmetic of a step."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (samples, 1, 28, 28), generator=generator, dtype=torch.uint8)
    images = TensorDataset(pixels, torch.arange(samples) % 10)
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


def _train(device: torch.device, images: Dataset[Any], epochs: int) -> list[float]:
    """Return the seconds of the epochs after the first."""
    torch.manual_seed(0)
    model = build_model(1, 10).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(images, BATCH_SIZE, shuffle=True)
    seconds = []
    for _ in range(epochs + 1):
        began = time.perf_counter()
        for pixels, labels in loader:
            loss = cross_entropy(model((pixels.to(device) - 127.5) / 73.9), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _flops(device: torch.device) -> float:
    """Count the floating point operations of one image, forward and backward."""
    model = build_model(1, 10).to(device)
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
