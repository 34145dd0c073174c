"""The private names of Ray that a run uses, in this release of Ray."""

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.lazy import Lazy

ray_private, failure_report = Lazy("ray_on_ecs.run.ray_private"), Lazy("ray_on_ecs.run.failure_report")


def test_ray_has_the_replaced_print_function(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, name = ray_private.worker, ray_private.PRINT
    assert f"functools.partial({name}, ignore_prefix=ignore_prefix)" in inspect.getsource(worker)
    monkeypatch.setattr(worker, name, getattr(worker, name))
    ray_private.print_by(print)
    assert getattr(worker, name) is print


def test_trainer_accepts_the_arguments_of_a_run() -> None:
    from ray.train import RunConfig, ScalingConfig

    given = {"train_loop_config", "backend_config", "scaling_config", "run_config"}
    assert given <= set(inspect.signature(ray_private.Trainer.__init__).parameters)
    assert {"label_selector", "resources_per_worker"} <= set(inspect.signature(ScalingConfig).parameters)
    assert {"failure_config", "logging_config"} <= set(inspect.signature(RunConfig).parameters)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Data's settings
def test_trainer_has_default_callbacks_without_the_cleaner() -> None:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    of_ray, ours = (
        [type(each).__name__ for each in trainer(lambda: None)._create_default_callbacks()]
        for trainer in (DataParallelTrainer, ray_private.Trainer)
    )
    assert [each for each in of_ray if each not in ours] == ["PlacementGroupCleanerCallback"]


@pytest.mark.parametrize("name", ["START_TIMEOUT", "PREEMPTION_WATCHER", "CHANGE_FOLDER"])
def test_ray_train_reads_these_variables(name: str) -> None:
    from ray.train import constants
    from ray.train.v2._internal import constants as constants_of_v2

    assert getattr(ray_private, name) in [*vars(constants_of_v2).values(), *vars(constants).values()]


def test_startup_error_of_workers_is_known() -> None:
    from ray.train import ControllerError

    error = ray_private.WorkerGroupStartupTimeoutError(2)
    assert failure_report.is_start_timeout(ControllerError(error))
    assert not failure_report.is_start_timeout(ControllerError(ValueError("no")))
    assert not failure_report.is_start_timeout(ValueError("no"))


def test_draining_nodes_have_deadlines_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_private.state, "get_draining_nodes", lambda: {"a": 1_700_000_000_500, "b": 0})
    assert ray_private.draining_nodes() == {"a": 1_700_000_000.5, "b": None}


# Makes each call on a new local Ray. Eight threads create the run's actor at once, and a task finds it.
ASK = """
import json, ray
from concurrent.futures import ThreadPoolExecutor
from ray_on_ecs.run import ray_private
from ray_on_ecs.tracking import run_actor
run_actor.ANSWER_SECONDS = 300  # on a busy machine, too
ray.init(address="local", num_cpus=1, include_dashboard=False)
[resources] = ray_private.available_resources_per_node().values()
client = run_actor.create_run_actor()
with ThreadPoolExecutor(8) as threads:
    states = list(threads.map(client.read, [-1] * 8))
found = ray.get(ray.remote(lambda client: client.read(-1)).remote(client))
actors = {state.incarnation for state in [*states, found, client.read(-1)]}
print(json.dumps([ray_private.draining_nodes(), resources["CPU"], len(actors)]))
"""


@pytest.mark.ray
def test_running_ray_answers_all_calls() -> None:
    variables: dict[str, Any] = {name: each for name, each in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"RAY_TMPDIR": "/tmp/ray-tests", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", ASK], env=variables, capture_output=True, text=True, timeout=480)
    assert done.stdout.splitlines()[-1:] == ["[{}, 1.0, 1]"], done.stderr


@pytest.mark.ray
def test_token_is_found_where_ray_stores_it() -> None:
    program = (
        "from ray_on_ecs.run.ray_private import *\n"
        "from ray._private.authentication.grpc_authentication_client_interceptor import "
        "_get_authentication_metadata_tuple as metadata\n"
        "enable_token_authentication()\n"
        "print(AUTH_MODE_ENV_VAR, metadata()[0][1])\n"
    )
    variables = {**os.environ, "RAY_AUTH_TOKEN": "of-the-tests"}
    variables.pop("RAY_AUTH_MODE", None)
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=480)
    assert done.stdout == "RAY_AUTH_MODE Bearer of-the-tests\n", done.stderr


def test_script_has_only_the_cluster_address_of_ray() -> None:
    from ray_on_ecs.run.environment import OF_CLUSTER, without_ray

    kept = {
        **dict.fromkeys(OF_CLUSTER, "x"),
        "CUDA_VISIBLE_DEVICES": "0",
        "RAY_ON_ECS_STORAGE_PATH": "s3://b",
        "A": "1",
    }
    of_ray = dict.fromkeys(("RAY_JOB_ID", "RAY_RAYLET_PID", "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"), "x")
    assert without_ray({**kept, **of_ray}) == kept
