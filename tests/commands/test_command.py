"""The command as a user types it: a real Ray cluster on this machine, two workers, a real training."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.aws import BUCKET, metric_totals
from tests.commands.conftest import Run
from tests.commands.head import Head
from training.recipes.images.models import resnet18_classifier

pytestmark = pytest.mark.fault
Train = Callable[..., Run]
TINY = ("--model", "own:build", "--dataset", "synthetic", "--samples", "256")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def finished(train: Train, storage: Path, aws_variables: dict[str, str]) -> Run:
    """resnet18 on the digits, from the command line."""
    command = ("--dataset", "digits", "--epochs", "3", "--storage-path", str(storage), "--run-name", "digits")
    return train(*command, RAY_ON_ECS_CLOUDWATCH_NAMESPACE="runs/of the tests", **aws_variables)


@pytest.fixture(scope="module")
def run_folder(finished: Run, storage: Path) -> Path:
    assert finished.returncode == 0, finished.stderr
    return storage / "digits"


def test_two_workers_learn_the_digits(run_folder: Path) -> None:
    result = json.loads((run_folder / "result.json").read_text())
    assert result["metrics"]["test_accuracy"] > 0.9, "resnet18 passes 0.9 on the digits in three epochs"
    assert result["metrics"]["test_samples"] == result["data"]["test_samples"] == 359, "tested on the whole test set"
    assert result["hardware"]["workers"] == 2, "the default where there is no GPU"


def test_the_screen_shows_a_line_a_worker_and_epoch_and_a_table(finished: Run, run_folder: Path) -> None:
    for epoch in range(3):
        for rank in range(2):
            rest = r"Batchsize: 64 \| Steps: 11 \| Total epoch time: [\d.]+\]"
            line = rf"\[Epoch {epoch} \| CPU: Process rank {rank} \| {rest}"
            assert len(re.findall(line, finished.stdout)) == 1, f"epoch {epoch} of rank {rank} is shown once"
    assert "Training result: digits" in finished.stdout
    assert "over all 359 test samples" in finished.stdout, "an accuracy says over what"
    assert str(run_folder) in finished.stdout, "the user is told where the results lie"


def test_everything_promised_is_in_the_storage_path(run_folder: Path) -> None:
    lines = _history(run_folder)
    result = json.loads((run_folder / "result.json").read_text())
    assert [line["epoch"] for line in lines] == [0, 1, 2], "a line an epoch"
    assert lines[-1] == result["metrics"], "the result is the last epoch"
    assert result["config"]["epochs"] == 3
    assert result["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert 0 < result["times"]["to_first_step_seconds"] < result["times"]["total_seconds"]
    assert result["times"]["training_seconds"] > 0
    assert (run_folder / "tensorboard" / "events.out.tfevents.training").stat().st_size > 100
    for name in ("step_seconds_median", "data_wait_fraction", "exposed_comm_fraction"):
        assert lines[-1][name] > 0, f"{name} of two workers is measured"
    with Image.open(run_folder / "curves.png") as picture:
        assert picture.size > (600, 200), "a picture large enough to read"


def test_the_folder_says_how_the_run_has_ended_and_has_a_report_of_it(run_folder: Path) -> None:
    status = json.loads((run_folder / "status.json").read_text())
    known = {"state": "finished", "kind": "images", "epoch": 3, "epochs": 3, "step": 33, "steps_per_epoch": 11}
    assert known.items() <= status.items()
    assert status["loss"] == _history(run_folder)[-1]["train_loss"]
    assert (status["workers"], status["job"], status["cost_usd"]) == (2, None, None)
    report = (run_folder / "report.html").read_text()
    for metrics in _history(run_folder):
        assert f"<td>{metrics['test_accuracy']:.4f}</td>" in report
    best = json.loads((run_folder / "result.json").read_text())["best"]
    assert f"test accuracy {best['test_accuracy']:.4f} in epoch {best['epoch'] + 1} of 3" in report
    assert not (run_folder / "logs").exists(), "what went into a pipe can't be read again"


def test_cloudwatch_has_every_step_and_epoch(run_folder: Path, cloudwatch_client: Any) -> None:
    history, found = _history(run_folder), metric_totals(cloudwatch_client, "runs/of the tests")
    progress = found["RunProgress"]
    assert sum(each["steps"] for each in history) == 33
    assert 33 <= progress.sum <= 33 + progress.count, "every step, and 1 for a minute without any"
    assert found["TestAccuracy"] == (3, pytest.approx(sum(each["test_accuracy"] for each in history)), "None")
    assert found["SamplesPerSecond"].sum == pytest.approx(sum(each["samples_per_second"] for each in history))
    assert {"TrainLoss", "TestLoss"} <= set(found)


def test_the_weights_load_into_the_plain_model(run_folder: Path) -> None:
    resnet18_classifier(1, 10).load_state_dict(torch.load(run_folder / "model.pt", weights_only=True))


def test_the_last_checkpoints_and_the_best_are_kept(run_folder: Path) -> None:
    kept = {path.name for path in run_folder.glob("checkpoint_0*")}
    best = max(_history(run_folder), key=lambda each: each["test_accuracy"])
    result = json.loads((run_folder / "result.json").read_text())
    assert result["best"]["epoch"] == best["epoch"], "the first of several"
    assert result["checkpoints"]["best"] == f"checkpoint_{11 * (best['epoch'] + 1):08d}", "by the steps before it"
    assert result["checkpoints"]["last"] == "checkpoint_00000033"
    assert {result["checkpoints"]["best"], "checkpoint_00000033"} <= kept, "others may have been skipped"


def test_a_finished_run_named_again_says_so_and_trains_nothing(train: Train, run_folder: Path) -> None:
    before = (run_folder / "result.json").stat().st_mtime_ns
    again = train("--dataset", "digits", "--storage-path", str(run_folder.parent), "--run-name", "digits")
    assert again.returncode == 2
    assert "is finished (3 epochs" in again.stderr
    assert "another --run-name" in again.stderr, "the way out is named"
    assert (run_folder / "result.json").stat().st_mtime_ns == before, "its results are untouched"


def test_a_model_that_fails_is_reported_in_one_line_with_the_way_on(train: Train, head: Head) -> None:
    command = ("--model", "own:broken", *TINY[2:], "--num-workers=1", "--max-restarts=0", "--run-name=bad")
    run = train(*command, **head.variables)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ray-on-ecs: training failed on rank"), run.stderr
    assert "RuntimeError" in last, "the cause is named"
    assert "--run-name bad" in last, "and how to go on"
    status = json.loads((head.storage / "bad" / "status.json").read_text())
    assert (status["state"], f"ray-on-ecs: {status['error']}") == ("failed", last)
    report = (head.storage / "bad" / "report.html").read_text()
    assert '<span class="state failed">failed</span>' in report
    assert "RuntimeError" in report
    assert "python -m training --num-workers 1 --run-name bad" in report, "and so do those who read the report"


def test_gpus_that_are_not_there_are_an_error_after_the_wait_not_a_hang(train: Train, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    run = train(*TINY, "--device", "cuda", "--num-workers", "2", "--storage-path", str(tmp_path))
    assert run.returncode == 3
    assert run.stderr.splitlines()[-1].startswith("ray-on-ecs: --num-workers 2 needs a GPU and a CPU for each worker")
    assert list(tmp_path.iterdir()) == [], "nothing was created"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--epochs", "0"), "--epochs: 0"),
        (("--dataset", "cifar"), "--dataset: 'cifar'"),
        (("--dataset", "digits", "--storage-path", "/proc/none/results"), "--storage-path: '/proc/none/results'"),
        (("--dataset", "digits", "--model", "own:nothing"), "--model: 'own:nothing'"),
        (("--data-dir", "/no/such/folder"), "--data-dir: '/no/such/folder'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(train: Train, arguments: tuple[str, ...], named: str) -> None:
    run = train(*arguments)
    assert run.returncode == 2
    assert run.stderr.startswith(f"ray-on-ecs: {named}"), run.stderr
    assert run.stderr.count("\n") == 1, "one line, no traceback"
    assert run.stdout == ""


def test_a_missing_bucket_is_one_line_and_exit_status_2(train: Train, aws_variables: dict[str, str]) -> None:
    run = train("--dataset", "digits", "--storage-path", "s3://no-such-bucket/runs", **aws_variables)
    assert run.returncode == 2
    assert run.stderr.startswith("ray-on-ecs: --storage-path: 's3://no-such-bucket/runs'"), run.stderr
    assert run.stderr.count("\n") == 1


def test_a_cluster_that_does_not_answer_is_one_line(train: Train, tmp_path: Path) -> None:
    run = train(*TINY, "--storage-path", str(tmp_path), RAY_ADDRESS="127.0.0.1:9")
    assert run.returncode == 3, run.stderr
    assert run.stderr.startswith("ray-on-ecs: RAY_ADDRESS: nothing listens at '127.0.0.1:9'"), run.stderr
    assert run.stderr.count("\n") == 1, "Ray itself would try for ever"
    assert list(tmp_path.iterdir()) == [], "nothing was created"


def _history(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _objects(client: Any) -> set[str]:
    """What the bucket holds of the run, by name."""
    found = client.list_objects_v2(Bucket=BUCKET, Prefix="runs/cut/").get("Contents", [])
    return {each["Key"].removeprefix("runs/cut/") for each in found if each["Size"]}


def _status(client: Any) -> dict[str, Any]:
    return json.loads("".join(_lines(client, "status.json")))


def _lines(client: Any, name: str) -> list[str]:
    if name not in _objects(client):
        return []
    return client.get_object(Bucket=BUCKET, Key=f"runs/cut/{name}")["Body"].read().decode().splitlines()
