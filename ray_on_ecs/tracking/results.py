"""Versions and times of `result.json`, and figures as PNG."""

from __future__ import annotations

import io
import platform
import runpy
import time
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import psutil

import ray_on_ecs

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.figure import Figure

PACKAGES = ("torch", "torchvision", "ray", "numpy", "pyarrow")


def png(figure: Figure) -> bytes:
    """Return a matplotlib figure as a PNG."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def versions() -> dict[str, str | None]:
    """Return the versions of Python, CUDA and the packages."""
    # torch takes a second to import, and its version.py is enough.
    torch_version = metadata.distribution("torch").locate_file("torch/version.py")
    return {
        "ray_on_ecs": ray_on_ecs.__version__,
        "python": platform.python_version(),
        "cuda": runpy.run_path(str(torch_version))["cuda"],
        **{name: metadata.version(name) for name in PACKAGES},
    }


def run_times(script_start: float) -> dict[str, Any]:
    """Return the times of this command, from the start of its process.

    Args:
        script_start: The start of the script (Unix time).
    """
    started = psutil.Process().create_time()
    finished = time.time()
    return {
        "started": _iso(started),
        "script_start": _iso(script_start),
        "finished": _iso(finished),
        "total_seconds": finished - started,
        "to_script_start_seconds": script_start - started,
    }


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
