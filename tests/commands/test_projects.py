"""Projects whose modules are named like ours, Ray's and Python's: they start as torchrun starts them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.conftest import REPOSITORY
from tests.commands.head import SECONDS, Head, commands

# Only the script may import the first modules, and nothing may import the last ones.
OURS = ("training/__init__.py", "infra/__init__.py", "tests/__init__.py", "run.py", "config.py")
NOT_FOR_OTHERS = ("queue.py", "click.py", "requests.py", "matplotlib.py")
IMPORTED_BY_NOTHING = "raise SystemExit(f'{__name__} of the user was imported')\n"
SCRIPT = """
import os, sys
import config, infra, run, tests, training
for each in (config, infra, run, tests, training):
    assert each.__file__.startswith(os.getcwd()), each
print("rank", os.environ["RANK"], "greets", sys.argv[1:], flush=True)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in OURS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name in NOT_FOR_OTHERS:
        (folder / name).write_text(IMPORTED_BY_NOTHING)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "training.py").write_text(IMPORTED_BY_NOTHING)  # the package goes before it
    return folder


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the packages as a wheel installs them."""
    for package in ("ray_on_ecs", "training"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, tmp_path / "site" / package, ignore=ignored)
    return tmp_path / "site"


def greetings(process: subprocess.Popen[str]) -> list[str]:
    """Wait for the end, and return the output of the ranks."""
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    return sorted(line[line.rindex("rank ") :] for line in out.splitlines() if "greets" in line)


def test_project_with_colliding_names_runs_as_a_job(head: Head, project: Path, installed: Path) -> None:
    """With a regular installation for the command and its driver; the head uses the tests' installation."""
    with commands("ray_on_ecs", {**head.shell, "PYTHONPATH": str(installed)}, project) as start:
        lines = greetings(start("run", "--num-workers", "2", "--run-name", "names", "train.py", "x"))
    assert lines == ["rank 0 greets ['x']", "rank 1 greets ['x']"]


def test_module_with_colliding_names_runs(head: Head, project: Path, installed: Path) -> None:
    (project / "training" / "__main__.py").write_text(SCRIPT)
    with commands("ray_on_ecs", {**head.shell, "PYTHONPATH": str(installed)}, project) as start:
        assert greetings(start("run", "--num-workers", "1", "-m", "training", "y")) == ["rank 0 greets ['y']"]


def test_commands_import_nothing_from_the_current_folder(environment: dict[str, str], project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray_on_ecs", "run", "--help"],
        cwd=project,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
