"""Runs on this machine that end at their limit and are continued, as an undisturbed run in the end."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.conftest import REPOSITORY
from tests.commands.head import SECONDS, commands

# 36 s, with a notice of 9 s.
HOURS = "0.01"
FLAGS = ("run", "--local", "--num-workers", "2", "--run-name")
STEP = "            optimizer.step()\n"
# After the first epoch, an epoch of 32 steps takes 16 s while there is this file.
SLOW = f"{STEP}            import time; time.sleep(0.5 * (EPOCH > 0) * os.path.exists(os.environ['SLOW']))\n"
EPOCHS = {"ddp_checkpointer.py": "checkpoint.epoch", "ddp_snapshot.py": "epoch"}
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    (tmp_path / "slow").touch()
    return tmp_path / "slow"


@pytest.fixture
def typed(environment: dict[str, str], tmp_path: Path, slow: Path) -> Iterator[Start]:
    """Start `ray-on-ecs` in a folder with the examples, whose steps are slow."""
    (tmp_path / "home").mkdir()
    (tmp_path / "code").mkdir()
    for name, epoch in EPOCHS.items():
        text = (REPOSITORY / "examples" / name).read_text()
        assert STEP in text
        (tmp_path / "code" / name).write_text(text.replace(STEP, SLOW.replace("EPOCH", epoch)))
    own = {"HOME": str(tmp_path / "home"), "SLOW": str(slow)}
    with commands("ray_on_ecs", {**environment, **own}, tmp_path / "code") as start:
        yield start


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def weights(folder: Path, script: str) -> dict[str, Any]:
    if script == "ddp_checkpointer.py":
        from safetensors.torch import load_file

        return load_file(folder / "model.safetensors")
    return torch.load(folder / "files" / "code" / "snapshot.pt")["network"]


@pytest.mark.parametrize("script", EPOCHS)
def test_run_that_continues_after_its_limit_ends_alike(typed: Start, tmp_path: Path, slow: Path, script: str) -> None:
    runs = tmp_path / "code" / "results"
    command = (script, "--epochs", "6")
    status, out, err = end(typed(*FLAGS, "mine", "--max-hours", HOURS, *command))
    assert status == 4, out + err
    assert ("saving after step" in out) == (script == "ddp_checkpointer.py")
    line = out.splitlines()[-1]
    assert line.startswith(f"ray-on-ecs: --max-hours {HOURS} is reached: the run has spent 0.01 hours"), out
    assert re.search(r"--run-name mine and a higher limit, as --max-hours [0-9.]+, resumes it$", line), out
    document = json.loads((runs / "mine" / "status.json").read_text())
    assert document["state"] == "limit"
    assert 27.0 - 1.0 <= document["spent"]["seconds"] <= 36.0 + 5.0
    status, out, err = end(typed(*FLAGS, "mine", "--max-hours", HOURS, *command))
    assert status == 4, "the same limit is refused at once"
    assert "is reached: " in out
    assert "results" not in out
    slow.unlink()
    status, out, err = end(typed(*FLAGS, "mine", "--max-hours", "1", *command))
    assert status == 0, out + err
    assert "rank 0: resuming at epoch " in out
    status, out, err = end(typed(*FLAGS, "undisturbed", *command))
    assert status == 0, out + err
    mine, undisturbed = (weights(runs / name, script) for name in ("mine", "undisturbed"))
    assert mine.keys() == undisturbed.keys()
    assert all(torch.equal(mine[name], undisturbed[name]) for name in mine)
