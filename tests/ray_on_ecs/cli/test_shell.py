"""`ray-on-ecs shell` on a stack: a session of the document that enters the head's container."""

import pytest

from tests.ray_on_ecs.cli.account import Laptop


def test_shell_enters_the_running_head_container(stack: Laptop, capfd: pytest.CaptureFixture[str]) -> None:
    assert stack.run("shell").returncode == 0
    document, head = stack.outputs["shell_document"], stack.outputs["head_instance_id"]
    assert capfd.readouterr().out.strip() == f"a shell by {document} on {head}"


def test_exit_status_is_from_the_session(stack: Laptop) -> None:
    assert stack.run("shell", AWS_STAND_IN_REFUSES="TargetNotConnected").returncode == 254
