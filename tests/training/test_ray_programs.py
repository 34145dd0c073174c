"""Mistakes in the command lines of the packaged Ray programs; tests/commands/test_programs.py runs them on Ray."""

import os
import runpy
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

REPOSITORY = Path(__file__).parents[2]
DDP, PREPROCESS, TUNE = "training/ray_train_ddp.py", "training/preprocess.py", "examples/ray_tune.py"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise URLError("offline")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (DDP, ["--epochs=0"], "argument --epochs: 0 must be at least 1"),
        (DDP, ["--lr=nan"], "argument --lr: 'nan' is not a number"),
        (DDP, ["--name=a/b"], "argument --name: 'a/b'"),
        (DDP, ["Results"], "write a folder as ./Results"),
        (DDP, ["s3://missing-bucket"], "argument BUCKET: s3://missing-bucket: this bucket does not exist"),
        (DDP, ["--data=/nowhere"], "argument --data: '/nowhere' is not auto, fashion-mnist, digits, a folder"),
        (PREPROCESS, ["--batch-size=0"], "argument --batch-size: 0 must be at least 2"),
        (PREPROCESS, ["--images=/nowhere"], "argument --images: "),
        (TUNE, ["--samples=0"], "--samples and --epochs are at least 1"),
    ],
    ids=["epochs", "rate", "name", "folder", "bucket", "data", "batch", "images", "trials"],
)
@pytest.mark.usefixtures("s3")
def test_user_error_is_one_line_and_status_2(
    program: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [program, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(REPOSITORY / program), run_name="__main__")
    out, err = capfd.readouterr()
    assert (end.value.code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1, err


def test_process_prints_nothing_else() -> None:
    command = [sys.executable, str(REPOSITORY / DDP), "--epochs=0"]
    process = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "ray_train_ddp.py: error: argument --epochs: 0 must be at least 1\n"
