"""The command of a run's job."""

import subprocess
from pathlib import Path

import pytest

from ray_on_ecs.cluster.jobs import MAX_COMMAND_BYTES, submission_of_script
from ray_on_ecs.errors import UsageError

# The rest of the command has less.
REST = 1000


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    return "train.py"


def test_longest_command_is_accepted(script: str) -> None:
    submission = submission_of_script([script, "x" * (MAX_COMMAND_BYTES - REST)])
    done = subprocess.run(["/bin/sh", "-c", f"if false; then {submission.entrypoint}; fi"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("given", ["pip/gpu.txt", "./pip/../pip/gpu.txt", "{folder}/pip/gpu.txt"])
def test_requirements_file_is_relative_to_the_folder(script: str, given: str) -> None:
    Path("pip").mkdir()
    Path("pip/gpu.txt").touch()
    submission = submission_of_script(["--requirements", given.format(folder=Path.cwd()), script])
    assert " --requirements pip/gpu.txt " in submission.entrypoint


@pytest.mark.parametrize("arguments", [["x" * MAX_COMMAND_BYTES], ["a b"] * (MAX_COMMAND_BYTES // 6)])
def test_too_long_command_is_refused(script: str, arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=r"SCRIPT: the command has 12\d KiB, .* put the arguments into a file"):
        submission_of_script([script, *arguments])
