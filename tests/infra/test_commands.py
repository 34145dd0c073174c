"""The exported commands: one shell line each, which a shell takes apart as meant."""

from __future__ import annotations

import json
import shlex

from infra import commands


def parsed(command: str) -> tuple[list[str], dict[str, list[str]]]:
    """The words of a session command, and its parameters as the AWS CLI reads them."""
    words = shlex.split(command)
    return words, json.loads(words[words.index("--parameters") + 1])


def test_the_train_command_submits_the_job_in_the_heads_container() -> None:
    command = commands.train("us-west-2", "i-1")
    words, parameters = parsed(command)
    assert words[:7] == ["aws", "ssm", "start-session", "--region", "us-west-2", "--target", "i-1"], (
        "another default region or target would reach nothing"
    )
    assert words[words.index("--document-name") + 1] == "AWS-StartInteractiveCommand", "it runs one command and returns"
    assert parameters == {
        "command": [
            "sudo docker exec -it $(sudo docker ps -qf label=com.amazonaws.ecs.container-name=ray-head)"
            " ray job submit -- python -m training"
        ]
    }, "a job that is submitted to Ray outlives the session"


def test_the_train_command_takes_more_arguments_after_the_module() -> None:
    longer = commands.train("us-west-2", "i-1").replace("python -m training", "python -m training --epochs 3")
    _, parameters = parsed(longer)
    assert parameters["command"][0].endswith("-- python -m training --epochs 3"), "the flags of the job follow its name"


def test_the_container_is_looked_up_on_the_instance_and_not_here() -> None:
    command = commands.train("us-west-2", "i-1")
    before, _, quoted = command.partition("'")
    assert "$(" in quoted, "the container's ID is known on the instance alone"
    assert "$(" not in before, "the local shell would run docker here"


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
    made = [commands.train("r", "i"), commands.dashboard("r", "i", "h"), commands.token("r", "p")]
    assert all("\n" not in command for command in made), "a line break ends the command when it is pasted"
