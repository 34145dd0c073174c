"""`ray-on-ecs shell` on a stack: a command of the head's instance, which enters the container."""

from ray_on_ecs.contract import HEAD_CONTAINER
from tests.ray_on_ecs.cli.account import Laptop


def test_it_enters_the_container_of_the_head_that_runs(stack: Laptop) -> None:
    done = stack.run("shell")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"sudo docker exec -it $({HEAD_CONTAINER}) bash"


def test_its_exit_status_is_the_sessions(stack: Laptop) -> None:
    assert stack.run("shell", AWS_STAND_IN_REFUSES="TargetNotConnected").returncode == 254
