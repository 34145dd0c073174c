"""Pull of the image of this node's task, from the ECS agent's task metadata; nothing elsewhere.

https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-metadata-endpoint-v4-response.html
"""

import logging
import os
from typing import Any

from ray_on_ecs.node import api
from ray_on_ecs.tracking.starts import moment

logger = logging.getLogger(__name__)

METADATA_VARIABLE = "ECS_CONTAINER_METADATA_URI_V4"  # ECS sets it in every container
NORMAL = "NORMAL"  # the type of a container of the task definition; others are the agent's own


def read_pull() -> dict[str, float]:
    """Return the times of the pull by their labels, as far as ECS knows them; a failure costs one line."""
    address = os.environ.get(METADATA_VARIABLE)
    if not address:
        return {}
    try:
        return pull_of(api.ask(f"{address}/task", token=""))
    except OSError as cause:
        reason = getattr(cause, "reason", cause)
        logger.warning(f"ECS's agent does not tell when the image was pulled ({reason}); no run's start will show it")
        return {}


def pull_of(task: Any) -> dict[str, float]:
    """Return the begin and the end of the pull (Unix times) in a task's metadata, which may be any document.

    An image that was there is not pulled, so that the task has neither time: both are then those of its container.
    """
    task = task if isinstance(task, dict) else {}
    containers = task.get("Containers")
    created = [
        seconds
        for each in (containers if isinstance(containers, list) else ())
        if isinstance(each, dict) and each.get("Type", NORMAL) == NORMAL
        if (seconds := moment(each.get("CreatedAt"))) is not None
    ]
    began, ended = moment(task.get("PullStartedAt")), moment(task.get("PullStoppedAt"))
    if ended is None and created:
        ended = min(created)
        began = ended if began is None else began
    return {name: seconds for name, seconds in (("pulling", began), ("pulled", ended)) if seconds is not None}
