"""Where Ray Data prepared the batches of the runs of a cluster."""

import json

# Prints how many tasks have prepared a batch, by the address of their node. It runs on a node of the cluster.
PROGRAM = """
import json
from collections import Counter
import ray
from ray.util.state import list_tasks

ray.init(logging_level="ERROR")
addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
tasks = list_tasks(filters=[("name", "=", "MapBatches(make)"), ("state", "=", "FINISHED")], limit=10_000)
print(json.dumps(Counter(addresses[task.node_id] for task in tasks)))
"""


def by_address(output: str) -> dict[str, int]:
    """Return what PROGRAM has printed, after any lines of Ray's."""
    return json.loads(output.splitlines()[-1])
