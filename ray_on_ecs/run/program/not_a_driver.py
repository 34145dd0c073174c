"""Ends a Ray program that was started on every worker by mistake: Ray imports this module in `fit`."""

import os
import sys

from ray_on_ecs.errors import UsageError

print(
    "ray-on-ecs: this script starts workers itself, by Ray Train or Ray Tune, and each worker would start as many; "
    "--driver runs it once, on the head",
    file=sys.stderr,
    flush=True,
)
os._exit(UsageError.exit_status)
