"""Distributed training on a Ray cluster in your own AWS account; the functions that a script may call.

    import ray_on_ecs

    ray_on_ecs.progress(step, total)      # the numbers of steps done and of all, and a sign of life
    ray_on_ecs.log(loss=0.31)             # metrics of the last reported step
    if ray_on_ecs.seconds_left() < 60:    # the node is being reclaimed: save now

Under `ray-on-ecs run` they feed the run's metrics and its hang detection. Elsewhere, as under torchrun, they do
nothing. `Checkpointer`, `DistributedSampler`, `microbatches` and `saved_progress` need PyTorch and work everywhere;
until they are used, this package imports only the standard library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ray_on_ecs.sdk import log, progress, seconds_left

if TYPE_CHECKING:
    from ray_on_ecs.checkpoint.checkpointer import Checkpointer, saved_progress
    from ray_on_ecs.checkpoint.microbatches import microbatches
    from ray_on_ecs.checkpoint.sampler import DistributedSampler

    __version__: str

__all__ = [
    "Checkpointer",
    "DistributedSampler",
    "__version__",
    "log",
    "microbatches",
    "progress",
    "saved_progress",
    "seconds_left",
]
_MODULES = {
    "Checkpointer": "checkpointer",
    "DistributedSampler": "sampler",
    "microbatches": "microbatches",
    "saved_progress": "checkpointer",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return getattr(import_module(f"ray_on_ecs.checkpoint.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    from importlib import metadata  # takes longer than the rest of this package

    try:
        return metadata.version("ray-on-ecs")
    except metadata.PackageNotFoundError:  # a copy that is not installed
        return "0.0.0"
