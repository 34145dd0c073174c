"""Replacement of an instance whose GPUs fail: Auto Scaling replaces an instance that is marked unhealthy.

At most one at a time in a group of up to five, and a fifth of a larger group: new instances of the same type don't help
against a fault that all instances share.
https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_SetInstanceHealth.html
"""

import json
import logging
import os
import random
import time
from pathlib import Path
from typing import Any

from ray_on_ecs.aws import client
from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, INSTANCE_ID
from ray_on_ecs.errors import counted, one_line

logger = logging.getLogger(__name__)


# Random delay: most instances that fail at the same time see the marks of earlier ones.
SPREAD_SECONDS = 30.0


def request() -> None:
    """Mark this instance unhealthy, and print the outcome; outside EC2 do nothing."""
    file = os.environ.get(INSTANCE_FILE_VARIABLE)
    if not file:
        return
    try:
        instance_id = json.loads(Path(file).read_text())[INSTANCE_ID]
        time.sleep(random.uniform(0, SPREAD_SECONDS))
        autoscaling = client("autoscaling", connect_seconds=5, read_seconds=10, attempts=3)
        logger.warning(mark_unhealthy(instance_id, autoscaling))
    except Exception as cause:
        reason = one_line(f"{type(cause).__name__}: {cause}")
        logger.warning(f"this instance could not be marked unhealthy ({reason})")


def mark_unhealthy(instance_id: str, autoscaling: Any) -> str:
    """Mark an instance unhealthy unless too many of its group are; return a line with the outcome."""
    instances = autoscaling.describe_auto_scaling_instances(InstanceIds=[instance_id])["AutoScalingInstances"]
    if not instances:
        return f"{instance_id} is not in an Auto Scaling group, which could replace it"
    group_name = instances[0]["AutoScalingGroupName"]
    [group] = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group_name])["AutoScalingGroups"]
    unhealthy = {member["InstanceId"] for member in group["Instances"] if member["HealthStatus"] != "Healthy"}
    if instance_id in unhealthy:
        return f"{instance_id} is marked unhealthy; {group_name} replaces it"
    size = len(group["Instances"])
    limit = max(1, size // 5)
    if len(unhealthy) >= limit:
        return (
            f"{instance_id} is not marked unhealthy yet: {counted(len(unhealthy), 'instance')} of {size} in "
            f"{group_name} are, and at most {limit} may be at a time"
        )
    # A fault shows soon after the start, within the group's grace period, in which AWS would ignore the mark.
    autoscaling.set_instance_health(InstanceId=instance_id, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False)
    return f"marked {instance_id} unhealthy; {group_name} replaces it"
