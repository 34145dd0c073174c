"""The layers of the training image, and the layers that a change to the training code rebuilds."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGE = "ray-on-ecs"
CHANGED_IMAGE = "ray-on-ecs-changed"
# The paths that docker/Dockerfile copies.
CONTEXT = (".dockerignore", "LICENSE", "pyproject.toml", "docker", "ray_on_ecs", "training")
CHANGED_FILE = "training/image_classifier.py"
BUILD_SECONDS = 1800


@dataclass(frozen=True)
class Layer:
    """A step of the Dockerfile and the bytes that it adds, uncompressed."""

    step: str
    size: float


def layers(engine: str, image: str = IMAGE) -> list[Layer]:
    """Return the image's layers that are not empty, base first."""
    rows = call_engine(engine, "history", "--no-trunc", "--format={{.Size}}\t{{.CreatedBy}}", image).splitlines()
    parsed = [Layer(_step(step), _bytes(size)) for size, step in (row.split("\t", 1) for row in reversed(rows))]
    return [layer for layer in parsed if layer.size]


def layers_pushed_by_a_change(engine: str) -> list[Layer]:
    """Build the image with one more line in training/, and return the layers that differ from IMAGE's."""
    with tempfile.TemporaryDirectory() as folder:
        for name in CONTEXT:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, Path(folder) / name)
        with (Path(folder) / CHANGED_FILE).open("a") as module:
            module.write("# one more line\n")
        options = ("--platform", "linux/amd64", "--file", f"{folder}/docker/Dockerfile", "--tag", CHANGED_IMAGE)
        # As for `make image`.
        given = [
            f"--build-arg={name}={os.environ[name]}" for name in ("PYTHON_IMAGE", "EFA_SOURCES") if name in os.environ
        ]
        call_engine(engine, "build", *options, *given, folder)
    try:
        before, after = (_digests(engine, image) for image in (IMAGE, CHANGED_IMAGE))
        changed = layers(engine, CHANGED_IMAGE)
        return changed[len(changed) - sum(digest not in before for digest in after) :]
    finally:
        call_engine(engine, "rmi", CHANGED_IMAGE)


def call_engine(engine: str, *arguments: str) -> str:
    """Call a container engine and return its output; SystemExit with the error output if it fails."""
    done = subprocess.run([engine, *arguments], capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{engine} {arguments[0]} failed:\n{done.stderr}")
    return done.stdout


def _digests(engine: str, image: str) -> list[str]:
    return json.loads(call_engine(engine, "inspect", "--format={{json .RootFS.Layers}}", image))


def _bytes(size: str) -> float:
    """Parse `1.11GB` or `1.11 GB`: engines differ."""
    number = size.rstrip(" kMGB")
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[size.removeprefix(number).strip()]


def _step(created_by: str) -> str:
    """Return the line of the Dockerfile, without additions of the engines."""
    line = re.sub(r"^\|\d+ .*?/bin/sh -c |^/bin/sh -c (#\(nop\) )?|\w+:[0-9a-f]{64} in ", "", created_by)
    return line[:90]
