"""What the cluster needs, by rule and as a real Ray tells it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raynode import ports
from raynode.demand import Demand

REPOSITORY = Path(__file__).parents[2]
# A Ray of one node that says it has two GPUs; prints what is read while work comes and goes.
CLUSTER = """
import dataclasses, json, time
import ray
from ray.autoscaler.sdk import request_resources
from ray.util import placement_group, remove_placement_group
from raynode import api, demand, metrics

context = ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=True, log_to_driver=False)

def show(**expected):
    # A node tells of its use with a delay.
    for _ in range(1000):
        found = dataclasses.asdict(demand.read(context.address_info["gcs_address"]))
        if found == {**dict.fromkeys(found, 0), **expected}:
            break
        time.sleep(0.1)
    print(json.dumps(found), flush=True)

@ray.remote(num_cpus=1, num_gpus=0.5)
class Work:
    pass

show(gpus=2)
group = placement_group([{"CPU": 1, "GPU": 4}] * 2)
show(gpus=2, gpus_waiting=8, cpus_waiting=2)
remove_placement_group(group)
work = [Work.remote() for _ in range(3)]
show(gpus=2, gpus_used=1, cpus_used=2, gpus_waiting=0.5, cpus_waiting=1)
del work
request_resources(bundles=[{"GPU": 1}] * 3)
show(gpus=2, gpus_requested=3)
nodes = api.get(f"http://{context.dashboard_url}/nodes?view=summary")["data"]["summary"]
print(json.dumps([nodes[0]["raylet"]["state"], nodes[0]["gpus"]]))
"""


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (Demand(), 0),
        (Demand(gpus_waiting=3), 3),
        (Demand(gpus=4, gpus_waiting=1), 1),
        (Demand(gpus=4), 0),
        (Demand(gpus=4, gpus_used=1), 4),
        (Demand(gpus=4, cpus_used=1), 4),
        (Demand(gpus=4, gpus_used=3, gpus_waiting=1), 4),
        (Demand(gpus=4, gpus_used=4, gpus_waiting=2), 6),
        (Demand(cpus_waiting=8), 1),
        (Demand(cpus_waiting=2, gpus_waiting=2), 2),
        (Demand(gpus=1, gpus_used=1, cpus_waiting=8), 1),
        (Demand(gpus_waiting=0.5), 1),
        (Demand(gpus=1, gpus_used=0.1 + 0.2 + 0.7, gpus_waiting=0.1 + 0.2 + 0.7), 2),
        (Demand(gpus=4, gpus_requested=2), 2),
        (Demand(gpus_requested=2, gpus_waiting=3), 3),
    ],
    ids=[
        "an empty cluster needs none",
        "what waits comes",
        "with nothing in use what is too many goes",
        "with nothing in use all go",
        "while a GPU is in use none goes",
        "while a CPU is in use none goes",
        "what is free is used first",
        "what waits comes on top of what is used",
        "work for CPUs needs a worker",
        "which others that wait bring along",
        "or one that is there",
        "a part of a GPU is a GPU",
        "but no more for the way that computers add",
        "what is requested stays",
        "and more can be needed",
    ],
)
def test_the_gpus_that_are_wanted(demand: Demand, wanted: int) -> None:
    assert demand.gpus_wanted == wanted


@pytest.mark.xdist_group("ray")
def test_ray_tells_what_is_there_what_is_used_and_what_waits() -> None:
    found = [json.loads(line) for line in _run(CLUSTER).splitlines() if line.startswith(("{", "["))]
    nothing = dataclasses.asdict(Demand(gpus=2))
    assert found[0] == nothing
    assert found[1] == {**nothing, "gpus_waiting": 8, "cpus_waiting": 2}, "a placement group that waits"
    assert found[2] == {**nothing, "gpus_used": 1, "cpus_used": 2, "gpus_waiting": 0.5, "cpus_waiting": 1}, "actors"
    assert found[3] == {**nothing, "gpus_requested": 3}, "what a program requests, and nothing that has ended"
    assert found[4] == ["ALIVE", []], "the dashboard tells of nodes and GPUs though the Prometheus servers are shut"


def _run(script: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ray = {"RAY_TMPDIR": "/tmp/ray-tests", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
    environment = {**kept, **ray, **ports.METRICS, "RAY_AUTH_TOKEN": "secret", "PYTHONPATH": str(REPOSITORY / "docker")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
