"""The packaged Ray programs on a head, run by `python` in its shell: kills and restarts."""

import io
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
from tests.small_images import write_small_images
from tests.waiting import until

DDP, PREPROCESS, TUNE = "training/ray_train_ddp.py", "training/preprocess.py", "examples/ray_tune.py"
DDP_FLAGS = ("--name=killed", "--batch-size=32")


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
    # 65 images a worker: the last one would be a third step.
    flags = (*DDP_FLAGS, f"--data={write_small_images(tmp_path, 130)}")

    def results() -> list[Any]:
        found = s3_client.list_objects_v2(Bucket=BUCKET, Prefix="killed/checkpoint_manager_snapshot.json")
        if not found["KeyCount"]:
            return []
        stored = s3_client.get_object(Bucket=BUCKET, Key="killed/checkpoint_manager_snapshot.json")["Body"].read()
        return json.loads(stored)["checkpoint_results"]

    with started(DDP, BUCKET, *flags, "--epochs=50", variables=variables) as process:
        until(results, SECONDS)
        process.kill()
        before, _ = process.communicate()
    last = max(result["metrics"]["epoch"] for result in results())
    epochs = last + 2
    after = run("training.ray_train_ddp", BUCKET, *flags, f"--epochs={epochs}", "--lr=5e-4", variables=variables)

    place = r"\| CPU: Process rank (\d) \| Batchsize: 32 \| Steps: 2 \| Total epoch time: [\d.]+\]"
    lines = re.findall(rf"\[Epoch (\d+) {place}", after)
    assert sorted(lines) == sorted((str(epoch), rank) for epoch in range(last + 1, epochs) for rank in "01"), after
    assert {"0"} <= {epoch for epoch, _ in re.findall(rf"\[Epoch (\d+) {place}", before)}, before

    def read(name: str) -> bytes:
        return s3_client.get_object(Bucket=BUCKET, Key=f"killed/{name}")["Body"].read()

    def newest(each: dict[str, Any]) -> int:
        return each["metrics"]["epoch"]

    import torch  # takes seconds

    kept = results()
    folder = max(kept, key=newest)["checkpoint_dir_name"]
    optimizer = torch.load(io.BytesIO(read(f"{folder}/optimizer.pt")))
    assert (optimizer["state"][0]["step"], optimizer["param_groups"][0]["lr"]) == (2 * epochs, 5e-4)
    assert read("model.safetensors") == read(f"{folder}/model.safetensors")
    best = max(kept, key=lambda each: (each["metrics"]["test_accuracy"], newest(each)))
    assert read("best.safetensors") == read(f"{best['checkpoint_dir_name']}/model.safetensors")
    keys = [stored["Key"] for stored in s3_client.list_objects_v2(Bucket=BUCKET, Prefix="killed/")["Contents"]]
    assert len(kept) == len([key for key in keys if key.endswith("optimizer.pt")]) <= 2, "the best one and the last one"


@pytest.mark.fault
def test_preprocessing_feeds_the_training(variables: dict[str, str], tmp_path: Path) -> None:
    for number in range(25):  # the last batch has one image, which batch norm refuses
        file = tmp_path / "photos" / ("dark", "bright")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (200 * (number % 2),) * 3).save(file)
    flags = (str(tmp_path), "--name=fed", f"--images={tmp_path}/photos", "--batch-size=8", "--size=32", "--blurs=1")
    output = run(PREPROCESS, *flags, "--epochs=2", variables=variables)
    line = r"epoch (\d+): loss [\d.]+, (\d+) images, [\d.]+ a second, prepared on \{'[\d.]+': 24\}"
    assert re.findall(line, output) == [("0", "24"), ("1", "24")], output


@pytest.mark.fault
def test_killed_sweep_resumes(variables: dict[str, str], tmp_path: Path) -> None:
    flags = (f"--storage-path={tmp_path}", "--name=sweep", "--samples=3", "--epochs=4")
    with started(TUNE, *flags, variables=variables) as process:
        until(lambda: list(tmp_path.glob("sweep/train_*/result.json")), SECONDS)
        process.kill()
        process.communicate()
    trials = {path.name for path in tmp_path.glob("sweep/train_*")}
    output = run(TUNE, *flags, variables=variables)
    assert trials <= {path.name for path in tmp_path.glob("sweep/train_*")}
    rows = re.findall(r"^ *(0\.\d+) +[\d.e-]+ +(?:16|64|256) +\d+$", output, flags=re.MULTILINE)
    assert len(rows) == 3, output
    assert rows == sorted(rows, reverse=True)
