"""A cluster with another token than the run's, or without one, is reported in one line at once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import head as heads
from tests.commands.head import SECONDS, TOKEN, Head

RIGHT, WRONG = TOKEN["RAY_AUTH_TOKEN"], "another"
MODE = {"RAY_AUTH_MODE": "token"}
JOINED = (0, "joined\n")
Join = Callable[..., tuple[int, str]]
# Joins as a run does, and has an actor, which calls this process back.
JOIN = """
import os
import ray
from ray_on_ecs.command import RAY_SETTINGS
os.environ.update(RAY_SETTINGS)
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.run import ray_cluster

@ray.remote(num_cpus=0)
class Actor:
    def answer(self):
        return "joined"

try:
    ray_cluster.connect(RunConfig())
except TrainingError as error:
    print(type(error).__name__, error)
    raise SystemExit(error.exit_status)
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
def join(environment: dict[str, str], tmp_path: Path) -> Iterator[Join]:
    """Join a cluster in this environment; return the exit status and the output."""
    with heads.commands("ray_on_ecs.run", environment, tmp_path) as start:

        def run(**variables: str) -> tuple[int, str]:
            out, err = (process := start(code=JOIN, **variables)).communicate(timeout=SECONDS)
            assert not err, err  # Ray would print an error each second
            return process.returncode, out

        yield run


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
def test_refused_token_is_one_line(
    head: Head,
    join: Join,
    home: Callable[..., dict[str, str]],
    file: str | None,
    given: dict[str, str],
    said: str,
) -> None:
    status, line = join(RAY_ADDRESS=head.address, **home(file), **given)
    assert status == 2
    assert line.startswith("UsageError " + said.format(address=head.address))
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "given"),
    [(f"{RIGHT}\n", {}), (None, {"RAY_AUTH_TOKEN": RIGHT}), (WRONG, {**MODE, "RAY_AUTH_TOKEN": RIGHT})],
    ids=["a file with a line break", "a variable without a mode", "the variable before the file"],
)
def test_available_token_is_sent(
    head: Head, join: Join, home: Callable[..., dict[str, str]], file: str, given: dict[str, str]
) -> None:
    assert join(RAY_ADDRESS=head.address, **home(file), **given) == JOINED


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_TOKEN": WRONG}], ids=["a file", "a variable"])
def test_cluster_without_a_token_gets_none(
    open_head: Head, join: Join, home: Callable[..., dict[str, str]], given: dict[str, str]
) -> None:
    assert join(RAY_ADDRESS=open_head.address, **home(WRONG), **given) == JOINED


def test_token_mode_for_open_cluster_is_one_line(
    open_head: Head, join: Join, home: Callable[..., dict[str, str]]
) -> None:
    said = f"UsageError RAY_AUTH_MODE: the Ray cluster at '{open_head.address}' has no token; unset RAY_AUTH_MODE\n"
    assert join(RAY_ADDRESS=open_head.address, **home(WRONG), **MODE) == (2, said), "its actors would die"
