"""A run that loses its driver or its head: `ray-head` submits it again, and it ends with the undisturbed weights."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.job_submission import JobSubmissionClient

from raynode import ports, state
from tests.commands.conftest import REPOSITORY
from tests.commands.head import SECONDS, TOKEN, commands, read_until
from tests.local_cluster import command_line, start_ray
from tests.waiting import free_ports, until
from training.run import layout

EPOCHS = 6
RUN = (
    "--model", "own:held", "--dataset", "synthetic", "--samples", "256", "--num-workers", "2", f"--epochs={EPOCHS}",
)  # fmt: skip
# `ray-head` on the ports that the first argument gives.
RAY_HEAD = """
import json, sys
from raynode import head, ports
given = json.loads(sys.argv.pop(1))
ports.HEAD.update(given["HEAD"])
ports.NODE.clear()
ports.NODE.update(given["NODE"])
ports.GCS, ports.DASHBOARD = given["HEAD"]["--port"], given["HEAD"]["--dashboard-port"]
sys.argv[1:] = ["--num-cpus=2", "--object-store-memory=100000000"]
head.main()
"""
AGENT_PORT = "--dashboard-agent-listen-port"

Follow = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.fault


@dataclass(frozen=True)
class RayHead:
    """A `ray-head` that runs, with its jobs."""

    process: subprocess.Popen[bytes]
    dashboard: str
    log: Path

    @property
    def jobs(self) -> dict[str, str]:
        """The status of each submitted job, by ID."""
        client = JobSubmissionClient(self.dashboard, headers={"Authorization": f"Bearer {TOKEN['RAY_AUTH_TOKEN']}"})
        listed: list[Any] = client.list_jobs()
        return {job.submission_id: job.status.value for job in listed if job.submission_id}

    def has_jobs(self, *wanted: str) -> bool:
        """Return whether it answers, which a busy dashboard does not always, and has these jobs."""
        try:
            return self.jobs.keys() >= set(wanted)
        except (OSError, RuntimeError):
            return False

    def kill_driver(self) -> None:
        """Kill the driver of its only job, as the kernel does when memory runs out."""
        [driver] = [each for each in self.processes if command_line(each).split()[1:3] == ["-m", "training"]]
        driver.kill()

    def kill(self) -> None:
        """Kill all processes, as the loss of the container does."""
        for each in self.processes:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait(SECONDS)

    @property
    def processes(self) -> list[psutil.Process]:
        """The processes of the container, that of `ray-head` first."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]


@contextmanager
def ray_head(environment: Mapping[str, str], folder: Path) -> Generator[RayHead]:
    """Run `ray-head` with its state and its jobs' results below a folder, everything else in one of its own."""
    dashboard, *rest = free_ports(1 + len(ports.HEAD))
    head_ports = dict(zip(ports.HEAD, [rest[0], dashboard, rest[1]], strict=True))
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, as the paths of sockets lie below it
    variables = {
        **{name: value for name, value in environment.items() if name != "RAY_ADDRESS"},
        **TOKEN,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{REPOSITORY / 'docker'}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
        "RAY_TMPDIR": temporary,
        "TRAINING_STORAGE_PATH": str(folder / "runs"),
        state.FOLDER: str(folder / "state"),
    }
    given = json.dumps({"HEAD": head_ports, "NODE": {AGENT_PORT: rest[2]}})
    try:
        head = _start([sys.executable, "-c", RAY_HEAD, given], variables, folder, dashboard)
        try:
            yield head
        finally:
            if head.process.poll() is None:
                head.kill()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _start(command: list[str], environment: Mapping[str, str], folder: Path, dashboard: int) -> RayHead:
    """Start a head, and wait until it answers."""
    log = folder / f"head-{dashboard}.log"
    head = RayHead(start_ray(command, environment, log), f"http://127.0.0.1:{dashboard}", log)
    try:
        until(head.has_jobs, why=log.read_text)
    except BaseException:
        head.kill()
        raise
    return head


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The volumes that outlive a head: its state and the runs."""
    (tmp_path / "state").mkdir()
    (tmp_path / "runs").mkdir()
    return tmp_path


@pytest.fixture
def follow(environment: dict[str, str], tmp_path: Path) -> Iterator[Follow]:
    """Start `python -m training.job` for a head."""
    with commands("training.job", {**environment, **TOKEN}, tmp_path) as start:
        yield lambda head, *given: start(*RUN, *given, RAY_API_SERVER_ADDRESS=head.dashboard)


@pytest.fixture(scope="module")
def undisturbed(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the same run without a disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with commands("training", environment, folder) as start:
        process = start(*RUN, "--run-name=undisturbed", "--storage-path", str(folder))
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    return torch.load(folder / "undisturbed" / layout.WEIGHTS)


def test_a_killed_driver_is_submitted_again_and_who_follows_it_sees_the_end(
    environment: dict[str, str], folder: Path, follow: Follow, hold: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    with ray_head(environment, folder) as head:
        follower = follow(head, "--run-name=mine")
        read_until(follower, "Process rank")
        until(lambda: _checkpoints(folder))
        head.kill_driver()
        read_until(follower, "job mine lost its driver; the head has submitted run mine again as job mine.2")
        hold.unlink()
        out, err = follower.communicate(timeout=SECONDS)
        assert follower.returncode == 0, out + err
        assert "continued from its last checkpoint" in out
        assert head.jobs == {"mine": "FAILED", "mine.2": "SUCCEEDED"}
        assert "ray-head: job mine was lost; submitted again as mine.2 (1 of 3)\n" in head.log.read_text()
    _assert_same_weights(folder, undisturbed)


@pytest.mark.parametrize(
    ("end", "lost_as", "said"),
    [
        (RayHead.kill, "FAILED", "training: lost the connection to job mine"),
        (lambda head: head.process.terminate(), "STOPPED", "the same command with --run-name mine"),
    ],
    ids=["killed", "stopped"],
)
def test_a_run_that_lost_its_head_is_submitted_again_by_the_next_head(
    environment: dict[str, str],
    folder: Path,
    follow: Follow,
    hold: Path,
    undisturbed: dict[str, torch.Tensor],
    end: Callable[[RayHead], None],
    lost_as: str,
    said: str,
) -> None:
    with ray_head(environment, folder) as head:
        follower = follow(head, "--run-name=mine")
        read_until(follower, "Process rank")
        until(lambda: _checkpoints(folder))
        end(head)
        head.process.wait(SECONDS)
        _, err = follower.communicate(timeout=SECONDS)
        assert follower.returncode == 1
        assert said in err, "what follows the run now"
        assert err.count("\n") == 1, "no traceback"
    hold.unlink()
    with ray_head(environment, folder) as head:
        until(lambda: head.has_jobs("mine.2"), why=head.log.read_text)
        assert head.jobs["mine"] == lost_as
        follower = follow(head, "--run-name=mine")
        out, err = follower.communicate(timeout=SECONDS)
        assert out.startswith("run mine is under way as job mine.2: its log from the start\n"), "nobody submitted it"
        assert follower.returncode == 0, out + err
        assert head.jobs == {"mine": lost_as, "mine.2": "SUCCEEDED"}
    _assert_same_weights(folder, undisturbed)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints of the run."""
    return list((folder / "runs" / "mine").glob(f"{layout.CHECKPOINT_PREFIX}*/{layout.MANIFEST}"))


def _assert_same_weights(folder: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    weights = torch.load(folder / "runs" / "mine" / layout.WEIGHTS)
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weights[name], undisturbed[name]) for name in weights), "it resumed from its checkpoint"
