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
# A script that takes a second without PyTorch.
TINY = ("--working-dir", str(REPOSITORY / "tests" / "commands" / "tiny"), "tiny.py")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Restore SIGINT and SIGHUP, which background jobs of a shell and nohup ignore, and so would our commands."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a command: no Ray cluster, and a home with a token."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
    caches = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    home = tmp_path_factory.mktemp("home")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temporary:  # short
        own = {"RAY_TMPDIR": temporary, "TMPDIR": temporary, "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        yield {**kept, **BUSY_MACHINE, **caches, **own, "COLUMNS": "100"}


@pytest.fixture(scope="session")
def head(
    environment: dict[str, str], aws_variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Head]:
    """One Ray head for all tests that do not change it."""
    own = {**environment, **aws_variables, **OPEN_MPI, **SECRETS}
    with started(own, tmp_path_factory.mktemp("jobs")) as head:
        yield head
