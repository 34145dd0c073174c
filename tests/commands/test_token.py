"""A cluster that wants another token than `python -m training` sends, or has none, is one line, and at once."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import head as heads
from tests.commands.conftest import Run
from tests.commands.head import SECONDS, TOKEN, Head

RIGHT, WRONG = TOKEN["RAY_AUTH_TOKEN"], "another"
MODE = {"RAY_AUTH_MODE": "token"}
TRAIN = ("--dataset", "synthetic", "--num-workers", "1")
# Joins as a run does, and has an actor, which calls this process back.
JOIN = """
import os
import ray
from ray_on_ecs.command import RAY_SETTINGS
os.environ.update(RAY_SETTINGS)
from ray_on_ecs.config import RunConfig
from ray_on_ecs.run import ray_cluster

@ray.remote(num_cpus=0)
class Actor:
    def answer(self):
        return "joined"

ray_cluster.connect(RunConfig())
print(ray.get(Actor.remote().answer.remote()))
"""


@pytest.fixture(scope="module")
def open_head(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head without a token."""
    with heads.started(environment, tmp_path_factory.mktemp("jobs"), token={"RAY_AUTH_MODE": "disabled"}) as head:
        yield head


@pytest.fixture
def home(tmp_path: Path) -> Callable[[str | None], dict[str, str]]:
    """A home with this token in Ray's file, or without the file."""

    def make(token: str | None) -> dict[str, str]:
        if token is not None:
            (tmp_path / ".ray").mkdir()
            (tmp_path / ".ray" / "auth_token").write_text(token)
        return {"HOME": str(tmp_path)}

    return make


@pytest.fixture
def join(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., None]:
    """Join a cluster, which must not fail, in this environment."""

    def run(**variables: str) -> None:
        out, err = (process := start(code=JOIN, **variables)).communicate(timeout=SECONDS)
        assert (process.returncode, out) == (0, "joined\n"), err

    return run


@pytest.mark.parametrize(
    ("file", "given", "said"),
    [
        (None, {}, "RAY_AUTH_MODE: the Ray cluster at {address!r} wants a token; set RAY_AUTH_MODE=token, and its"),
        (None, MODE, "RAY_AUTH_MODE: the Ray cluster at {address!r} wants a token; set RAY_AUTH_MODE=token, and its"),
        (RIGHT, {"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE: the Ray cluster at {address!r} wants a token"),
        (WRONG, {}, "~/.ray/auth_token: is not the token of the Ray cluster at {address!r}; set RAY_AUTH_TOKEN to it"),
        (RIGHT, {"RAY_AUTH_TOKEN": WRONG}, "RAY_AUTH_TOKEN: is not the token of the Ray cluster at {address!r}"),
        (None, {**MODE, "RAY_AUTH_TOKEN": WRONG}, "RAY_AUTH_TOKEN: is not the token of the Ray cluster at {address!r}"),
    ],
    ids=["none", "a mode alone", "not to be sent", "a wrong file", "a wrong variable", "mode and a wrong variable"],
)
def test_a_refused_token_is_one_line(
    head: Head,
    train: Callable[..., Run],
    home: Callable[..., dict[str, str]],
    file: str | None,
    given: dict[str, str],
    said: str,
) -> None:
    done = train(*TRAIN, RAY_ADDRESS=head.address, **home(file), **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ray-on-ecs: " + said.format(address=head.address)), done.stderr
    assert done.stderr.count("\n") == 1, "Ray itself prints an error each second"


@pytest.mark.parametrize(
    ("file", "given"),
    [(f"{RIGHT}\n", {}), (None, {"RAY_AUTH_TOKEN": RIGHT}), (WRONG, {**MODE, "RAY_AUTH_TOKEN": RIGHT})],
    ids=["a file with a line break", "a variable without a mode", "the variable before the file"],
)
def test_a_token_that_is_there_is_sent(
    head: Head, join: Callable[..., None], home: Callable[..., dict[str, str]], file: str, given: dict[str, str]
) -> None:
    join(RAY_ADDRESS=head.address, **home(file), **given)


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_TOKEN": WRONG}], ids=["a file", "a variable"])
def test_a_cluster_without_a_token_gets_none(
    open_head: Head, join: Callable[..., None], home: Callable[..., dict[str, str]], given: dict[str, str]
) -> None:
    join(RAY_ADDRESS=open_head.address, **home(WRONG), **given)


def test_a_mode_for_a_cluster_without_token_is_one_line(
    open_head: Head, train: Callable[..., Run], home: Callable[..., dict[str, str]]
) -> None:
    done = train(*TRAIN, RAY_ADDRESS=open_head.address, **home(WRONG), **MODE)
    assert (done.returncode, done.stdout) == (2, ""), "its actors would die"
    said = f"ray-on-ecs: RAY_AUTH_MODE: the Ray cluster at '{open_head.address}' has no token; unset RAY_AUTH_MODE\n"
    assert done.stderr == said


@pytest.mark.parametrize("kind", ["silent", "HTTP"])
def test_an_address_that_is_not_rays_is_one_line(head: Head, train: Callable[..., Run], kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}" if kind == "silent" else head.dashboard.rpartition("/")[2]
        done = train(*TRAIN, RAY_ADDRESS=address, **TOKEN)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"ray-on-ecs: RAY_ADDRESS: what listens at '{address}' does not answer as a Ray")
    assert done.stderr.count("\n") == 1
