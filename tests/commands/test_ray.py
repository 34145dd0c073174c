"""The resources that a real Ray reports, and the requests of waiting runs and pipelines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.node import ports
from tests.commands.conftest import REPOSITORY, Run
from tests.commands.head import SECONDS, TOKEN
from tests.local_cluster import STARTS
from tests.worker_pools import cpu_group, node_group, workers

# Workers of a stack with GPUs, and of one that also has CPU workers.
STACKS = f"""
of_gpus = {workers(workers=node_group(units=8))!r}
with_cpus = {workers(workers=node_group(units=8), cpu_workers=cpu_group())!r}
"""
# Prints the used GPUs, which keep a stack's workers, and the needed GPUs, which start workers.
SHOW = """
import dataclasses, json, os, sys, time
import ray
from ray.autoscaler.sdk import request_resources
from ray.util import placement_group, remove_placement_group
from ray_on_ecs.node import api, demand

def start(gpus, dashboard=False):
    global context, gcs
    context = ray.init(
        address="local", num_cpus=gpus, num_gpus=gpus, include_dashboard=dashboard, log_to_driver=False
    )
    gcs = context.address_info["gcs_address"]

def show(name, in_use, needed):
    # A node tells of its use with a delay.
    for _ in range(4000):
        need = demand.read(gcs, of_gpus).needs["workers"]
        found = [need.used, need.requested]
        if found == [in_use, needed]:
            break
        time.sleep(0.1)
    print(json.dumps([name, *found]), flush=True)

@ray.remote(num_cpus=0, num_gpus=1)
class Actor:
    pass

@ray.remote
def wait(file):
    while not os.path.exists(file):
        time.sleep(0.1)
"""
# A Ray of one node with two declared GPUs; prints the reported resources while work starts and ends.
REPORTS = """
start(gpus=2, dashboard=True)

def show_all(cpus=0, **expected):
    for _ in range(4000):
        needs = demand.read(gcs, with_cpus).needs
        found = dataclasses.asdict(needs["workers"]) | {"cpus": needs["cpu-workers"].requested}
        del found["idle_seconds"]
        if found == {**dict.fromkeys(found, 0), "available": 2, "cpus": cpus, **expected}:
            break
        time.sleep(0.1)
    print(json.dumps(found), flush=True)

def idle_seconds():
    return demand.read(gcs, with_cpus).needs["workers"].idle_seconds

def show_use():
    print(json.dumps([demand.node_in_use(gcs, context.address_info["node_ip_address"])]), flush=True)

@ray.remote(num_cpus=1, num_gpus=0.5)
class Work:
    pass

show_all()
show_use()
group = placement_group([{"CPU": 1, "GPU": 4}] * 2 + [{"CPU": 3}])
show_all(requested=8, cpus=3)
remove_placement_group(group)
work = [Work.remote() for _ in range(3)]
show_all(requested=2, used=1, in_use=1)
show_use()
began = time.monotonic()
del work
show_all()
while not idle_seconds()[0] > 0:
    time.sleep(0.1)
[idle] = idle_seconds()
print(json.dumps([0 < idle <= time.monotonic() - began + 1]), flush=True)
demand.release_idle(gcs)
show_use()
request_resources(bundles=[{"GPU": 1, "CPU": 1}] * 3 + [{"CPU": 2}])
show_all(requested=3, cpus=2)
request_resources(bundles=[])
nodes = api.ask(f"http://{context.dashboard_url}/nodes?view=summary")["data"]["summary"]
print(json.dumps([nodes[0]["raylet"]["state"], nodes[0]["gpus"]]))
"""
# A Ray program on the same two GPUs.
USES = """
actor = Actor.remote()
show("an actor", 1, 1)
more = [Actor.remote() for _ in range(3)]
show("and actors that wait", 2, 4)
del actor, more
show("nothing", 0, 0)
for name, options in {"a task": {"num_gpus": 1}, "a task on CPUs alone": {"num_gpus": 0}}.items():
    end = f"{sys.argv[1]}/{name}"
    task = wait.options(**options).remote(end)
    show(name, 1, 1)
    open(end, "w").close()
    ray.get(task)
    show("nothing", 0, 0)
for strategy in ("STRICT_PACK", "SPREAD"):
    group = placement_group([{"GPU": 1}] * 2, strategy=strategy)
    show(strategy, 2, 2)
    remove_placement_group(group)
    show("nothing", 0, 0)

@ray.remote(num_cpus=0)
def fit_trainer(folder):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    def train():
        while not os.path.exists(f"{folder}/trained"):
            time.sleep(0.1)
    settings = {"scaling_config": ScalingConfig(num_workers=2, use_gpu=True)}
    DataParallelTrainer(train, run_config=RunConfig(storage_path=folder), **settings).fit()

training = fit_trainer.remote(sys.argv[1])
show("a trainer", 2, 2)
open(f"{sys.argv[1]}/trained", "w").close()
ray.get(training)
show("nothing", 0, 0)
"""
# The requests of a Ray program on a cluster with only a head, which has neither CPUs nor GPUs.
WANTS = """
start(gpus=0)
for strategy in ("STRICT_PACK", "STRICT_SPREAD"):
    group = placement_group([{"CPU": 1, "GPU": 1}] * 3, strategy=strategy)
    show(strategy, 0, 3)
    remove_placement_group(group)
    show("nothing", 0, 0)
actor = Actor.options(num_gpus=2).remote()
show("an actor", 0, 2)
del actor
show("nothing", 0, 0)

@ray.remote(num_cpus=0)
def fit_trainer(folder):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    scaling = ScalingConfig(num_workers=3, use_gpu=True)
    TorchTrainer(print, scaling_config=scaling, run_config=RunConfig(storage_path=folder)).fit()

@ray.remote(num_cpus=0)
def fit_tuner(folder):
    from ray import tune
    trial = tune.with_resources(lambda config: None, {"cpu": 1, "gpu": 2})
    settings = tune.TuneConfig(num_samples=2)
    tune.Tuner(trial, tune_config=settings, run_config=tune.RunConfig(storage_path=folder)).fit()

training = fit_trainer.remote(sys.argv[1])
show("a trainer", 0, 3)
tuning = fit_tuner.remote(sys.argv[1])
show("and two trials", 0, 7)
"""

# Requests for workers of several pools on a node of the default pool with two CPUs; prints the requested numbers by
# kind, and the requests that no kind fits.
SELECTS = """
from ray_on_ecs.cluster_info import parse_cluster_info
start(gpus=2)
info = parse_cluster_info(sys.argv[1])

def show_kinds(count):
    for _ in range(4000):
        found = demand.read(gcs, info)
        needs = {kind: need.requested for kind, need in found.needs.items() if need.requested}
        if sum(needs.values()) + len(found.unmet) == count:
            break
        time.sleep(0.1)
    print(json.dumps([needs, sorted(map(str, found.unmet))]), flush=True)

def of(pool, **more):
    return {"ray.io/node-group": pool, **more}

here = wait.options(label_selector=of("!in(h100,cpu-workers)")).remote("/")
ray.get(here)
tasks = [
    wait.options(num_cpus=3, label_selector=of("cpu-workers")).remote("/"),
    wait.options(num_gpus=2, label_selector=of("h100")).remote("/"),
    wait.options(num_gpus=1, accelerator_type="H100").remote("/"),
    wait.options(num_gpus=1, label_selector={"ray.io/accelerator-type": "L4"}).remote("/"),
    wait.options(
        num_gpus=1,
        label_selector=of("gone"),
        fallback_strategy=[{"label_selector": {"ray.io/availability-zone": "us-west-2b"}}],
    ).remote("/"),
]
show_kinds(8)
for task in tasks:
    ray.cancel(task)
group = placement_group(
    [{"GPU": 8}, {"GPU": 1}, {"CPU": 5}],
    bundle_label_selector=[of("h100"), {"ray.io/availability-zone": "us-west-2b"}, of("cpu-workers")],
)
show_kinds(14)
"""

# A Ray of one CPU worker with two CPUs, on which Ray Data prepares data; prints the CPUs that CPU workers have and
# should have, once more are wanted, and once the data is no longer read.
PIPELINE = """
import json, os, time
os.environ["RAY_DATA_MIN_GAP_BETWEEN_AUTOSCALING_REQUESTS"] = "1"
import ray
from ray_on_ecs.node import demand

labels = {"ray.io/node-group": "cpu-workers"}
context = ray.init(
    address="local", num_cpus=2, num_gpus=0, labels=labels, include_dashboard=False, log_to_driver=False
)

def prepare(batch):
    time.sleep(0.2)
    return batch

def cpus():
    found = demand.read(context.address_info["gcs_address"], with_cpus).needs["cpu-workers"]
    return found.available, found.requested

rows = iter(ray.data.range(2000, override_num_blocks=2000).map_batches(prepare).iter_rows())
while cpus()[1] <= 2:
    next(rows)
print(json.dumps(cpus()), flush=True)
rows.close()
while cpus()[1]:
    time.sleep(0.1)
print(json.dumps(cpus()), flush=True)
"""


# Waits on a Ray without CPUs for the workers of each config until Ray has the requests; prints them after Ray has
# dropped them.
WAITS = """
import json, os, sys, time
from ray_on_ecs.command import RAY_SETTINGS
os.environ.update(RAY_SETTINGS)
import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray_on_ecs.run import ray_cluster
from ray_on_ecs.config import RunConfig

class Known(Exception):
    pass

gcs = ray.init(address="local", num_cpus=0, include_dashboard=False).address_info["gcs_address"]

def asked():
    groups = get_cluster_status(gcs).resource_demands.placement_group_demand
    return [[each.bundle, each.count] for group in groups for each in group.bundles_by_count]

def nodes():
    if asked():
        raise Known(asked())
    return []

ray_cluster.alive_nodes, ray_cluster.POLL_SECONDS = nodes, 0.1
for settings in json.loads(sys.argv[1]):
    try:
        ray_cluster.wait_for_workers(RunConfig(**settings), 600.0)
    except Known as known:
        while asked():
            time.sleep(0.1)
        print(json.dumps(known.args[0]))
"""


def test_resource_requests_end_with_the_wait(environment: dict[str, str]) -> None:
    configs = [{"num_workers": 3}, {}, {"num_workers": 2, "device": "cpu"}]
    done = _run(WAITS, json.dumps(configs), environment=environment)
    gpu, cpu = {"CPU": 1, "GPU": 1}, {"CPU": 1}
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [[[gpu, 3]], [[gpu, 1]], [[cpu, 2]]]
    assert "autoscaler" not in done.stdout + done.stderr, "Ray would call it an error"


@pytest.fixture(scope="module")
def with_gpus(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The lines of `REPORTS` and `USES`."""
    node = {**TOKEN, **ports.METRICS, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(REPOSITORY / "docker")}
    return lines_of(SHOW + REPORTS + USES, str(tmp_path_factory.mktemp("uses")), environment={**environment, **node})


def test_ray_reports_total_used_and_pending_resources(with_gpus: list[Any]) -> None:
    total, is_in_use_before, waiting, used, is_in_use, free, is_just_idle, released, requested, node = with_gpus[:10]
    nothing = {"requested": 0, "available": 2, "used": 0, "in_use": 0, "cpus": 0}
    assert total == nothing
    assert waiting == {**nothing, "requested": 8, "cpus": 3}, "a pending placement group"
    assert used == {**nothing, "requested": 2, "used": 1, "in_use": 1}, "actors, of which one waits"
    assert (is_in_use_before, is_in_use) == ([False], [True]), "whether the node is in use"
    assert (free, is_just_idle, released) == (nothing, [True], [None]), "after the end of a run that stops its workers"
    assert requested == {**nothing, "requested": 3, "cpus": 2}, "requests of a program, without ended tasks"
    assert node == ["ALIVE", []], "the dashboard needs no Prometheus server"


def test_gpus_of_plain_ray_programs_count(with_gpus: list[Any]) -> None:
    assert with_gpus[10:] == [
        ["an actor", 1, 1],
        ["and actors that wait", 2, 4],
        ["nothing", 0, 0],
        ["a task", 1, 1],
        ["nothing", 0, 0],
        ["a task on CPUs alone", 1, 1],
        ["nothing", 0, 0],
        ["STRICT_PACK", 2, 2],
        ["nothing", 0, 0],
        ["SPREAD", 2, 2],
        ["nothing", 0, 0],
        ["a trainer", 2, 2],
        ["nothing", 0, 0],
    ]


def test_gpus_are_needed_by_a_cluster_without_any(environment: dict[str, str], tmp_path: Path) -> None:
    node = {**environment, **TOKEN, "PYTHONPATH": str(REPOSITORY / "docker")}
    assert lines_of(SHOW + WANTS, str(tmp_path), environment=node) == [
        ["STRICT_PACK", 0, 3],
        ["nothing", 0, 0],
        ["STRICT_SPREAD", 0, 3],
        ["nothing", 0, 0],
        ["an actor", 0, 2],
        ["nothing", 0, 0],
        ["a trainer", 0, 3],
        ["and two trials", 0, 7],
    ]


def test_requests_count_for_the_pool_that_they_select(environment: dict[str, str]) -> None:
    info = workers(
        workers=node_group(),
        workers_b=node_group(zone="us-west-2b"),
        cpu_workers=cpu_group(),
        h100_workers=node_group("h100", "p5.48xlarge", units=8),
    )
    node = {**environment, **TOKEN, "PYTHONPATH": str(REPOSITORY / "docker")}
    assert lines_of(SHOW + SELECTS, json.dumps(info), environment=node) == [
        [{"cpu-workers": 3, "h100-workers": 3, "workers-b": 1}, ["1 GPU, 1 CPU and ray.io/accelerator-type in (L4)"]],
        [{"cpu-workers": 5, "h100-workers": 8, "workers-b": 1}, []],
    ]


def test_ray_data_requests_cpus_until_it_ends(environment: dict[str, str]) -> None:
    node = {**environment, **TOKEN, "PYTHONPATH": str(REPOSITORY / "docker")}
    [(there, needed), afterwards] = lines_of(PIPELINE, environment=node)
    assert there == 2
    assert needed > 2, "the existing CPU workers are too few"
    assert afterwards == [2, 0], "a remaining request would keep idle CPU workers"


def lines_of(script: str, *arguments: str, environment: dict[str, str]) -> list[Any]:
    """Lines that a script prints, as JSON; it has the variables of `STACKS`."""
    lines = _run(STACKS + script, *arguments, environment=environment).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith(("{", "["))]


def _run(script: str, *arguments: str, environment: dict[str, str]) -> Run:
    command = [sys.executable, "-c", script, *arguments]
    environment = environment | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}  # Ray may claim more than there are
    for _ in range(STARTS):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        if "timed out during startup" not in done.stderr:  # Ray waits for 30 s, which a busy machine may need
            break
    assert done.returncode == 0, done.stderr
    return done
