"""Comparisons by the benchmarks' measurements."""

import gzip
import io
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.lazy import Lazy

checkpointer, gpu, images = Lazy("bench.checkpointer"), Lazy("bench.gpu"), Lazy("bench.images")
preprocess, report, time_to_accuracy = Lazy("bench.preprocess"), Lazy("bench.report"), Lazy("bench.time_to_accuracy")
recipe_images = Lazy("ray_on_ecs.recipes.images")


def reference(*accuracies: float) -> list[dict[str, Any]]:
    return [{"seconds": 10.0, "test_accuracy": accuracy} for accuracy in accuracies]


def ours(*accuracies: float) -> list[dict[str, Any]]:
    return [{"seconds": 5.0, "test_accuracy": accuracy} for accuracy in accuracies]


def test_epochs_of_the_references_log() -> None:
    printed = ""
    for pid, seconds in ((71, "20.0"), (72, "25.0")):
        worker = f"\x1b[36m(RayTrainWorker {pid})\x1b[0m"
        printed += f"{worker} [Epoch 0 | CPU: rank 0 | Batchsize: 100 | Steps: 50 | Total epoch time: {seconds}]\n"
        printed += f"{worker} [Epoch 1 | CPU: rank 0 | Batchsize: 100 | Steps: 50 | Total epoch time: 1e+02]\n"
    printed += (
        f"{worker} epoch 0, train_loss 0.81, test_loss 0.6, test_accuracy 0.7855, seconds 21.25\n"
        f"{worker} epoch 1, train_loss 0.51, test_loss 1.2e-05, test_accuracy 1, seconds 102\n"
        "Result(metrics={'epoch': 1, 'test_accuracy': 1.0, 'seconds': 102.0}, path='/tmp')\n"
    )
    assert time_to_accuracy.read_epochs(printed) == [
        {"seconds": 21.25, "test_accuracy": 0.7855, "samples_per_second": 400.0},
        {"seconds": 102.0, "test_accuracy": 1.0, "samples_per_second": 100.0},
    ]


def test_throughput_skips_the_first_epoch() -> None:
    runs = [[{"samples_per_second": speed} for speed in speeds] for speeds in ((1, 100, 300), (1000, 200, 200))]
    faster = [[{"samples_per_second": speed} for speed in speeds] for speeds in ((1, 300), (1, 500))]
    comparison = time_to_accuracy.compare_speed(runs, faster)
    assert (comparison.ratio, comparison.reached) == (2.0, True)
    assert time_to_accuracy.compare_speed(faster, runs).reached is False


def test_the_images_are_made_of_a_few(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    for name in recipe_images.FILES:
        is_train, dimensions = name.startswith("train"), 3 if "images" in name else 1
        shape = (20, 28, 28)[:dimensions]
        content = bytes([0, 0, 8, dimensions]) + struct.pack(f">{dimensions}I", *shape)
        size = math.prod(shape) // 20
        content += bytes(number % 10 * (1 if dimensions == 1 else 20) for number in range(20) for _ in range(size))
        (source / (f"{name}.gz" if is_train else name)).write_bytes(gzip.compress(content) if is_train else content)
    images.write(source, tmp_path, 200, 50)
    data = recipe_images.fashion_mnist(tmp_path)
    assert data.train[0].shape == (200, 1, 28, 28)
    assert data.train[1].bincount().tolist() == [20] * 10
    assert data.test[1].bincount().tolist() == [5] * 10
    brightness = data.train[0].float().mean((1, 2, 3))
    assert ((brightness - 20 * data.train[1]).abs() < 8).all(), "a blend of images of its class"


def test_goal_is_the_references_mean_accuracy() -> None:
    comparison = time_to_accuracy.compare(
        [reference(0.5, 0.9, 0.8), reference(0.5, 0.6, 0.7)], [ours(0.74, 0.76), ours(0.8, 0.9)]
    )
    assert comparison.data["goal"] == pytest.approx(0.75)
    assert comparison.ratio == pytest.approx(30 / 7.5)
    assert comparison.reached, "at least 3 times"
    assert "first reaches it in epoch 2, none" in comparison.note
    assert "would make the ratio 3.3" in comparison.note


def test_one_missed_seed_misses_the_target() -> None:
    comparison = time_to_accuracy.compare([reference(0.8)] * 2, [ours(0.9), ours(0.7)])
    assert comparison.reached is False
    assert "1 of 2" in comparison.note


def test_unreached_goal_misses_the_target() -> None:
    assert time_to_accuracy.compare([reference(0.8)], [ours(0.7)]).reached is False


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    comparison = gpu.measure(None)
    assert [(each.ratio, each.reached) for each in comparison] == [(None, None)] * 2


@pytest.mark.fault  # takes two minutes
def test_language_model_prints_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CONTEXT", 32)
    monkeypatch.setattr(gpu, "SIDE", 256)
    small = {**gpu.MODEL, "vocab_size": 4000, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1}
    comparison = gpu.language(gpu.torch.device("cpu"), small, ("--global-batch-size=2", "--max-steps=20"))
    assert comparison.ratio is not None, comparison.note
    assert comparison.n == 1


def test_table_shows_reached_and_missed_targets() -> None:
    comparisons = [
        report.Comparison(name="fast", reference="1", ours="2", ratio=2, target=report.at_least(2, 1)),
        report.Comparison(name="small", reference="1", ours="2", ratio=2, target=report.at_most(2, 1)),
        report.Comparison(name="unmeasured", reference="1", ours="-", ratio=None, target=report.Target("at least 3")),
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table([report.document("all", comparisons, (0, 1))]))
    text = console.export_text()
    assert "at least 1: reached" in text
    assert "at most 1: missed" in text
    assert "at least 3:" not in text
    assert "torch" in text
    assert "seeds 0, 1" in text


def test_one_new_benchmark_keeps_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name in ("second", "first", "second"):
        comparison = report.Comparison(
            name=f"{name} thing", reference="1", ours="2", ratio=2, target=report.at_least(2, 1)
        )
        report.write(report.document(name, [comparison], (0,)), ["first", "second"])
    text = (tmp_path / "table.txt").read_text()
    assert 0 < text.index("first thing") < text.index("second thing")
    assert text.count("second thing") == 1


def test_result_has_a_hidden_cpus_model() -> None:
    info = {"model name": "Intel(R) Xeon(R) Processor", "cpu family": "6", "model": "143"}
    assert report.cpu_model(info) == "Intel(R) Xeon(R) Processor, family 6 model 143"


def test_speeds_of_the_preprocess_log() -> None:
    printed = (
        "(RayTrainWorker pid=7) epoch 0: loss 1.0986, 384 images, 34.5 a second, prepared on {'127.0.0.2': 384}\n"
        "(RayTrainWorker pid=7) epoch 2: loss 0.2, 384 images, 120.0 a second, prepared on {'127.0.0.3': 384}\n"
    )
    assert preprocess.read_speeds(printed) == [34.5, 120.0]


def test_a_checkpoint_is_compared_round_by_round() -> None:
    seconds = {checkpointer.OURS: [1.0, 1.0, 9.0], checkpointer.TO_DISK: [2.0, 4.0, 3.0]}
    comparison = checkpointer.compare(checkpointer.TO_DISK, seconds)
    assert comparison.ratio == 0.5
    assert comparison.reached
