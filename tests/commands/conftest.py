"""Commands as users type them, each in a separate process; most start Ray, or join a head of the tests."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.head import SECRETS, Head, started
from tests.local_cluster import BUSY_MACHINE, OPEN_MPI

Run = subprocess.CompletedProcess[str]
REPOSITORY = Path(__file__).parents[2]
# The packaged image classifier as the script of a run, with images that need no download.
CLASSIFIER = (
    *("--working-dir", str(REPOSITORY / "training"), "image_classifier.py"),
    *("--data", "digits", "--samples", "256"),
)

# A user's models, small enough to train in seconds.
OWN_MODELS = """
import time
from pathlib import Path
from torch import nn

def build(channels, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 28 * 28, classes))

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


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Restore SIGINT and SIGHUP, which background jobs of a shell and nohup ignore, and so would our commands."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a command: separate Ray clusters and their home with a token, and a user's models."""
    home = tmp_path_factory.mktemp("home")
    (home / "own.py").write_text(OWN_MODELS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
    caches = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    path = f"{home}{os.pathsep}{REPOSITORY}"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temporary:  # short
        own = {"RAY_TMPDIR": temporary, "TMPDIR": temporary, "HOME": str(home), "PYTHONPATH": path}
        yield {**kept, **BUSY_MACHINE, **caches, **own, "RAY_ADDRESS": "local", "COLUMNS": "100"}


@pytest.fixture
def hold(environment: dict[str, str]) -> Iterator[Path]:
    """A file: while it exists, a run of `own:held` makes eight steps and then waits."""
    file = Path(environment["PYTHONPATH"].partition(os.pathsep)[0]) / "hold"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def head(
    environment: dict[str, str], aws_variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Head]:
    """One Ray head for all tests that do not change it."""
    own = {**environment, **aws_variables, **OPEN_MPI, **SECRETS}
    with started(own, tmp_path_factory.mktemp("jobs")) as head:
        yield head
