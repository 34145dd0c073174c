"""A run that loses its driver or its head: `ray-head` resubmits it, and it ends with the undisturbed weights."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands.conftest import CLASSIFIER
from tests.commands.head import ON_HEAD, SECONDS, TOKEN, commands, read_until
from tests.commands.ray_head import RayHead, ray_head
from tests.waiting import until

RUN = ("--num-workers=2", *CLASSIFIER, "--model=own:held", "--epochs=6")

Follow = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.fault


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The volumes that outlive a head: its state and the runs."""
    (tmp_path / "state").mkdir()
    (tmp_path / "runs").mkdir()
    return tmp_path


@pytest.fixture
def follow(environment: dict[str, str], tmp_path: Path) -> Iterator[Follow]:
    """Start `ray-on-ecs run` for a head."""
    with commands("ray_on_ecs", {**environment, **TOKEN, **ON_HEAD}, tmp_path) as start:
        yield lambda head, *given: start("run", *given, *RUN, RAY_API_SERVER_ADDRESS=head.dashboard)


@pytest.fixture(scope="module")
def undisturbed(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the same run without a disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with commands("ray_on_ecs.run", environment, folder) as start:
        process = start("--run-name=undisturbed", "--storage-path", str(folder), *RUN)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    return (folder / "undisturbed" / "model.safetensors").read_bytes()


def test_run_of_a_killed_driver_is_resubmitted(
    environment: dict[str, str], folder: Path, follow: Follow, hold: Path, undisturbed: bytes
) -> None:
    with ray_head(environment, folder) as head:
        follower = follow(head, "--run-name=mine")
        read_until(follower, "epoch 1/")
        until(lambda: _checkpoints(folder))
        head.kill_driver()
        read_until(follower, "job mine lost its driver; the head has submitted run mine again as job mine.2")
        hold.unlink()
        out, err = follower.communicate(timeout=SECONDS)
        assert follower.returncode == 0, out + err
        assert "resuming after step " in out
        assert head.jobs == {"mine": "FAILED", "mine.2": "SUCCEEDED"}
        assert "ray-head: job mine was lost; submitted again as mine.2 (1 of 3)\n" in head.log.read_text()
    assert (folder / "runs" / "mine" / "model.safetensors").read_bytes() == undisturbed


@pytest.mark.parametrize(
    ("end", "lost_as"),
    [(RayHead.kill, "FAILED"), (lambda head: head.process.terminate(), "STOPPED")],
    ids=["killed", "stopped"],
)
def test_next_head_resubmits_runs_of_a_lost_head(
    environment: dict[str, str],
    folder: Path,
    follow: Follow,
    hold: Path,
    undisturbed: bytes,
    end: Callable[[RayHead], None],
    lost_as: str,
) -> None:
    with ray_head(environment, folder) as head:
        follower = follow(head, "--run-name=mine")
        read_until(follower, "epoch 1/")
        until(lambda: _checkpoints(folder))
        end(head)
        head.process.wait(SECONDS)
        follower.kill()
        _, err = follower.communicate(timeout=SECONDS)
        assert "Traceback" not in err
    hold.unlink()
    with ray_head(environment, folder) as head:
        until(lambda: head.has_jobs("mine.2"), why=head.log.read_text)
        assert head.jobs["mine"] == lost_as
        follower = follow(head, "--run-name=mine")
        out, err = follower.communicate(timeout=SECONDS)
        assert out.startswith("run mine is already active as job mine.2, with the flags of its first command: its log ")
        assert follower.returncode == 0, out + err
        assert head.jobs == {"mine": lost_as, "mine.2": "SUCCEEDED"}
    assert (folder / "runs" / "mine" / "model.safetensors").read_bytes() == undisturbed


def _checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints of the run."""
    return list((folder / "runs" / "mine").glob("checkpoints/step-*/checkpoint.json"))
