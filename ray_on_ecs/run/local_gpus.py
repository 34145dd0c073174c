"""NVIDIA GPUs of this machine, as the driver lists them: importing PyTorch to ask for them would take seconds."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
# WSL 2 has the driver of Windows, whose GPUs only this program lists.
WSL_PROGRAM = Path("/usr/lib/wsl/lib/nvidia-smi")
WSL_SECONDS = 30.0
LISTED = re.compile(r"^GPU \d+: (.+) \(UUID: (\S+)\)$", re.MULTILINE)


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it."""

    name: str
    uuid: str


def count_gpus() -> int:
    """Return the number of GPUs that a script would see; CUDA_VISIBLE_DEVICES may hide some."""
    return len(_visible())


def gpu_name() -> str:
    """Return the name of the first GPU that a script would see."""
    return next((gpu.name for gpu in _visible()), "GPU")


def _visible() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves: those before the first that is not there.

    As in CUDA and PyTorch, a GPU that is given twice hides all, and a script sees one MIG device at most.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    """
    gpus, chosen = _gpus(), list[Gpu]()
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return gpus
    if words.startswith("MIG-"):
        return gpus[:1]
    for word in words.split(","):
        if words.startswith("GPU-"):  # the beginning of one GPU's UUID
            meant = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        else:
            number = re.match(r"\s*\+?(\d+)", word)
            meant = gpus[int(number[1]) :][:1] if number else []
        if len(meant) != 1:
            break
        if meant[0] in chosen:
            return []
        chosen += meant
    return chosen


def _gpus() -> list[Gpu]:
    """Return all GPUs, in the order of their PCI addresses."""
    if WSL_PROGRAM.exists():
        return _gpus_of_wsl()
    found = []
    for folder in sorted(DRIVER.glob("*")):
        text = (folder / "information").read_text() if (folder / "information").exists() else ""
        values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
        found.append(Gpu(values.get("Model", "GPU"), values.get("GPU UUID", folder.name)))
    return found


@cache
def _gpus_of_wsl() -> list[Gpu]:
    try:
        done = subprocess.run([WSL_PROGRAM, "-L"], capture_output=True, text=True, timeout=WSL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [Gpu(name, uuid) for name, uuid in LISTED.findall(done.stdout)]
