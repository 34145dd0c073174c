"""`ray-on-ecs shell` on a stack: a session of the document that enters the head's container."""

from tests.ray_on_ecs.cli.account import Laptop


def test_shell_enters_the_running_head_container(stack: Laptop) -> None:
    done = stack.run("shell")
    assert done.returncode == 0, done.stderr
    document, head = stack.outputs["shell_document"], stack.outputs["head_instance_id"]
    assert done.stdout.strip() == f"a shell by {document} on {head}"


def test_exit_status_is_from_the_session(stack: Laptop) -> None:
    assert stack.run("shell", AWS_STAND_IN_REFUSES="TargetNotConnected").returncode == 254
