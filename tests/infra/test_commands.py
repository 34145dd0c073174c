"""The exported commands: one shell line each, which a shell takes apart as meant."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from infra.definitions import commands


def test_the_train_command_submits_the_job_in_the_heads_container() -> None:
    assert commands.train(2).endswith("sudo docker exec -it $c ray-on-ecs run --num-workers 2 image_classifier.py"), (
        "a job that is submitted to Ray outlives the session, and waits for the GPUs that the stack has"
    )


def test_a_session_is_one_of_this_region_instance_and_document() -> None:
    assert shlex.split(commands.session("us-west-2", "i-1", "train-1a2b3c4")) == [
        *("aws", "ssm", "start-session", "--region", "us-west-2", "--target", "i-1"),
        *("--document-name", "train-1a2b3c4"),
    ], "another default region or target would reach nothing"


def test_the_train_command_waits_for_a_head_that_still_pulls_its_image(tmp_path: Path) -> None:
    script = commands.train(2)
    stubs = {
        "docker": 'echo "docker $*" >>calls; [ "$1" = exec ] || [ ! -e slept ] || echo 0af1',
        "sudo": '"$@"',
        "sleep": "touch slept",
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True)
    assert done.stdout == "waiting for the Ray head to start\n", "someone who waits is told for what"
    *looks, last = (tmp_path / "calls").read_text().splitlines()
    find = "docker ps -qf label=com.amazonaws.ecs.container-name=ray-head -f health=healthy"
    assert looks == [find, find], "an empty ID would make docker look for a container named ray"
    assert last == "docker exec -it 0af1 ray-on-ecs run --num-workers 2 image_classifier.py"


def test_without_gpus_the_job_keeps_its_own_number_of_workers() -> None:
    assert "--num-workers" not in commands.train(0), "0 workers are none that train"


def test_a_document_runs_one_command_and_takes_no_other() -> None:
    document = commands.interactive("Shell", commands.SHELL)
    find = "sudo docker ps -qf label=com.amazonaws.ecs.container-name=ray-head -f health=healthy"
    assert document["properties"] == {
        "linux": {"commands": f"sudo docker exec -it $({find}) bash", "runAsElevated": False}
    }
    assert "parameters" not in document, "a caller who may type a command is root on the instance"
    assert (document["schemaVersion"], document["sessionType"]) == ("1.0", "InteractiveCommands")


@pytest.mark.parametrize(
    ("parameter", "value", "is_allowed"),
    [
        ("portNumber", "8265", True),
        ("portNumber", "8888", True),
        ("portNumber", "22", False),
        ("portNumber", "6379", False),
        ("host", "head.ray-dev-c0ffee.internal", True),
        ("host", "10.0.12.7", True),
        ("host", "$(reboot)", False),
        ("localPortNumber", "0", True),
        ("localPortNumber", "8265", True),
        ("localPortNumber", "8265; reboot", False),
    ],
)
def test_only_ports_of_the_dashboard_and_of_jupyter_are_forwarded(parameter: str, value: str, is_allowed: bool) -> None:
    document = commands.forwarding()
    assert bool(re.search(document["parameters"][parameter]["allowedPattern"], value)) == is_allowed
    assert document["properties"][parameter] == f"{{{{ {parameter} }}}}"
    assert (document["sessionType"], document["properties"]["type"]) == ("Port", "LocalPortForwarding")


def test_the_dashboard_command_forwards_its_port_from_the_heads_own_address() -> None:
    words = shlex.split(commands.dashboard("us-west-2", "i-1", "head.x.internal", "forward-1a2b3c4"))
    assert words[words.index("--document-name") + 1] == "forward-1a2b3c4"
    parameters = json.loads(words[words.index("--parameters") + 1])
    assert parameters == {"host": ["head.x.internal"], "portNumber": ["8265"], "localPortNumber": ["8265"]}, (
        "the port is open on the task's network interface, not on the instance's"
    )
    assert all(
        re.search(commands.forwarding()["parameters"][name]["allowedPattern"], value)
        for name, [value] in parameters.items()
    )


def test_the_token_command_reads_the_parameter_in_the_clear() -> None:
    assert shlex.split(commands.token("us-west-2", "auth-1")) == [
        *("aws", "ssm", "get-parameter", "--region", "us-west-2", "--name", "auth-1", "--with-decryption"),
        *("--query", "Parameter.Value", "--output", "text"),
    ], "without decryption the dashboard would be given ciphertext"


def test_every_command_is_one_line() -> None:
    made = [commands.session("r", "i", "d"), commands.dashboard("r", "i", "h", "d"), commands.token("r", "p")]
    assert all("\n" not in command for command in made), "a line break ends the command when it is pasted"
