"""A Ray program begins as under `python SCRIPT`, and Ray's results lie in the run's folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLES = {"RAY_ON_ECS_RAY_STORAGE": "/runs/one/ray", "RUN_NAME": "one"}
# Prints the defaults of Ray Train and Ray Tune for path and name, and the way it was started.
SCRIPT = """
import json, sys
import helper
from ray import train, tune
first, second = train.RunConfig(), train.RunConfig()
named = train.RunConfig(name="mine", storage_path="/elsewhere")
print(json.dumps([
    first.storage_path, tune.RunConfig().storage_path, first.name, second.name, named.name, named.storage_path,
    sys.argv, __name__, helper.__file__,
]))
"""


def run(folder: Path, *arguments: str) -> str:
    """Run a program, and return its output."""
    command = [sys.executable, "-P", "-m", "ray_on_ecs.run.program.main", *arguments]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **VARIABLES}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("started", [["train.py"], ["-m", "train"]], ids=["file", "module"])
def test_ray_storage_defaults_to_the_run(started: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").touch()
    document = json.loads(run(tmp_path, *started, "--lr", "0.1"))
    assert document[:2] == ["/runs/one/ray", "/runs/one/ray"]
    assert document[2:6] == ["ray_train_run-one", "ray_train_run-one-2", "mine", "/elsewhere"]
    assert document[6][1:] == ["--lr", "0.1"]
    assert document[7] == "__main__"
    assert document[8] == str(tmp_path / "helper.py")


def test_script_may_set_import_variables_of_ray(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print([each for each in sys.modules if each.startswith('ray.')])")
    assert run(tmp_path, "train.py") == "[]\n"
