"""The parts of `result.json` that every run has: versions and times, and figures as PNG."""

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
    """Return the versions of what the run ran on; torch itself, which takes a second to import, is not imported."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {
        "ray_on_ecs": ray_on_ecs.__version__,
        "python": platform.python_version(),
        "cuda": _cuda_of_torch(),
        **packages,
    }


def _cuda_of_torch() -> str | None:
    return runpy.run_path(str(metadata.distribution("torch").locate_file("torch/version.py")))["cuda"]


def run_times(event: str, at: float | None) -> dict[str, Any]:
    """Return the times of this command, from the start of its process.

    Args:
        event: What ends the preparations: `first_step` of a recipe, `script_start` of a script.
        at: When that was (Unix time), or None.
    """
    started = psutil.Process().create_time()
    finished = time.time()
    return {
        "started": _iso(started),
        event: _iso(at) if at else None,
        "finished": _iso(finished),
        "total_seconds": finished - started,
        f"to_{event}_seconds": at - started if at else None,
    }


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
