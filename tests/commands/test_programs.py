"""The packaged Ray programs on a head, run by `python` in its shell: kills and restarts."""

import json
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.aws import BUCKET
from tests.commands.conftest import REPOSITORY
from tests.commands.head import SECONDS, Head
from tests.waiting import until

DDP, PREPROCESS, TUNE = "training/ray_train_ddp.py", "training/preprocess.py", "examples/ray_tune.py"
DDP_FLAGS = ("--name=killed", "--synthetic=128", "--batch-size=32")


@pytest.fixture(scope="module")
def variables(environment: dict[str, str], aws_variables: dict[str, str], head: Head) -> dict[str, str]:
    """The environment of the head's shell."""
    return {**environment, **aws_variables, **head.variables, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3"}


@contextmanager
def started(program: str, *arguments: str, variables: dict[str, str]) -> Generator[subprocess.Popen[str]]:
    file = [str(REPOSITORY / program)] if program.endswith(".py") else ["-m", program]
    command = [sys.executable, *file, *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=variables, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def run(program: str, *arguments: str, variables: dict[str, str]) -> str:
    with started(program, *arguments, variables=variables) as process:
        said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    return said


@pytest.mark.fault
def test_killed_ddp_resumes_from_the_bucket(variables: dict[str, str], s3_client: Any, tmp_path: Path) -> None:
    def finished_epochs() -> list[Any]:
        found = s3_client.list_objects_v2(Bucket=BUCKET, Prefix="killed/checkpoint_manager_snapshot.json")
        if not found["KeyCount"]:
            return []
        stored = s3_client.get_object(Bucket=BUCKET, Key="killed/checkpoint_manager_snapshot.json")["Body"].read()
        return [each["metrics"]["epoch"] for each in json.loads(stored)["checkpoint_results"]]

    with started(DDP, BUCKET, *DDP_FLAGS, "--epochs=50", variables=variables) as process:
        until(finished_epochs, SECONDS)
        process.kill()
        before, _ = process.communicate()
    [*_, last] = finished_epochs()
    epochs = last + 2
    after = run("training.ray_train_ddp", BUCKET, *DDP_FLAGS, f"--epochs={epochs}", variables=variables)

    place = r"\| CPU: Process rank (\d) \| Batchsize: 32 \| Steps: 2 \| Total epoch time: [\d.]+\]"
    lines = re.findall(rf"\[Epoch (\d+) {place}", after)
    assert sorted(lines) == sorted((str(epoch), rank) for epoch in range(last + 1, epochs) for rank in "01"), after
    assert {"0"} <= {epoch for epoch, _ in re.findall(rf"\[Epoch (\d+) {place}", before)}, before
    keys = [each["Key"] for each in s3_client.list_objects_v2(Bucket=BUCKET, Prefix="killed/")["Contents"]]
    s3_client.download_file(BUCKET, max(key for key in keys if key.endswith("state.pt")), tmp_path / "state.pt")
    import torch  # takes seconds

    steps = torch.load(tmp_path / "state.pt")["optimizer"]["state"][0]["step"]
    assert steps == 2 * epochs
    s3_client.download_file(BUCKET, "killed/model.pt", tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["conv1.weight"].shape == (64, 1, 7, 7)


@pytest.mark.fault
def test_preprocessing_feeds_the_training(variables: dict[str, str], tmp_path: Path) -> None:
    for number in range(24):
        file = tmp_path / "photos" / ("dark", "bright")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (200 * (number % 2),) * 3).save(file)
    flags = (str(tmp_path), "--name=fed", f"--images={tmp_path}/photos", "--batch-size=8", "--size=32", "--blurs=1")
    said = run(PREPROCESS, *flags, "--epochs=2", variables=variables)
    line = r"epoch (\d+): loss [\d.]+, (\d+) images, [\d.]+ a second, prepared on \{'[\d.]+': 24\}"
    assert re.findall(line, said) == [("0", "24"), ("1", "24")], said


@pytest.mark.fault
def test_killed_sweep_resumes(variables: dict[str, str], tmp_path: Path) -> None:
    flags = (f"--storage-path={tmp_path}", "--name=sweep", "--samples=3", "--epochs=4")
    with started(TUNE, *flags, variables=variables) as process:
        until(lambda: list(tmp_path.glob("sweep/train_*/result.json")), SECONDS)
        process.kill()
        process.communicate()
    trials = {path.name for path in tmp_path.glob("sweep/train_*")}
    said = run(TUNE, *flags, variables=variables)
    assert trials <= {path.name for path in tmp_path.glob("sweep/train_*")}
    rows = re.findall(r"^ *(0\.\d+) +[\d.e-]+ +(?:16|64|256) +\d+$", said, flags=re.MULTILINE)
    assert len(rows) == 3, said
    assert rows == sorted(rows, reverse=True)
