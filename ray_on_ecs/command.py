"""Ray's settings of a run, and the exit status of each kind of failure."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ray_on_ecs import logs
from ray_on_ecs.errors import Interrupted, TrainingError

logger = logging.getLogger(__name__)

# Ray reads these when it is imported.
RAY_SETTINGS = {
    # Ray logs the pending resource requests of starting workers as errors.
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def exit_status(command: Callable[[], int], interrupted: str) -> int:
    """Call a command and return its exit status; a failure costs one line and has its error's status."""
    logs.set_up("ray-on-ecs")
    try:
        return command()
    except TrainingError as error:
        logger.error(error)
        return error.exit_status
    except KeyboardInterrupt:
        logger.error(interrupted)
        return Interrupted.exit_status
