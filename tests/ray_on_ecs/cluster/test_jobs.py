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


def test_a_command_that_ray_can_give_to_a_shell_is_taken(script: str) -> None:
    submission = submission_of_script([script, "x" * (MAX_COMMAND_BYTES - REST)])
    done = subprocess.run(["/bin/sh", "-c", f"if false; then {submission.entrypoint}; fi"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("given", ["pip/gpu.txt", "./pip/../pip/gpu.txt", "{folder}/pip/gpu.txt"])
def test_the_requirements_file_is_named_by_its_place_in_the_folder(script: str, given: str) -> None:
    Path("pip").mkdir()
    Path("pip/gpu.txt").touch()
    submission = submission_of_script(["--requirements", given.format(folder=Path.cwd()), script])
    assert " --requirements pip/gpu.txt " in submission.entrypoint


@pytest.mark.parametrize("arguments", [["x" * MAX_COMMAND_BYTES], ["a b"] * (MAX_COMMAND_BYTES // 6)])
def test_a_command_that_is_too_long_is_refused_with_the_way_out(script: str, arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=r"SCRIPT: the command has 12\d KiB, .* put the arguments into a file"):
        submission_of_script([script, *arguments])
