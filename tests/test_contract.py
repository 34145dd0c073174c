"""What infra/, docker/ and training/ agree on without importing each other."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import commands, containers
from infra.policies import RUNS_PREFIX
from infra.sizing import TaskSize
from training.config import ENVIRONMENT_PREFIX, environment_variable, parse

ROOT = Path(__file__).parents[1]
SIZE = TaskSize(vcpus=4, memory_mib=14336, gpus=1)
COMMON: dict[str, Any] = {"image": "i", "log_group": "l", "region": "us-west-2", "token_arn": "arn", "size": SIZE}
HEAD = containers.head(**COMMON, bucket="bucket")
WORKER = containers.worker(**COMMON, head_host="head.internal")
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]


def variables(container: containers.Container) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["environment"]}


def entrypoint(name: str) -> str:
    return (ROOT / "docker" / name).read_text()


@pytest.mark.parametrize("container", [HEAD, WORKER], ids=["head", "worker"])
def test_what_a_container_runs_is_in_the_image(container: containers.Container) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    for executable in (container["command"][0], container["healthCheck"]["command"][1]):
        assert f"docker/{executable}" in dockerfile, f"the task would not start: {executable} is not copied"
        assert os.access(ROOT / "docker" / executable, os.X_OK), f"{executable} can't be run"


@pytest.mark.parametrize("container", [HEAD, WORKER], ids=["head", "worker"])
def test_what_is_handed_to_ray_start_is_a_flag_of_this_ray(container: containers.Container, ray_flags: str) -> None:
    given = [argument.partition("=")[0] for argument in container["command"][1:]]
    own = re.findall(r"--[a-z-]+", "".join(map(entrypoint, container["command"][:1])))
    for flag in {*given, *own}:
        assert flag in ray_flags, f"ray start would refuse {flag}"


def test_the_image_fixes_ports_by_flags_of_this_ray(ray_flags: str) -> None:
    node_flags = (ROOT / "docker" / "Dockerfile").read_text().partition("RAY_NODE_FLAGS=")[2]
    flags = re.findall(r"--[a-z-]+(?==\d)", node_flags)
    assert len(flags) == 8, "every port of a node is fixed"
    assert all(flag in ray_flags for flag in flags)


@pytest.fixture(scope="session")
def ray_flags() -> str:
    ray = Path(sys.executable).with_name("ray")
    return subprocess.run([ray, "start", "--help"], capture_output=True, text=True, check=True).stdout


def test_the_training_defaults_of_the_head_are_settings_of_the_job() -> None:
    given = {name: value for name, value in variables(HEAD).items() if name.startswith(ENVIRONMENT_PREFIX)}
    assert list(given) == [environment_variable("storage_path")], "a variable that the job doesn't read does nothing"
    assert parse([], given).storage_path == f"s3://bucket/{RUNS_PREFIX}", "the job writes where its role may"


def test_workers_are_told_the_head_by_the_variable_that_they_read() -> None:
    assert "RAY_HEAD_HOST" in variables(WORKER)
    assert "RAY_HEAD_HOST" in entrypoint("ray-worker")


def test_the_ports_are_the_same_on_both_ends() -> None:
    port = re.search(r"--port=(\d+)", entrypoint("ray-head"))
    assert port is not None
    assert f"$RAY_HEAD_HOST:{port[1]}" in entrypoint("ray-worker"), "workers would knock at another port"
    assert f"--dashboard-port={containers.DASHBOARD_PORT}" in entrypoint("ray-head"), "the forwarded port is the one"


def test_the_train_command_runs_the_job_of_this_repository() -> None:
    found = re.search(r"ray job submit -- python -m (\w+)([^\"]*)", commands.train("us-west-2", 8, "i-1"))
    assert found is not None
    assert (ROOT / found[1] / "__main__.py").is_file(), f"python -m {found[1]} would not run"
    assert parse(found[2].split(), {}).num_workers == 8, "a worker on each GPU of the stack"


@pytest.mark.parametrize(("service", "container"), [("head", HEAD), ("worker", WORKER)])
def test_compose_starts_what_the_stack_starts(service: str, container: containers.Container) -> None:
    local = COMPOSE[service]
    assert local["command"][0] == container["command"][0]
    assert local["healthcheck"]["test"] == container["healthCheck"]["command"]
    secret = {each["name"] for each in container["secrets"]}
    missing = {*variables(container), *secret} - set(local["environment"]) - {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"}
    assert not missing, f"the laptop's cluster lacks {missing}"


def test_the_lock_holds_the_versions_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = (ROOT / "docker" / "requirements.lock").read_text()
    pins = [re.sub(r"\[.*\]", "", each) for each in project["dependencies"] if "==" in each]
    assert len(pins) == 3, "ray, torch and torchvision are exact"
    assert all(f"\n{pin} " in f"\n{lock}" for pin in pins), "make lock has not been run"
    requirements = re.findall(r"^[a-z0-9-]+==.*?(?=^[a-z0-9-]+==|\Z)", lock, flags=re.MULTILINE | re.DOTALL)
    assert all("--hash=sha256:" in each for each in requirements), "what ends up in the image is locked by hash"


def test_token_authentication_is_on_everywhere() -> None:
    for service in ("head", "worker"):
        assert COMPOSE[service]["environment"]["RAY_AUTH_MODE"] == "token"
    assert variables(HEAD)["RAY_AUTH_MODE"] == variables(WORKER)["RAY_AUTH_MODE"] == "token"
