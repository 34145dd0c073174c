"""`direct_run.py` on a stack of which a file tells: its pools, and what EC2 refuses; see Stack in test_pools.py."""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])

from ray_on_ecs import cluster_info
from ray_on_ecs.starting import look


def stack() -> Any:
    """Read the file."""
    return json.loads(Path(os.environ["RAY_ON_ECS_TEST_STACK"]).read_text())


def ask(service: str, operation: str, **given: Any) -> Any:
    """Answer for EC2 Auto Scaling."""
    if operation == "describe_auto_scaling_groups":
        [name] = given["AutoScalingGroupNames"]
        return {"AutoScalingGroups": [{"AutoScalingGroupName": name, "Instances": [], "MaxSize": 4}]}
    refusal = stack()["refused"].get(given["AutoScalingGroupName"])
    launch = {"Description": "Launching a new EC2 instance", "StatusCode": "Failed", "StartTime": datetime.now(UTC)}
    return {"Activities": [{**launch, "StatusMessage": refusal}] if refusal else []}


# Before the modules of a run import them.
replaced: Any = cluster_info, look
replaced[0].read_cluster_info = lambda: stack()["info"]
replaced[1].ask_soon = ask

from ray_on_ecs.command import exit_status
from tests.direct_run import run

if __name__ == "__main__":
    sys.exit(exit_status(lambda: run(sys.argv[1:]), "interrupted before it started"))
