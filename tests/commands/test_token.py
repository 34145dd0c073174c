"""A run and its actors on a cluster with a token or without; test_cluster_token.py has all tokens of a process."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands.head import SECONDS, TOKEN, Head, commands, started
from tests.local_cluster import DIRECT

Join = Callable[[str, str], tuple[int, str]]
# Joins as a run does, and has an actor, which calls this process back.
JOIN = """
import os
import ray
from ray_on_ecs.command import RAY_SETTINGS
os.environ.update(RAY_SETTINGS)
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.run import ray_cluster

@ray.remote(num_cpus=0)
class Actor:
    def answer(self):
        return "joined"

try:
    ray_cluster.connect()
except TrainingError as error:
    print(type(error).__name__, error)
    raise SystemExit(error.exit_status)
print(ray.get(Actor.remote().answer.remote()))
"""


@pytest.fixture
def join(environment: dict[str, str], tmp_path: Path) -> Iterator[Join]:
    """Join a cluster with a token in Ray's file; return the exit status and the output."""
    with commands(DIRECT, environment, tmp_path) as start:

        def run(address: str, token: str) -> tuple[int, str]:
            (tmp_path / ".ray").mkdir()
            (tmp_path / ".ray" / "auth_token").write_text(token)
            process: subprocess.Popen[str] = start(code=JOIN, RAY_ADDRESS=address, HOME=str(tmp_path))
            out, err = process.communicate(timeout=SECONDS)
            assert not err, err  # Ray would print an error each second
            return process.returncode, out

        yield run


def test_refused_token_is_one_line(head: Head, join: Join) -> None:
    status, line = join(head.address, "another")
    assert status == 2
    assert line.startswith(f"UsageError ~/.ray/auth_token: is not the token of the Ray cluster at {head.address!r}")
    assert line.count("\n") == 1


def test_token_of_the_file_is_sent(head: Head, join: Join) -> None:
    assert join(head.address, f"{TOKEN['RAY_AUTH_TOKEN']}\n") == (0, "joined\n")


def test_cluster_without_a_token_gets_none(
    environment: dict[str, str], join: Join, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with started(environment, tmp_path_factory.mktemp("jobs"), token={"RAY_AUTH_MODE": "disabled"}) as head:
        assert join(head.address, "another") == (0, "joined\n")
