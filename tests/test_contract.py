"""Values that infra/, docker/ and training/ share without importing each other."""

import copy
import dataclasses
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from infra.definitions import commands, containers, policies
from infra.definitions.sizing import GPUS_TOO_OLD, TaskSize
from ray_on_ecs.cli.recipe import RECIPES
from ray_on_ecs.cluster import clusters as laptop
from ray_on_ecs.cluster import jobs as client
from ray_on_ecs.config import RunConfig, defaults_in
from ray_on_ecs.contract import (
    CLUSTERS_PREFIX,
    CPU_POOL,
    DASHBOARD_URL,
    DEFAULT_POOL,
    DOCUMENTS_VARIABLE,
    GPUS,
    NODE_GROUP_VARIABLE,
    NOTEBOOK_PORT,
    RUNS_PREFIX,
    WORKER_TIMEOUT,
    secrets_prefix,
)
from ray_on_ecs.flags import ENVIRONMENT_PREFIX, environment_variable
from ray_on_ecs.jobs import remote
from ray_on_ecs.jobs.documents import REQUESTS
from ray_on_ecs.node import desk, ports
from tests.containers import cluster
from tests.infra.fake_aws import instance_types

ROOT = Path(__file__).parents[1]
LAPTOP = laptop.COMPOSE.rpartition("/")[2]
SIZE = TaskSize(vcpus=4, memory_mib=14336, gpus=1)
COMMON = containers.ContainerDefaults(
    image="i",
    log_group="l",
    region="us-west-2",
    token_arn="arn",
    secrets_prefix=secrets_prefix(LAPTOP),
    size=SIZE,
)
HEAD = containers.head(
    COMMON, bucket="bucket", cluster="dev", metrics_namespace="ray-on-ecs/dev", cluster_info_parameter="cluster-info"
)
WORKER = containers.worker(COMMON, head_host="head.internal", pool=DEFAULT_POOL)
# The size of containers on a laptop and in tests/containers: without a GPU, and small enough for three.
LOCAL = dataclasses.replace(COMMON, region="us-east-1", size=cluster.SIZE)
ONLY_LOCAL = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
JOB_PACKAGES = {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]}
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]


def variables(container: containers.Container) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["environment"]}


@pytest.mark.parametrize("container", [HEAD, WORKER], ids=["head", "worker"])
def test_container_executables_are_in_the_image(container: containers.Container) -> None:
    for executable in (container["command"][0], container["healthCheck"]["command"][1]):
        assert executable in PROJECT["scripts"], f"the task would not start: {executable} is not installed"
        module, _, function = PROJECT["scripts"][executable].partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("container", [HEAD, WORKER], ids=["head", "worker"])
def test_user_and_volumes_match_the_image(container: containers.Container) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"--uid {container['user'].partition(':')[0]} " in dockerfile, "the volumes would have another owner"
    declared = re.search(r"^VOLUME (.*)$", dockerfile, flags=re.MULTILINE)
    assert declared is not None
    mounted = [mount["containerPath"] for mount in own_mounts(container) if not kept(mount)]
    assert mounted == json.loads(declared[1]), "ECS would give root a volume that the image doesn't declare"
    for mount in filter(kept, own_mounts(container)):
        assert f"install --directory --owner=ray --group=ray {mount['containerPath']}\n" in dockerfile, (
            "the head could not write its state"
        )


def own_mounts(container: containers.Container) -> list[dict[str, Any]]:
    """Its writable volumes; the others belong to the instance."""
    return [mount for mount in container["mountPoints"] if not mount.get("readOnly")]


def kept(mount: dict[str, str]) -> bool:
    """Return whether the volume outlives its task."""
    return mount["sourceVolume"] == containers.STATE_VOLUME


def test_head_variables_set_job_defaults() -> None:
    given = {name: value for name, value in variables(HEAD).items() if name.startswith(ENVIRONMENT_PREFIX)}
    read = {environment_variable(name) for name in ("cloudwatch_namespace", "storage_path", "worker_timeout")}
    assert given.keys() == read, "a variable that the job doesn't read does nothing"
    job = RunConfig(**defaults_in(given))
    assert job.storage_path == f"s3://bucket/{RUNS_PREFIX}"
    assert job.cloudwatch_namespace == "ray-on-ecs/dev"
    assert job.worker_timeout == WORKER_TIMEOUT, "new instances for a job take minutes"


def test_preprocessing_requests_cpu_workers_by_their_label() -> None:
    cpu_worker = variables(containers.worker(COMMON, head_host="head.internal", pool=CPU_POOL))
    example = (ROOT / "training" / "preprocess.py").read_text()
    assert f'"ray.io/node-group", "{cpu_worker[NODE_GROUP_VARIABLE]}"' in example, "its data would wait forever"


def test_gpus_have_the_names_of_ec2() -> None:
    for name, facts in instance_types().items():
        gpus = [gpu["Name"] for gpu in facts.get("GpuInfo", {}).get("Gpus", []) if gpu["Manufacturer"] == "NVIDIA"]
        if gpus and "x86_64" in facts["ProcessorInfo"]["SupportedArchitectures"] and gpus[0] not in GPUS_TOO_OLD:
            assert GPUS[name.partition(".")[0]] == gpus[0]


def test_every_port_is_documented() -> None:
    document = (ROOT / "docs" / "design" / "nodes.md").read_text()
    rows = re.findall(r"^\| (\d{4,5})(?: to (\d+))? \| (head|both) \|", document, flags=re.MULTILINE)
    assert {int(port) for row in rows for port in row[:2] if port} == {*ports.HEAD.values(), *ports.NODE.values()}


def test_train_command_requests_one_worker_per_gpu() -> None:
    match = re.search(r"\$c ray-on-ecs run (.*)$", commands.train(8))
    assert match is not None
    assert match[1] == "ray_train_ddp.py --num-workers 8 --use-gpu"


def test_packaged_jobs_are_in_the_working_directory() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert "WORKDIR /home/ray/training\n" in dockerfile
    [copied] = re.findall(r"^COPY --chown=ray (.*) /home/ray/training/$", dockerfile.replace("\\\n", ""), re.MULTILINE)
    assert copied.split() == sorted(f"training/{name}.py" for name in RECIPES)


# Only on the stack: names, the one container, the log driver, instance metadata, pools with their metrics, and GPUs.
NOT_COMPOSE = {
    "CLOUDWATCH_NAMESPACE", "CLUSTER_INFO", "INSTANCE_FILE", "name", "essential", "image", "secrets",
    "logConfiguration", "resourceRequirements",
}  # fmt: skip
COMPOSED = {
    "command", "dockerSecurityOptions", "environment", "healthCheck", "linuxParameters", "memory", "mountPoints",
    "readonlyRootFilesystem", "stopTimeout", "ulimits", "user",
}  # fmt: skip


def as_compose(container: containers.Container) -> dict[str, Any]:
    """A container definition in Compose's format."""
    linux, health = container["linuxParameters"], container["healthCheck"]
    assert set(container) <= COMPOSED | NOT_COMPOSE, "compose.yaml must have it, too"
    assert set(linux) == {"initProcessEnabled", "sharedMemorySize", "capabilities"}
    assert set(linux["capabilities"]) == {"drop"}
    seconds = {"interval": health["interval"], "timeout": health["timeout"], "start_period": health["startPeriod"]}
    return {
        "command": container["command"],
        "init": linux["initProcessEnabled"],
        "user": container["user"],
        "read_only": container["readonlyRootFilesystem"],
        "cap_drop": linux["capabilities"]["drop"],
        "security_opt": container["dockerSecurityOptions"],
        "volumes": [
            f"{mount['sourceVolume']}:{mount['containerPath']}" if kept(mount) else mount["containerPath"]
            for mount in own_mounts(container)
        ],
        "mem_limit": f"{container['memory']}m",
        "shm_size": f"{linux['sharedMemorySize']}m",
        "ulimits": {
            limit["name"]: {"soft": limit["softLimit"], "hard": limit["hardLimit"]} for limit in container["ulimits"]
        },
        "stop_grace_period": f"{container['stopTimeout']}s",
        "healthcheck": {
            "test": health["command"],
            "retries": health["retries"],
            **{name: f"{value}s" for name, value in seconds.items()},
        },
        "environment": {name: value for name, value in variables(container).items() if name not in NOT_COMPOSE},
    }


@pytest.mark.parametrize(
    ("service", "container"),
    [
        (
            "head",
            containers.head(
                LOCAL,
                bucket="training",
                cluster=LAPTOP,
                metrics_namespace=f"ray-on-ecs/{LAPTOP}",
                cluster_info_parameter="cluster-info",
            ),
        ),
        ("worker", containers.worker(LOCAL, head_host="head", pool=DEFAULT_POOL)),
    ],
    ids=["head", "worker"],
)
def test_compose_containers_match_the_stack(service: str, container: containers.Container) -> None:
    local = copy.deepcopy(COMPOSE[service])
    secret = {secret["name"] for secret in container["secrets"]}
    for name in {*ONLY_LOCAL, *secret}:
        del local["environment"][name]
    del local["healthcheck"]["start_interval"]  # ECS has none; it shortens the wait on a laptop
    expected = as_compose(container)
    assert {name: local[name] for name in expected} == expected, "the laptop would run other containers than AWS"


def test_compose_keeps_the_head_state() -> None:
    volumes = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["volumes"]
    assert list(volumes) == [containers.STATE_VOLUME]


def test_laptop_finds_the_ports_of_compose() -> None:
    dashboard, s3 = (address.rpartition(":")[2] for address in (DASHBOARD_URL, laptop.COMPOSE_S3))
    assert f"127.0.0.1:{dashboard}:8265" in COMPOSE["head"]["ports"]
    assert f"127.0.0.1:{s3}:5000" in COMPOSE["s3"]["ports"]
    assert f"127.0.0.1:{laptop.COMPOSE_PORTS[NOTEBOOK_PORT]}:{NOTEBOOK_PORT}" in COMPOSE["head"]["ports"]
    environment = COMPOSE["head"]["environment"]
    assert environment["RAY_AUTH_TOKEN"] == "${RAY_AUTH_TOKEN:?make docker/.env writes a token}"
    assert environment["RAY_ON_ECS_STORAGE_PATH"] == laptop.ComposeCluster().storage_path
    assert environment[DOCUMENTS_VARIABLE] == laptop.COMPOSE


def test_compose_trains_like_the_train_command() -> None:
    submitted = re.search(r"\$c (ray-on-ecs .*)$", commands.train(2))
    assert submitted is not None
    assert COMPOSE["train"]["command"].startswith(f"{submitted[1].removesuffix(' --use-gpu')} "), "it is on CPUs"
    assert COMPOSE["train"]["environment"][laptop.CLUSTER_VARIABLE] == laptop.COMPOSE


def test_lost_run_is_resubmitted_before_its_follower_stops() -> None:
    assert desk.POLL_SECONDS < client.RESUBMISSION_SECONDS / 2


def test_head_writes_its_state_before_it_counts_as_silent() -> None:
    assert desk.STATE_SECONDS < remote.SILENT_SECONDS / 3


def test_image_lock_has_the_versions_of_the_project() -> None:
    lock = (ROOT / "docker" / "requirements.lock").read_text()
    pins = {re.sub(r"\[.*\]", "", each) for each in JOB_PACKAGES if "==" in each}
    assert pins
    assert all(f"\n{pin} " in f"\n{lock}" for pin in pins), "make lock has not been run"
    assert locked(ROOT / "docker" / "requirements.lock")


def locked(file: Path) -> dict[str, str]:
    """The version of each package in a lock file, all of which have hashes."""
    requirements = re.findall(r"^[a-z0-9-]+==.*?(?=^[a-z0-9-]+==|\Z)", file.read_text(), re.MULTILINE | re.DOTALL)
    assert all("--hash=sha256:" in requirement for requirement in requirements), "a package could be exchanged"
    return dict(requirement.split()[0].split("==") for requirement in requirements)


def test_program_lock_satisfies_its_requirements() -> None:
    lock, required = locked(ROOT / "requirements.txt"), (ROOT / "requirements.in").read_text().splitlines()
    for each in map(Requirement, required):
        assert each.specifier.contains(lock[each.name]), f"{each}: make lock has not been run"


def test_locks_agree() -> None:
    image, program = (locked(ROOT / each) for each in ("docker/requirements.lock", "requirements.txt"))
    for name in image.keys() & program.keys():
        assert image[name] == program[name], f"{name}: one environment has both; run make lock"


def test_token_authentication_is_on_everywhere() -> None:
    for service in ("head", "worker"):
        assert COMPOSE[service]["environment"]["RAY_AUTH_MODE"] == "token"
    assert variables(HEAD)["RAY_AUTH_MODE"] == variables(WORKER)["RAY_AUTH_MODE"] == "token"


# Actions of calls whose names differ, and calls without an action.
ACTIONS = {"s3:HeadBucket": "s3:ListBucket", "s3:ListObjectsV2": "s3:ListBucket", "service-quotas": "servicequotas"}
FREE = {"sts:GetCallerIdentity"}


def allowed_by(policy: str) -> tuple[list[dict[str, Any]], set[str]]:
    """The statements of a policy for people, and all of its actions."""
    statements = json.loads((ROOT / "docs" / "policies" / f"{policy}.json").read_text())["Statement"]
    actions = [
        [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]
        for statement in statements
    ]
    return statements, {action for each in actions for action in each}


# Looks of a command alone, and of a driver alone, which does not know the services' names.
OF_COMMANDS = {"cloudwatch:DescribeAlarms", "application-autoscaling:DescribeScalableTargets"}
OF_DRIVERS = {"ecs:ListServices"}


def looks_at_nodes() -> set[str]:
    """The actions of the looks at nodes that do not start."""
    source = "".join(path.read_text() for path in (ROOT / "ray_on_ecs").rglob("*.py"))
    calls = re.findall(r'\.listed\(\s*"([\w-]+)", "(\w+)"', source)
    calls += [("ecs", method) for method in re.findall(r'\._described\("(\w+)"', source)]
    return {f"{service}:{''.join(word.title() for word in method.split('_'))}" for service, method in calls}


def test_policy_of_the_head_allows_its_looks_at_nodes() -> None:
    cluster = "arn:aws:ecs:us-west-2:123456789012:cluster/ray"
    statements = policies.training(
        partition="aws", bucket_arn="arn:aws:s3:::b", parameter_arn="arn:p", cluster_arn=cluster
    )["Statement"]
    allowed = {action for statement in statements for action in statement["Action"]}
    looks = looks_at_nodes() - OF_COMMANDS
    assert looks <= allowed
    assert {action for action in allowed if action.startswith("ecs:")} <= looks


def test_policies_of_trainers_allow_the_calls_of_the_cli() -> None:
    (statements, allowed), (sessions, of_sessions) = allowed_by("trainer"), allowed_by("sessions")
    called = set()
    for path in (ROOT / "ray_on_ecs").rglob("*.py"):
        text = path.read_text()
        calls = re.findall(r'\bcall\(\s*[\w.]*stack,\s*"([\w-]+)",\s*"(\w+)"', text)
        for service, method in [*calls, *re.findall(r'\bask\("(ec2)", "(\w+)"', text)]:
            action = f"{ACTIONS.get(service, service)}:{''.join(word.title() for word in method.split('_'))}"
            called.add(ACTIONS.get(action, action))
    assert called, "the calls are written in another way"
    called |= looks_at_nodes() - OF_DRIVERS
    assert called - FREE <= allowed | of_sessions
    assert (called - FREE) & of_sessions - allowed == {"ssm:StartSession", "ssm:TerminateSession"}
    [of_status] = [set(statement["Action"]) for statement in statements if statement["Sid"] == "StatusAndDoctor"]
    assert of_status <= called
    stored = [statement for statement in statements if secrets_prefix("CLUSTER") in str(statement["Resource"])]
    assert [each["Action"] for each in stored] == [[policies.DELETE_PARAMETERS, policies.PUT_PARAMETER]]
    assert not any("StartSession" in action for action in allowed), "that is a shell on the head"
    [own] = [statement["Resource"] for statement in statements if statement["Sid"] == "OwnRequests"]
    assert own == "arn:aws:s3:::BUCKET/" + "/".join([CLUSTERS_PREFIX, "CLUSTER", REQUESTS, "${aws:userid}", "*"])
    documents = [session for session in sessions if ":document/" in str(session["Resource"])]
    assert [document["Resource"] for document in documents] == [
        "arn:aws:ssm:REGION:ACCOUNT:document/ray-on-ecs-sessions-*"
    ]
