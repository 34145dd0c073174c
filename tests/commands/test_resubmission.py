"""A run that loses its driver or its head: the head submits it again, and it ends with the undisturbed weights.

Its follower is another machine's, which reaches the head through the documents alone, here in a folder.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.commands.conftest import REPOSITORY
from tests.commands.head import ON_HEAD, SECONDS, commands, read_until
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

# `ray-on-ecs` of another machine on the cluster of a folder.
CLIENT = """
import os, sys
from ray_on_ecs.cluster import clusters
from ray_on_ecs.jobs.documents import Documents
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.storage.disk import Disk

class FolderCluster(clusters.HeadCluster):
    def jobs(self, say=print):
        return RemoteJobs(Documents(Disk(), os.environ["DOCUMENTS"]), lambda: "AIDA:jane", say)

clusters.HeadCluster = FolderCluster
from ray_on_ecs.__main__ import main
sys.exit(main(sys.argv[1:]))
"""

Start = Callable[..., subprocess.Popen[str]]
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
    """The files that outlive a head: its state, the documents and the runs."""
    for name in ("state", "documents", "runs"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def typed(environment: dict[str, str], folder: Path) -> Iterator[Start]:
    """Start `ray-on-ecs` on another machine."""
    own = {"DOCUMENTS": str(folder / "documents"), "RAY_ON_ECS_STORAGE_PATH": str(folder / "runs")}
    with commands("ray_on_ecs", {**environment, **ON_HEAD, **own}, folder) as start:
        yield partial(start, code=CLIENT)


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
    environment: dict[str, str], folder: Path, typed: Start, hold: Path, undisturbed: bytes
) -> None:
    with ray_head(environment, folder) as head:
        follower = typed("run", "--run-name=mine", *RUN)
        seen = read_until(follower, "epoch 1/")
        until(lambda: _checkpoints(folder))
        head.kill_driver()
        seen += read_until(follower, "job mine lost its driver; the head has submitted run mine again as job mine.2")
        hold.unlink()
        seen += _end(follower)
        assert "resuming after step " in seen
        assert head.jobs == {"mine": "FAILED", "mine.2": "SUCCEEDED"}
        assert "ray-head: job mine was lost; submitted again as mine.2 (1 of 3)\n" in head.log.read_text()
        assert _lines_of_jobs(seen) == _end(typed("logs", "mine")).splitlines()
    assert (folder / "runs" / "mine" / "model.safetensors").read_bytes() == undisturbed


def _stop(head: RayHead) -> None:
    head.process.terminate()
    assert head.process.wait(SECONDS) == 0, head.log.read_text()


@pytest.mark.parametrize("keeps_state", [True, False], ids=["same-disk", "new-disk"])
@pytest.mark.parametrize("end", [RayHead.kill, _stop], ids=["killed", "stopped"])
def test_next_head_continues_runs_of_a_lost_head(
    environment: dict[str, str],
    folder: Path,
    typed: Start,
    hold: Path,
    undisturbed: bytes,
    end: Callable[[RayHead], None],
    keeps_state: bool,
) -> None:
    with ray_head(environment, folder) as head:
        follower = typed("run", "--run-name=mine", *RUN)
        seen = read_until(follower, "epoch 1/")
        until(lambda: _checkpoints(folder))
        end(head)
    hold.unlink()
    if not keeps_state:
        shutil.rmtree(folder / "state")
        (folder / "state").mkdir()
    with ray_head(environment, folder) as head:
        seen += _end(follower)
        assert "resuming after step " in seen
        assert head.jobs == {"mine": "FAILED", "mine.2": "SUCCEEDED"}
        assert _lines_of_jobs(seen) == _end(typed("logs", "mine")).splitlines()
    assert (folder / "runs" / "mine" / "model.safetensors").read_bytes() == undisturbed


def _end(process: subprocess.Popen[str]) -> str:
    """Return the output of a command that ends well."""
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    return out


def _lines_of_jobs(seen: str) -> list[str]:
    """Return what a follower has shown of the logs."""
    ours = ("run mine is submitted as job ", "job mine lost its driver; ", "waiting for the next head, ")
    return [line for line in seen.splitlines() if not line.startswith(ours)]


def _checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints of the run."""
    return list((folder / "runs" / "mine").glob("checkpoints/step-*/checkpoint.json"))
