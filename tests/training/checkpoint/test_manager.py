"""Checkpoints: a run that is cut anywhere ends as one that wasn't, and nothing that is stored is lost or half there."""

import json
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.training.ranks import Ranks
from tests.waiting import until
from training.checkpoint import snapshot
from training.checkpoint.manager import CheckpointManager, Preempted, Preemption
from training.checkpoint.store import CheckpointStore
from training.errors import StorageError
from training.recipes.images import datasets, models
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset
from training.recipes.images.recipe import IMAGES
from training.recipes.images.trainer import ImageMetrics, ImageTrainer
from training.run import layout, results
from training.run.storage import RunStorage

CPU = torch.device("cpu")
Config = Callable[..., ImageConfig]


class Cut(Exception):
    """A run is cut off here."""


class Forgetful(nn.Module):
    """A small network that draws from every source of chance, and has running statistics."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(648, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        import random

        import numpy as np

        noise = 0.01 * (random.random() + np.random.random()) if self.training else 0.0
        return self.last(self.first(images) + noise)


def plain(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 4, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(324, classes))


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "forgetful", Forgetful)


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "test")


def train(config: ImageConfig, dataset: Dataset, cut: int | None = None) -> ImageTrainer:
    """Train on, to the end or until a step was made; a checkpoint is taken after every step."""
    trainer = ImageTrainer(config, dataset, CPU)

    def on_step(step: int, steps: int) -> None:
        until(lambda: not checkpoints.storing, 180, between=0.005)  # else no checkpoint would be saved after this step
        checkpoints.step(step, steps)
        if trainer.step == cut:
            raise Cut

    with CheckpointManager(
        trainer, RunStorage.open(config.storage_path, str(config.run_name)), config, score=SCORE
    ) as checkpoints:
        checkpoints.resume()
        while trainer.epoch < config.epochs:
            trainer.run_epoch(on_step)
            checkpoints.save()
    return trainer


def curve(trainer: ImageTrainer) -> list[dict[str, Any]]:
    """What was learned, without what depends on the clock."""
    kept = ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "learning_rate", "train_samples")
    return [{name: each[name] for name in kept} for each in trainer.history]


def same(one: ImageTrainer, other: ImageTrainer) -> bool:
    """Whether two trainers are equal to the last bit."""
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs) and curve(one) == curve(other)


SCORE = IMAGES.score
SETTINGS = {"model": "forgetful", "epochs": 2, "batch_size": 256, "checkpoint_seconds": 0.0}


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 6, 8, 9])
def test_a_run_that_is_cut_anywhere_ends_as_one_that_was_not(config: Config, digits: Dataset, cut: int) -> None:
    whole = train(config(**SETTINGS, run_name="whole"), digits)
    assert whole.steps_per_epoch == 5, "the cuts are in the middle and at the ends of the epochs"
    settings = config(**SETTINGS)
    with pytest.raises(Cut):
        train(settings, digits, cut)
    torch.manual_seed(99)
    assert same(train(settings, digits), whole), "optimizer, schedule, order, chance or count was not restored"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_that_is_cut_again_and_again_ends_as_well(config: Config, digits: Dataset, optimizer: str) -> None:
    whole = train(config(**SETTINGS, optimizer=optimizer, run_name="whole"), digits)
    settings = config(**SETTINGS, optimizer=optimizer)
    for cut in (2, 3, 6):
        with pytest.raises(Cut):
            train(settings, digits, cut)
    assert same(train(settings, digits), whole)


def train_rank(rank: int, ranks: int, config: ImageConfig, dataset: Dataset, cut: int | None = None) -> Any:
    """What a rank has at the end; None if it is cut."""
    models.MODELS.update(forgetful=Forgetful, plain=plain)
    try:
        trainer = train(config, dataset, cut)
    except Cut:
        return None
    return {"weights": trainer.model.state_dict(), "curve": curve(trainer), "epoch": trainer.history[-1]}


@pytest.mark.parametrize(("ranks", "cut"), [(2, 9), (3, 2), (3, 9)])
def test_several_ranks_that_are_cut_end_as_if_they_were_not(
    config: Config, digits: Dataset, on_ranks: Ranks, ranks: int, cut: int
) -> None:
    # BatchNormGroups of 32 images and buckets of 10 kB: each rank has several of both.
    settings = {**SETTINGS, "batch_size": 64, "norm_batch": 32, "bucket_mb": 0.01}
    whole = on_ranks(ranks, train_rank, config(**settings, run_name="whole"), digits)
    assert on_ranks(ranks, train_rank, config(**settings), digits, cut) == [None] * ranks
    again = on_ranks(ranks, train_rank, config(**settings), digits)
    for before, after in zip(whole, again, strict=True):
        assert before["curve"] == after["curve"]
        assert all(torch.equal(value, after["weights"][name]) for name, value in before["weights"].items()), (
            "a rank's running statistics, or the order in which gradients are added up, was another"
        )


@pytest.mark.parametrize("fewer", [1, 3])
def test_fewer_workers_make_the_same_steps(config: Config, digits: Dataset, on_ranks: Ranks, fewer: int) -> None:
    settings = config(model="plain", epochs=2, num_workers="1:4")
    whole = on_ranks(4, train_rank, settings, digits)
    less = on_ranks(fewer, train_rank, config(**{**vars(settings), "run_name": "less"}), digits)
    for one, other in zip(whole[0]["curve"], less[0]["curve"], strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4), "the global batch is another"
        assert other["learning_rate"] == one["learning_rate"], "the schedule is another"
    for name, value in whole[0]["weights"].items():
        torch.testing.assert_close(less[0]["weights"][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_a_run_goes_on_with_another_number_of_workers(
    config: Config, digits: Dataset, on_ranks: Ranks, before: int, after: int
) -> None:
    settings = {"model": "forgetful", "epochs": 3, "num_workers": "1:3", "checkpoint_seconds": 0.0}
    on_ranks(before, train_rank, config(**settings), digits, 10)
    ended = on_ranks(after, train_rank, config(**settings), digits)[0]
    assert ended["epoch"]["global_batch"] == 3 * 64
    assert [each["train_samples"] for each in ended["curve"]] == [7 * 192] * 3, "an image was lost or counted twice"
    assert ended["epoch"]["test_accuracy"] > 0.6, "it has gone on learning"


def stored(config: ImageConfig, dataset: Dataset, storage: RunStorage, steps: int) -> ImageTrainer:
    """A run of which a checkpoint is taken after each of its first steps."""
    with pytest.raises(Cut):
        train(config, dataset, steps + 1)
    return ImageTrainer(config, dataset, CPU)


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:100]), "bytes"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"), "holds something else"),
        (lambda file: file.unlink(), "missing"),
    ],
    ids=["truncated", "changed", "lost"],
)
@pytest.mark.parametrize("name", ["model.pt", "training_state.pt"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(
    config: Config,
    digits: Dataset,
    storage: RunStorage,
    capsys: pytest.CaptureFixture[str],
    name: str,
    harm: Any,
    word: str,
) -> None:
    settings = config(**SETTINGS)
    trainer = stored(settings, digits, storage, 3)
    newest = CheckpointStore(storage, 3, SCORE).names[-1]
    harm(Path(storage.path(newest, name)))
    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        checkpoints.resume()
    assert 0 < trainer.step < int(newest.removeprefix("checkpoint_"))
    assert f"{newest} is not whole ({name}" in (said := capsys.readouterr().out)
    assert word in said
    assert f"resuming from checkpoint_{trainer.step:08d}" in said


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"files": {}}'])
def test_a_checkpoint_that_was_not_finished_is_none(
    config: Config, digits: Dataset, storage: RunStorage, content: str | None
) -> None:
    stored(config(**SETTINGS), digits, storage, 3)
    *_, before, newest = CheckpointStore(storage, 3, SCORE).names
    manifest = Path(storage.path(newest, "checkpoint.json"))
    manifest.unlink() if content is None else manifest.write_text(content)
    assert CheckpointStore(storage, 3, SCORE).names[-1] == before


def test_a_run_without_one_whole_checkpoint_starts_anew(config: Config, digits: Dataset, storage: RunStorage) -> None:
    settings = config(**SETTINGS)
    trainer = stored(settings, digits, storage, 3)
    for name in CheckpointStore(storage, 3, SCORE).names:
        Path(storage.path(name, "model.pt")).write_bytes(b"")
    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        checkpoints.resume()
    assert trainer.step == 0


def test_the_last_ones_and_the_best_are_kept(config: Config, digits: Dataset, storage: RunStorage) -> None:
    accuracies = [0.2, 0.9, 0.9, 0.4, 0.5, 0.6]
    trainer = ImageTrainer(config(**SETTINGS, keep_checkpoints=2), digits, CPU)
    store = CheckpointStore(storage, 2, SCORE)
    for accuracy in accuracies:
        trainer.history.append(cast("ImageMetrics", {SCORE: accuracy}))
        put(store, trainer, Path(storage.base) / "new")
    assert store.names == storage.folders("checkpoint_") == [f"checkpoint_{n * 5:08d}" for n in (2, 5, 6)]
    assert store.best == "checkpoint_00000010", "the earliest of the best"
    manifest = json.loads(storage.read("checkpoint_00000010/checkpoint.json"))
    assert (manifest["epochs"], manifest["score"]) == (2, 0.9)
    assert CheckpointStore(storage, 2, SCORE).names == store.names, "whoever comes later finds the same"


def put(store: CheckpointStore, trainer: ImageTrainer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    taken = snapshot.take(trainer)
    assert taken is not None
    store.put(taken, folder)


def test_weights_are_a_plain_state_dict(config: Config, digits: Dataset, storage: RunStorage) -> None:
    trainer = ImageTrainer(
        config(model="resnet18"), datasets.load("synthetic", config(dataset="synthetic", samples=100)), CPU
    )
    put(CheckpointStore(storage, 1, SCORE), trainer, Path(storage.base) / "new")
    weights = torch.load(storage.path("checkpoint_00000000", "model.pt"), weights_only=True)
    models.find("resnet18")(1, 10).load_state_dict(weights)


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each file of a checkpoint take so long to be stored."""
    upload = RunStorage.upload

    def slowly(self: RunStorage, file: Path, name: str) -> None:
        time.sleep(seconds)
        upload(self, file, name)

    monkeypatch.setattr(RunStorage, "upload", slowly)


def test_training_goes_on_while_a_checkpoint_is_stored(
    config: Config, digits: Dataset, storage: RunStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, upload = threading.Event(), RunStorage.upload

    def wait_and_upload(self: RunStorage, file: Path, name: str) -> None:
        assert trained.wait(180), "the training waits for the checkpoint"
        upload(self, file, name)

    monkeypatch.setattr(RunStorage, "upload", wait_and_upload)
    settings = config(**SETTINGS)
    trainer = ImageTrainer(settings, digits, CPU)
    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        checkpoints.resume()
        checkpoints.save()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        waited = checkpoints.waited
        trainer.run_epoch()
        assert not storage.exists("checkpoint_00000000/checkpoint.json")
        trained.set()
    found = torch.load(storage.path("checkpoint_00000000", "model.pt"), weights_only=True)
    assert all(torch.equal(value, found[name]) for name, value in weights.items()), "what was stored is of that step"
    assert checkpoints.waited == waited, "it stood for the copy alone"


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let so many checkpoints fail to be stored."""
    left = [times]
    upload = RunStorage.upload

    def fail(self: RunStorage, file: Path, name: str) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError("AWS Error SLOW_DOWN: please slow down")
        upload(self, file, name)

    monkeypatch.setattr(RunStorage, "upload", fail)


def test_lost_checkpoints_cost_no_run_until_too_many_are_missing(
    config: Config, digits: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, 2)
    settings = config(**SETTINGS, max_failed_checkpoints=2)
    assert train(settings, digits).epoch == 2
    assert "2 in a row failed, --max-failed-checkpoints is 2" in capsys.readouterr().out
    failing(monkeypatch, 100)
    with pytest.raises(StorageError, match=r"3 checkpoints in a row could not be stored \(SLOW_DOWN"):
        train(config(**SETTINGS, max_failed_checkpoints=2, run_name="other"), digits)


def test_a_run_is_not_over_without_its_last_checkpoint(
    config: Config, digits: Dataset, storage: RunStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(model="forgetful", epochs=1, max_failed_checkpoints=0)
    failing(monkeypatch, 1)
    trainer = train(settings, digits)
    assert CheckpointStore(storage, 1, SCORE).names == [f"checkpoint_{trainer.step:08d}"], "it is tried once more"
    failing(monkeypatch, 100)
    with pytest.raises(StorageError, match="the last checkpoint could not be stored"):
        train(config(model="forgetful", epochs=1, run_name="other"), digits)


def test_a_full_disk_costs_the_checkpoint(
    config: Config, digits: Dataset, storage: RunStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(**SETTINGS)
    trainer = ImageTrainer(settings, digits, CPU)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        checkpoints.resume()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            checkpoints.save()
            until(lambda: not checkpoints.storing, 180)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "the checkpoint of step 0 could not be stored" in capsys.readouterr().out
    assert CheckpointStore(storage, 1, SCORE).names == ["checkpoint_00000000"], "there is room again"


def test_metrics_that_were_lost_after_the_last_epoch_come_with_the_results(
    config: Config, digits: Dataset, storage: RunStorage
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("AWS Error SLOW_DOWN: please slow down")

    settings = config(**SETTINGS).resolve_defaults()
    trainer = ImageTrainer(settings, digits, CPU)
    with CheckpointManager(trainer, storage, settings, score=SCORE, on_epoch_saved=fail) as checkpoints:
        checkpoints.resume()
        for _ in range(settings.epochs):
            trainer.run_epoch()
            checkpoints.save()
        until(lambda: not checkpoints.storing, 180)
    assert not storage.exists(layout.METRICS)
    results.write_results(storage, IMAGES, settings, results.run_summary(trainer, checkpoints.summary), None)
    assert len(storage.read(layout.METRICS).splitlines()) == settings.epochs


def test_what_is_left_of_a_lost_checkpoint_goes_with_the_next(
    config: Config, digits: Dataset, storage: RunStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, store = ImageTrainer(config(**SETTINGS), digits, CPU), CheckpointStore(storage, 1, SCORE)
    upload = RunStorage.upload

    def fail(self: RunStorage, file: Path, name: str) -> None:
        upload(self, file, name)
        raise OSError("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(RunStorage, "upload", fail)
        with pytest.raises(OSError, match="the answer was lost"):
            put(store, trainer, tmp_path / "new")
    assert storage.folders("checkpoint_") == ["checkpoint_00000000"]
    trainer.run_epoch()
    put(store, trainer, tmp_path / "new")
    assert storage.folders("checkpoint_") == store.names == ["checkpoint_00000005"]


@pytest.mark.parametrize(("stall_timeout", "seen"), [(600.0, True), (0.5, False)])
def test_who_waits_too_long_for_a_checkpoint_gives_no_sign_of_life(
    config: Config,
    digits: Dataset,
    storage: RunStorage,
    monkeypatch: pytest.MonkeyPatch,
    stall_timeout: float,
    seen: bool,
) -> None:
    slow(monkeypatch, 1.0)
    settings = config(**SETTINGS, stall_timeout=stall_timeout)
    signs: list[float] = []
    checkpoints = CheckpointManager(
        ImageTrainer(settings, digits, CPU), storage, settings, score=SCORE, heartbeat=lambda: signs.append(time.time())
    )
    with checkpoints:
        checkpoints.resume()
        checkpoints.save()
    assert bool(signs) is seen


def test_a_notice_has_the_step_stored_before_the_ranks_leave(
    config: Config, digits: Dataset, storage: RunStorage
) -> None:
    settings = config(model="forgetful", epochs=2)
    trainer = ImageTrainer(settings, digits, CPU)
    notices = iter([None, None, Preemption([0], time.time() + 30)])
    checkpoints = CheckpointManager(trainer, storage, settings, score=SCORE, preemption=lambda: next(notices))
    with checkpoints:
        checkpoints.resume()
        with pytest.raises(Preempted):
            trainer.run_epoch(checkpoints.step)
    assert CheckpointStore(storage, 1, SCORE).names == [f"checkpoint_{trainer.step:08d}"]
    assert 0 < trainer.step < trainer.steps_per_epoch, "in the middle of the epoch"
