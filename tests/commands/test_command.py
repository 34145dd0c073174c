"""The packaged image classifier on two workers of a real Ray head, and mistakes of a user in one line each."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aws import metric_totals
from tests.commands.conftest import REPOSITORY, TINY, Run
from tests.commands.head import SECONDS, Head, commands
from tests.local_cluster import DIRECT

pytestmark = pytest.mark.fault
Train = Callable[..., Run]
DIGITS = ("--working-dir", str(REPOSITORY / "training"), "image_classifier.py", "--data", "digits", "--epochs", "3")
STEPS = 11  # of an epoch


@pytest.fixture(scope="module")
def train(environment: dict[str, str], head: Head, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Train to the end on the head, in a separate folder."""
    with commands(DIRECT, {**environment, **head.variables}, tmp_path_factory.mktemp("work")) as start:

        def run(*arguments: str, **variables: str) -> Run:
            process = start(*arguments, **variables)
            out, err = process.communicate(timeout=SECONDS)
            return subprocess.CompletedProcess(process.args, process.returncode, out, err)

        yield run


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def finished(train: Train, storage: Path, aws_variables: dict[str, str]) -> Run:
    """resnet18 on the digits, from the command line."""
    flags = ("--num-workers", "2", "--storage-path", str(storage), "--run-name", "digits")
    return train(*flags, *DIGITS, RAY_ON_ECS_CLOUDWATCH_NAMESPACE="runs/of the tests", **aws_variables)


@pytest.fixture(scope="module")
def run_folder(finished: Run, storage: Path) -> Path:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return storage / "digits"


def test_two_workers_learn_the_digits(run_folder: Path) -> None:
    result = json.loads((run_folder / "result.json").read_text())
    assert result["metrics"]["test_accuracy"] > 0.9, "resnet18 passes 0.9 on the digits in three epochs"
    assert result["hardware"]["workers"] == 2
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "test_accuracy" in record] == [STEPS, 2 * STEPS, 3 * STEPS]


def test_cloudwatch_has_every_step_and_the_metrics(run_folder: Path, cloudwatch_client: Any) -> None:
    totals = metric_totals(cloudwatch_client, "runs/of the tests")
    progress = totals["RunProgress"]
    assert 3 * STEPS <= progress.sum <= 3 * STEPS + progress.count, "every step, and 1 for a minute without a step"
    assert {"TrainLoss", "TestLoss", "TestAccuracy"} <= set(totals)


def test_weights_load_into_the_plain_model(run_folder: Path) -> None:
    from safetensors.torch import load_file  # they import torch, which takes seconds

    from ray_on_ecs.recipes.image_models import build_model

    for name in ("model.safetensors", "best.safetensors"):
        build_model("resnet18", 1, 10).load_state_dict(load_file(run_folder / name))


def test_user_error_is_named_and_not_retried(train: Train, tmp_path: Path) -> None:
    run = train("--num-workers", "2", "--storage-path", str(tmp_path), *TINY, "--refuse")
    assert run.returncode == 2, run.stdout + run.stderr
    assert "tiny.py: error: refused" in run.stderr
    assert run.stderr.count("\n") == 1
    assert "restarting" not in run.stdout


def test_missing_gpus_are_an_error_after_the_wait(train: Train, tmp_path: Path) -> None:
    run = train("--device=cuda", "--num-workers=2", "--worker-timeout=1", "--storage-path", str(tmp_path), *TINY)
    assert run.returncode == 3
    assert run.stderr.splitlines()[-1].startswith("ray-on-ecs: --num-workers 2 needs a GPU and a CPU for each worker")


def test_missing_bucket_is_one_line_and_status_2(train: Train, aws_variables: dict[str, str]) -> None:
    run = train("--storage-path", "s3://no-such-bucket/runs", *TINY, **aws_variables)
    assert run.returncode == 2
    assert run.stderr.startswith("ray-on-ecs: --storage-path: 's3://no-such-bucket/runs'"), run.stderr
    assert run.stderr.count("\n") == 1


def test_unreachable_cluster_is_one_line(train: Train, tmp_path: Path) -> None:
    run = train("--storage-path", str(tmp_path), *TINY, RAY_ADDRESS="127.0.0.1:9")
    assert run.returncode == 3, run.stderr
    assert run.stderr.startswith("ray-on-ecs: RAY_ADDRESS: no Ray cluster answers at '127.0.0.1:9'"), run.stderr
    assert run.stderr.count("\n") == 1, "Ray would retry forever"
