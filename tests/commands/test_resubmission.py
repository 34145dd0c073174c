"""A run that loses its driver or its head: `ray-head` resubmits it, and it ends with the undisturbed weights."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands.conftest import REPOSITORY
from tests.commands.head import ON_HEAD, SECONDS, TOKEN, commands, read_until
from tests.commands.ray_head import RayHead, ray_head
from tests.waiting import until

# A user's model, small enough to train in seconds.
OWN = """
import time
from pathlib import Path
from torch import nn

class Held(nn.Sequential):
    steps = 0

    def forward(self, images):
        self.steps += self.training
        while self.steps > 8 and Path(__file__).with_name("hold").exists():
            time.sleep(0.1)
        return super().forward(images)

def held(channels, classes):
    return Held(nn.Flatten(), nn.Linear(channels * 28 * 28, classes))
"""
RUN = (
    *("--num-workers=2", "--working-dir", str(REPOSITORY / "training"), "image_classifier.py"),
    *("--data=digits", "--samples=256", "--model=own:held", "--epochs=6"),
)

Follow = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the user's model."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def environment(environment: dict[str, str], models: Path) -> dict[str, str]:
    """The environment of a command that finds the user's model."""
    return {**environment, "PYTHONPATH": f"{models}{os.pathsep}{environment['PYTHONPATH']}"}


@pytest.fixture
def hold(models: Path) -> Iterator[Path]:
    """A file: while it exists, a run makes eight steps and then waits."""
    file = models / "hold"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


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
        yield lambda head, *flags: start("run", *flags, *RUN, RAY_API_SERVER_ADDRESS=head.dashboard)


@pytest.fixture(scope="module")
def undisturbed(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the same run without a disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with commands("ray_on_ecs", environment, folder) as start:
        process = start("run", "--local", "--run-name=undisturbed", "--storage-path", str(folder), *RUN)
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
