"""Exported shell commands and session documents."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from infra.definitions import commands


def test_session_command_names_region_instance_and_document() -> None:
    assert shlex.split(commands.session("us-west-2", "i-1", "train-1a2b3c4")) == [
        *("aws", "ssm", "start-session", "--region", "us-west-2", "--target", "i-1"),
        *("--document-name", "train-1a2b3c4"),
    ]


def test_session_with_a_head_that_sleeps_looks_it_up(tmp_path: Path) -> None:
    stub = tmp_path / "aws"
    stub.write_text('#!/bin/sh\necho "$*" >>calls\n[ "$1" = ec2 ] && echo i-0abc || true\n')
    stub.chmod(0o755)
    target = commands.instance_of("us-west-2", "head-group-1a2b")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for command in (
        commands.session("us-west-2", target, "doc"),
        commands.dashboard("us-west-2", target, "head", "doc"),
    ):
        subprocess.run(["sh", "-c", command], cwd=tmp_path, env={"PATH": path}, check=True)
    look, session, again, forward = (tmp_path / "calls").read_text().splitlines()
    assert look == again
    assert look == (
        "ec2 describe-instances --region us-west-2 --filters Name=tag:aws:autoscaling:groupName,Values=head-group-1a2b"
        " Name=instance-state-name,Values=running --query Reservations[0].Instances[0].InstanceId --output text"
    )
    assert session == "ssm start-session --region us-west-2 --target i-0abc --document-name doc"
    assert forward.startswith(f"{session} --parameters ")


def test_wake_command_is_one_data_point() -> None:
    command = commands.wake("us-west-2", "ray-on-ecs/ray-dev-c0ffee")
    assert shlex.split(command) == [
        *("aws", "cloudwatch", "put-metric-data", "--region", "us-west-2", "--namespace", "ray-on-ecs/ray-dev-c0ffee"),
        *("--metric-name", "HeadRequested", "--value", "1", "--storage-resolution", "1"),
    ]


def test_train_command_waits_for_the_head(tmp_path: Path) -> None:
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
    assert done.stdout == "waiting for the Ray head to start\n"
    *looks, last = (tmp_path / "calls").read_text().splitlines()
    find = "docker ps -qf label=com.amazonaws.ecs.container-name=ray-head -f health=healthy"
    assert looks == [find, find]
    assert last == "docker exec -it 0af1 ray-on-ecs run ray_train_ddp.py --num-workers 2 --use-gpu"


def test_train_command_without_gpus_sets_no_workers() -> None:
    assert "--num-workers" not in commands.train(0)


def test_interactive_document_has_a_fixed_command() -> None:
    document = commands.interactive("Shell", commands.SHELL)
    find = "sudo docker ps -qf label=com.amazonaws.ecs.container-name=ray-head -f health=healthy"
    assert document["properties"] == {
        "linux": {"commands": f"sudo docker exec -it $({find}) bash", "runAsElevated": False}
    }
    assert "parameters" not in document
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
def test_forwarding_is_limited_to_dashboard_and_jupyter(parameter: str, value: str, is_allowed: bool) -> None:
    document = commands.forwarding()
    assert bool(re.search(document["parameters"][parameter]["allowedPattern"], value)) == is_allowed
    assert document["properties"][parameter] == f"{{{{ {parameter} }}}}"
    assert (document["sessionType"], document["properties"]["type"]) == ("Port", "LocalPortForwarding")


def test_dashboard_command_forwards_the_head_port() -> None:
    words = shlex.split(commands.dashboard("us-west-2", "i-1", "head.x.internal", "forward-1a2b3c4"))
    assert words[words.index("--document-name") + 1] == "forward-1a2b3c4"
    parameters = json.loads(words[words.index("--parameters") + 1])
    assert parameters == {"host": ["head.x.internal"], "portNumber": ["8265"], "localPortNumber": ["8265"]}
    assert all(
        re.search(commands.forwarding()["parameters"][name]["allowedPattern"], value)
        for name, [value] in parameters.items()
    )


def test_token_command_decrypts_the_parameter() -> None:
    assert shlex.split(commands.token("us-west-2", "auth-1")) == [
        *("aws", "ssm", "get-parameter", "--region", "us-west-2", "--name", "auth-1", "--with-decryption"),
        *("--query", "Parameter.Value", "--output", "text"),
    ]


def test_every_command_is_one_line() -> None:
    lines = [commands.session("r", "i", "d"), commands.dashboard("r", "i", "h", "d"), commands.token("r", "p")]
    assert all("\n" not in command for command in lines)
