"""Ray's settings of a run, and the exit status of each kind of failure."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ray_on_ecs import logs
from ray_on_ecs.errors import Interrupted, TrainingError

logger = logging.getLogger(__name__)

# Ray reads these when it is imported.
RAY_SETTINGS = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # The interval at which the controller polls the workers, also for their end.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    # A spot interruption notice leaves only a minute or two.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
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
