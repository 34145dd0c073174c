"""Layers of an image in OCI layouts, such as one with gzip and one with zstd: their sizes, and the time to unpack them.

usage: python -m bench.image_pull LAYOUT...   (needs pigz and zstd)

A folder LAYOUT is written by `docker buildx build --output type=oci,tar=false,dest=LAYOUT,compression=zstd`, or by
`podman push --compression-format zstd IMAGE oci:LAYOUT`. Docker unpacks gzip with pigz where it is installed, as on
Amazon Linux. Processor seconds are those of pigz or zstd, without tar's, and don't depend on other work on the machine.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

MB = 1e6
UNPACK = {"gzip": "pigz", "zstd": "zstd"}


class Layer(NamedTuple):
    """A layer's bytes as they are pulled and on the disk, and the seconds of its decompression and of its unpacking."""

    kind: str
    pulled: int
    unpacked: int
    processor: float
    seconds: float


def layers(layout: Path) -> list[Layer]:
    """Measure the layers of the first image of a layout."""
    manifest = json.loads((layout / "index.json").read_text())
    while "layers" not in manifest:  # an index may name an index
        manifest = json.loads(_blob(layout, manifest["manifests"][0]).read_text())
    return [_measure(_blob(layout, layer), layer["mediaType"].rpartition("+")[2]) for layer in manifest["layers"]]


def _blob(layout: Path, descriptor: dict[str, Any]) -> Path:
    return layout / "blobs" / descriptor["digest"].replace(":", "/")


def _measure(blob: Path, kind: str) -> Layer:
    command = [UNPACK[kind], "-dc", str(blob)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        unpacked = sum(map(len, iter(partial(process.stdout.read, 1 << 20), b"")))  # ty: ignore[missing-union-attribute]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    with tempfile.TemporaryDirectory(dir=blob.parents[3]) as folder:
        started = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            subprocess.run(["tar", "--extract", "--directory", folder], stdin=process.stdout, check=True)
        seconds = time.monotonic() - started
    return Layer(kind, blob.stat().st_size, unpacked, processor, seconds)


def table(title: str, measured: list[Layer]) -> Table:
    """Build the table of a layout, with a row for each layer and one for their sum."""
    shown = Table("layer", "MB pulled", "MB unpacked", "processor s", "s to unpack", title=title)
    total = Layer("sum", *(sum(column) for column in list(zip(*measured, strict=True))[1:]))
    for kind, pulled, unpacked, processor, seconds in (*measured, total):
        shown.add_row(kind, f"{pulled / MB:,.1f}", f"{unpacked / MB:,.1f}", f"{processor:.1f}", f"{seconds:.1f}")
    return shown


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Console(width=100).print(table(name, layers(Path(name))))
