"""Ray's settings of a run, and the exit status of each kind of failure."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ray_on_ecs.errors import Interrupted, TrainingError

# Ray reads these when it is imported.
RAY_SETTINGS = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # How often the controller checks on the workers and on whether they have finished.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    # A node's end is announced a minute or two ahead: lose no more than a second of it before noticing.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    # While workers are starting, Ray logs their pending resource requests as errors; turn that off.
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def exit_status(command: Callable[[], int], interrupted: str) -> int:
    """Call a command and return its exit status; each failure has a line and a status of its own.

    Args:
        command: Returns the exit status if nothing fails.
        interrupted: The line for an interrupt that the command does not handle itself.
    """
    try:
        return command()
    except TrainingError as error:
        print(f"ray-on-ecs: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"ray-on-ecs: {interrupted}", file=sys.stderr)
        return Interrupted.exit_status
