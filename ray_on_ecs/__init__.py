"""Distributed training on a Ray cluster in your own AWS account; the functions that a script may call.

    import ray_on_ecs

    ray_on_ecs.progress(step)             # the run is alive, and this many steps are done
    ray_on_ecs.log(loss=0.31)             # metrics of the step that was reported last
    if ray_on_ecs.seconds_left() < 60:    # the node is being reclaimed: save now

Under `ray-on-ecs run` they reach the run's metrics and its detection of hangs. Elsewhere, as under torchrun, they do
nothing. This package imports the standard library alone; its subpackages import what they need.
"""

from ray_on_ecs.sdk import log, progress, seconds_left

__all__ = ["__version__", "log", "progress", "seconds_left"]
__version__ = "0.1.0"
