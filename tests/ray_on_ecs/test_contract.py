"""Values of infra/ that Ray must know, and those that ray_on_ecs shares with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.definitions import containers
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.node import desk, ports
from ray_on_ecs.run.driver import STORE_SECONDS
from ray_on_ecs.run.supervisor import GRACE_SECONDS, KILL_SECONDS
from tests.test_contract import HEAD, WORKER


@pytest.mark.parametrize("container", [HEAD, WORKER], ids=["head", "worker"])
def test_flags_of_ray_start_exist_in_this_ray(container: containers.Container, ray_flags: str) -> None:
    flags = [argument.partition("=")[0] for argument in container["command"][1:]]
    for flag in {*flags, *ports.HEAD, *ports.NODE}:
        assert f"{flag} " in ray_flags, f"ray start would refuse {flag}"


@pytest.fixture(scope="session")
def ray_flags() -> str:
    ray = Path(sys.executable).with_name("ray")
    return subprocess.run([ray, "start", "--help"], capture_output=True, text=True, check=True).stdout


def test_stop_leaves_time_to_end_and_store() -> None:
    assert min(MachineJobs.stop_seconds, desk.STOP_SECONDS) > GRACE_SECONDS + KILL_SECONDS + STORE_SECONDS
    assert desk.STOP_SECONDS + containers.HEAD_DRAIN_SECONDS < containers.HEAD_STOP_SECONDS
    assert RemoteJobs.stop_seconds > desk.STOP_SECONDS
