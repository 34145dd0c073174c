"""The image's size: its layers, what a one-line change to training/ pushes, and its CUDA wheels beside it.

usage: python -m bench.image [ENGINE]   (after `make image`; ENGINE is docker unless given)
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
IMAGE, CHANGED = "ray-on-ecs", "ray-on-ecs-changed"
CONTEXT = (".dockerignore", "LICENSE", "pyproject.toml", "docker", "training")
MB = 1e6
# Bytes of the files of each part's distributions: as their wheels list them, and as they are there.
WHEELS = """
import importlib.metadata as m, json
parts = {"CUDA": [0, 0], "PyTorch and Triton": [0, 0], "everything else": [0, 0]}
for each in m.distributions():
    name = each.metadata["Name"]
    cuda, torch = name.startswith(("nvidia-", "cuda-")), name in ("torch", "torchvision", "triton")
    part = parts["CUDA" if cuda else "PyTorch and Triton" if torch else "everything else"]
    for file in each.files or []:
        path = file.locate()
        part[0] += file.size or 0
        part[1] += path.stat().st_size if path.is_file() else 0
print(json.dumps(parts))
"""


@dataclass(frozen=True)
class Layer:
    """One step of the Dockerfile and the bytes that it adds, before compression."""

    step: str
    size: float


def layers(engine: str, image: str = IMAGE) -> list[Layer]:
    """The image's layers with something in them, the base first."""
    rows = _call(engine, "history", "--no-trunc", "--format={{.Size}}\t{{.CreatedBy}}", image).splitlines()
    found = [Layer(_step(step), _bytes(size)) for size, step in (row.split("\t", 1) for row in reversed(rows))]
    return [layer for layer in found if layer.size]


def pushed_by_a_change(engine: str) -> list[Layer]:
    """The layers that are new when a line is added to training/, by building that image."""
    with tempfile.TemporaryDirectory() as folder:
        for name in CONTEXT:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, Path(folder) / name)
        with (Path(folder) / "training" / "engine" / "fit.py").open("a") as module:
            module.write("# one line more\n")
        options = ("--platform", "linux/amd64", "--file", f"{folder}/docker/Dockerfile", "--tag", CHANGED)
        _call(engine, "build", *options, folder)
    try:
        kept, now = (_digests(engine, image) for image in (IMAGE, CHANGED))
        found = layers(engine, CHANGED)
        return found[len(found) - sum(digest not in kept for digest in now) :]
    finally:
        _call(engine, "rmi", CHANGED)


def wheels(engine: str) -> dict[str, tuple[int, int]]:
    """Bytes of each part of the Python packages: in their wheels, and in the image."""
    return json.loads(_call(engine, "run", "--rm", IMAGE, "python", "-c", WHEELS))


def report(engine: str, console: Console) -> None:
    """Print the tables."""
    found = layers(engine)
    total = sum(layer.size for layer in found)
    console.print(_table("layer", [(layer.step, layer.size) for layer in found], total))
    console.print(_table("a line more in training/ pushes", [(x.step, x.size) for x in pushed_by_a_change(engine)]))
    parts = wheels(engine)
    console.print(_table("Python packages in the image", [(name, here) for name, (_, here) in parts.items()], total))
    own, _ = parts["CUDA"]
    console.print(f"the image holds {total / own:.2f} times what its CUDA wheels do ({own / MB:,.0f} MB unpacked)")


def _table(title: str, rows: list[tuple[str, float]], whole: float | None = None) -> Table:
    table = Table(title, "MB, not compressed", "share")
    table.columns[1].justify = table.columns[2].justify = "right"
    total = sum(size for _, size in rows)
    for name, size in (*rows, ("sum", total)):
        table.add_row(name, f"{size / MB:,.2f}", f"{size / (whole or total):.1%}")
    return table


def _bytes(size: str) -> float:
    """Engines write 1.11GB, or 1.11 GB."""
    number = size.rstrip(" kMGB")
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[size.removeprefix(number).strip()]


def _step(created_by: str) -> str:
    """The line of the Dockerfile, in what the engines make of it."""
    line = re.sub(r"^\|\d+ .*?/bin/sh -c |^/bin/sh -c (#\(nop\) )?|\w+:[0-9a-f]{64} in ", "", created_by)
    return line[:90]


def _digests(engine: str, image: str) -> list[str]:
    return json.loads(_call(engine, "inspect", "--format={{json .RootFS.Layers}}", image))


def _call(engine: str, *arguments: str) -> str:
    done = subprocess.run([engine, *arguments], capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{engine} {arguments[0]} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    report(*(sys.argv[1:] or ["docker"]), Console(width=130))
