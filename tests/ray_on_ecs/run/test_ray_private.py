"""The private names of Ray that a run uses, in this release of Ray."""

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.lazy import Lazy

ray_private = Lazy("ray_on_ecs.run.ray_private")


def test_ray_has_the_replaced_print_function(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, name = ray_private.worker, ray_private.PRINT
    assert f"functools.partial({name}, ignore_prefix=ignore_prefix)" in inspect.getsource(worker)
    monkeypatch.setattr(worker, name, getattr(worker, name))
    ray_private.print_by(print)
    assert getattr(worker, name) is print


def test_draining_nodes_have_deadlines_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_private.state, "get_draining_nodes", lambda: {"a": 1_700_000_000_500, "b": 0})
    assert ray_private.draining_nodes() == {"a": 1_700_000_000.5, "b": None}


# Makes each call on a new local Ray, with an actor.
ASK = """
import json, os, ray, time
from ray_on_ecs.node import resource_state
from ray_on_ecs.run import ray_private
ray.init(address="local", num_cpus=1, include_dashboard=False)
[resources] = ray_private.available_resources_per_node().values()
class Actor:
    def answer(self): pass
actor = ray.remote(Actor).remote()
ray.get(actor.answer.remote())
[job] = ray_private.jobs_of({os.getpid()})
assert job == ray.get_runtime_context().get_job_id()
states = [actor["State"] for actor in ray_private.actors_of(job)]
[(node, joined)] = ray_private.join_times().items()
assert node == ray.nodes()[0]["NodeID"] and 0 <= time.time() - joined < 300, joined
print(json.dumps([ray_private.draining_nodes(), resources["CPU"], states]))

bundles = [{"CPU": 1}, {"GPU": 2, "accelerator_type:H100": 0.001}]
selectors = [{"ray.io/node-group": "!in(a,b)"}, {}]
group = ray.util.placement_group(bundles, bundle_label_selector=selectors)
plain = ray.util.placement_group([{"GPU": 1}])
address = ray.get_runtime_context().gcs_address
while len(gangs := resource_state.read_gangs(address)) < 2:
    time.sleep(0.05)
print(json.dumps([[str(each) for each in gangs[group.id.hex()]], group.id.hex().endswith(job), len(gangs)]))
"""
GANGS = [["1 CPU and ray.io/node-group not in (a, b)", "2 GPU and H100"], True, 2]


@pytest.mark.ray
def test_running_ray_answers_all_calls() -> None:
    variables: dict[str, Any] = {name: each for name, each in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"RAY_TMPDIR": "/tmp/ray-tests", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", ASK], env=variables, capture_output=True, text=True, timeout=480)
    answers, gangs = done.stdout.splitlines()[-2:] or ("", "")
    assert answers == '[{}, 1.0, ["ALIVE"]]', done.stderr
    assert json.loads(gangs) == GANGS


def test_script_has_only_the_cluster_address_of_ray() -> None:
    from ray_on_ecs.run.environment import OF_CLUSTER, without_ray

    kept = dict.fromkeys((*OF_CLUSTER, "CUDA_VISIBLE_DEVICES", "RAY_ON_ECS_STORAGE_PATH", "A"), "x")
    of_ray = dict.fromkeys(("RAY_JOB_ID", "RAY_RAYLET_PID", "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"), "x")
    assert without_ray({**kept, **of_ray}) == kept
