"""The image's size: its layers, the bytes that a one-line change to training/ pushes, and its Python packages.

usage: python -m bench.image_size [ENGINE]   (after `make image`; ENGINE is docker by default)
"""

import json
import sys

from rich.console import Console
from rich.table import Table

from tests.containers.image_layers import IMAGE, call_engine, layers, layers_pushed_by_a_change

MB = 1e6
# Bytes of each part's distributions: as their wheels list them, and as they are in the image.
PACKAGE_SIZES = """
import importlib.metadata as m, json
parts = {"CUDA": [0, 0], "PyTorch and Triton": [0, 0], "everything else": [0, 0]}
for distribution in m.distributions():
    name = distribution.metadata["Name"]
    cuda, torch = name.startswith(("nvidia-", "cuda-")), name in ("torch", "torchvision", "triton")
    part = parts["CUDA" if cuda else "PyTorch and Triton" if torch else "everything else"]
    for file in distribution.files or []:
        path = file.locate()
        part[0] += file.size or 0
        part[1] += path.stat().st_size if path.is_file() else 0
print(json.dumps(parts))
"""


def package_sizes(engine: str) -> dict[str, tuple[int, int]]:
    """Return the bytes of each part of the Python packages: in their wheels, and in the image."""
    return json.loads(call_engine(engine, "run", "--rm", IMAGE, "python", "-c", PACKAGE_SIZES))


def report(engine: str, console: Console) -> None:
    """Print the tables."""
    image_layers = [(layer.step, layer.size) for layer in layers(engine)]
    pushed = [(layer.step, layer.size) for layer in layers_pushed_by_a_change(engine)]
    total = sum(size for _, size in image_layers)
    console.print(_table("layer", image_layers, total))
    console.print(_table("one more line in training/ pushes", pushed))
    parts = package_sizes(engine)
    console.print(_table("Python packages in the image", [(name, size) for name, (_, size) in parts.items()], total))
    in_wheels, _ = parts["CUDA"]
    console.print(f"the image is {total / in_wheels:.2f} times the size of its CUDA wheels ({in_wheels / MB:,.0f} MB)")


def _table(title: str, rows: list[tuple[str, float]], total: float | None = None) -> Table:
    """Build a table of sizes; shares are of `total`, or of the sum of the rows."""
    table = Table(title, "MB, uncompressed", "share")
    table.columns[1].justify = table.columns[2].justify = "right"
    added = sum(size for _, size in rows)
    for name, size in (*rows, ("sum", added)):
        table.add_row(name, f"{size / MB:,.2f}", f"{size / (total or added):.1%}")
    return table


if __name__ == "__main__":
    report(*(sys.argv[1:] or ["docker"]), Console(width=130))
