"""The exported commands: one shell line each, which a shell takes apart as meant."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

from infra.definitions import commands


def parsed(command: str) -> tuple[list[str], dict[str, list[str]]]:
    """The words of a session command, and its parameters as the AWS CLI reads them."""
    words = shlex.split(command)
    return words, json.loads(words[words.index("--parameters") + 1])


def test_the_train_command_submits_the_job_in_the_heads_container() -> None:
    command = commands.train("us-west-2", 2, "i-1")
    words, parameters = parsed(command)
    assert words[:7] == ["aws", "ssm", "start-session", "--region", "us-west-2", "--target", "i-1"], (
        "another default region or target would reach nothing"
    )
    assert words[words.index("--document-name") + 1] == "AWS-StartInteractiveCommand", "it runs one command and returns"
    (script,) = parameters["command"]
    assert script.endswith("sudo docker exec -it $c ray-on-ecs run --num-workers 2 image_classifier.py"), (
        "a job that is submitted to Ray outlives the session, and waits for the GPUs that the stack has"
    )


def test_the_train_command_waits_for_a_head_that_still_pulls_its_image(tmp_path: Path) -> None:
    (script,) = parsed(commands.train("us-west-2", 2, "i-1"))[1]["command"]
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
    assert "--num-workers" not in commands.train("us-west-2", 0, "i-1"), "0 workers are none that train"


def test_the_container_is_looked_up_on_the_instance_and_not_here() -> None:
    command = commands.train("us-west-2", 2, "i-1")
    before, _, quoted = command.partition("'")
    assert "$(" in quoted, "the container's ID is known on the instance alone"
    assert "$(" not in before, "the local shell would run docker here"


def test_the_shell_command_opens_one_in_the_heads_container() -> None:
    _, parameters = parsed(commands.shell("us-west-2", "i-1"))
    find = "sudo docker ps -qf label=com.amazonaws.ecs.container-name=ray-head -f health=healthy"
    assert parameters == {"command": [f"sudo docker exec -it $({find}) bash"]}


def test_the_dashboard_command_forwards_its_port_from_the_heads_own_address() -> None:
    words, parameters = parsed(commands.dashboard("us-west-2", "i-1", "head.x.internal"))
    assert words[words.index("--document-name") + 1] == "AWS-StartPortForwardingSessionToRemoteHost", (
        "the port is open on the task's network interface, not on the instance's"
    )
    assert parameters == {"host": ["head.x.internal"], "portNumber": ["8265"], "localPortNumber": ["8265"]}


def test_the_token_command_reads_the_parameter_in_the_clear() -> None:
    assert shlex.split(commands.token("us-west-2", "auth-1")) == [
        *("aws", "ssm", "get-parameter", "--region", "us-west-2", "--name", "auth-1", "--with-decryption"),
        *("--query", "Parameter.Value", "--output", "text"),
    ], "without decryption the dashboard would be given ciphertext"


def test_every_command_is_one_line() -> None:
    made = [commands.train("r", 2, "i"), commands.dashboard("r", "i", "h"), commands.token("r", "p")]
    assert all("\n" not in command for command in made), "a line break ends the command when it is pasted"
