"""Checkpoints: a run that is cut anywhere ends as one that wasn't, and nothing that is stored is lost or half there."""

import json
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.nodes import until
from tests.training.ranks import Ranks
from training import checkpoint, data, model, results
from training.config import TrainingConfig
from training.data import Dataset
from training.errors import StorageError
from training.keeper import Keeper, Leave
from training.loop import Replica
from training.storage import METRICS, RunStorage
from training.store import CheckpointStore

CPU = torch.device("cpu")
Config = Callable[..., TrainingConfig]


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
    monkeypatch.setitem(model.MODELS, "forgetful", Forgetful)


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "test")


def train(config: TrainingConfig, dataset: Dataset, cut: int | None = None) -> Replica:
    """Train on, to the end or until a step was made; a checkpoint is taken after every step."""
    replica = Replica(config, dataset, CPU)

    def on_step(step: int, steps: int) -> None:
        until(lambda: not keeper.storing, 180, between=0.005)  # else no checkpoint would be taken after this step
        keeper.step(step, steps)
        if replica.step == cut:
            raise Cut

    with Keeper(replica, RunStorage.open(config.storage_path, str(config.run_name)), config) as keeper:
        keeper.resume()
        while replica.epoch < config.epochs:
            replica.run_epoch(on_step)
            keeper.save()
    return replica


def curve(replica: Replica) -> list[dict[str, Any]]:
    """What was learned, without what depends on the clock."""
    kept = ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "learning_rate", "train_samples")
    return [{name: each[name] for name in kept} for each in replica.history]


def same(one: Replica, other: Replica) -> bool:
    """Whether two replicas are equal to the last bit."""
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs) and curve(one) == curve(other)


SETTINGS = {"model": "forgetful", "epochs": 2, "batch_size": 256, "checkpoint_seconds": 0.0}


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 6, 8, 9])
def test_a_run_that_is_cut_anywhere_ends_as_one_that_was_not(config: Config, digits: Dataset, cut: int) -> None:
    whole = train(config(**SETTINGS, run_name="whole"), digits)
    assert whole.steps == 5, "the cuts are in the middle and at the ends of the epochs"
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


def train_rank(rank: int, ranks: int, config: TrainingConfig, dataset: Dataset, cut: int | None = None) -> Any:
    """What a rank has at the end; None if it is cut."""
    model.MODELS.update(forgetful=Forgetful, plain=plain)
    try:
        replica = train(config, dataset, cut)
    except Cut:
        return None
    return {"weights": replica.model.state_dict(), "curve": curve(replica), "epoch": replica.history[-1]}


@pytest.mark.parametrize(("ranks", "cut"), [(2, 9), (3, 2), (3, 9)])
def test_several_ranks_that_are_cut_end_as_if_they_were_not(
    config: Config, digits: Dataset, on_ranks: Ranks, ranks: int, cut: int
) -> None:
    # Groups of 32 images and buckets of 10 kB: each rank has several of both.
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


def stored(config: TrainingConfig, dataset: Dataset, storage: RunStorage, steps: int) -> Replica:
    """A run of which a checkpoint is taken after each of its first steps."""
    with pytest.raises(Cut):
        train(config, dataset, steps + 1)
    return Replica(config, dataset, CPU)


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
    replica = stored(settings, digits, storage, 3)
    newest = CheckpointStore(storage, 3).names[-1]
    harm(Path(storage.path(newest, name)))
    with Keeper(replica, storage, settings) as keeper:
        keeper.resume()
    assert 0 < replica.step < int(newest.removeprefix("checkpoint_"))
    assert f"{newest} is not whole ({name}" in (said := capsys.readouterr().out)
    assert word in said
    assert f"going on from checkpoint_{replica.step:08d}" in said


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"files": {}}'])
def test_a_checkpoint_that_was_not_finished_is_none(
    config: Config, digits: Dataset, storage: RunStorage, content: str | None
) -> None:
    stored(config(**SETTINGS), digits, storage, 3)
    *_, before, newest = CheckpointStore(storage, 3).names
    manifest = Path(storage.path(newest, "checkpoint.json"))
    manifest.unlink() if content is None else manifest.write_text(content)
    assert CheckpointStore(storage, 3).names[-1] == before


def test_a_run_without_one_whole_checkpoint_starts_anew(config: Config, digits: Dataset, storage: RunStorage) -> None:
    settings = config(**SETTINGS)
    replica = stored(settings, digits, storage, 3)
    for name in CheckpointStore(storage, 3).names:
        Path(storage.path(name, "model.pt")).write_bytes(b"")
    with Keeper(replica, storage, settings) as keeper:
        keeper.resume()
    assert replica.step == 0


def test_the_last_ones_and_the_best_are_kept(config: Config, digits: Dataset, storage: RunStorage) -> None:
    accuracies = [0.2, 0.9, 0.9, 0.4, 0.5, 0.6]
    replica = Replica(config(**SETTINGS, keep_checkpoints=2), digits, CPU)
    store = CheckpointStore(storage, 2)
    for accuracy in accuracies:
        replica.history.append({"test_accuracy": accuracy})
        put(store, replica, Path(storage.base) / "new")
    assert store.names == storage.folders("checkpoint_") == [f"checkpoint_{n * 5:08d}" for n in (2, 5, 6)]
    assert store.best == "checkpoint_00000010", "the earliest of the best"
    manifest = json.loads(storage.read("checkpoint_00000010/checkpoint.json"))
    assert (manifest["epochs"], manifest["test_accuracy"]) == (2, 0.9)
    assert CheckpointStore(storage, 2).names == store.names, "whoever comes later finds the same"


def put(store: CheckpointStore, replica: Replica, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = checkpoint.take(replica)
    assert snapshot is not None
    store.put(snapshot, folder)


def test_weights_are_a_plain_state_dict(config: Config, digits: Dataset, storage: RunStorage) -> None:
    replica = Replica(config(model="resnet18"), data.load("synthetic", config(dataset="synthetic", samples=100)), CPU)
    put(CheckpointStore(storage, 1), replica, Path(storage.base) / "new")
    weights = torch.load(storage.path("checkpoint_00000000", "model.pt"), weights_only=True)
    model.find("resnet18")(1, 10).load_state_dict(weights)


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
    replica = Replica(settings, digits, CPU)
    with Keeper(replica, storage, settings) as keeper:
        keeper.resume()
        keeper.save()
        weights = {name: value.clone() for name, value in replica.model.state_dict().items()}
        waited = keeper.waited
        replica.run_epoch()
        assert not storage.exists("checkpoint_00000000/checkpoint.json")
        trained.set()
    found = torch.load(storage.path("checkpoint_00000000", "model.pt"), weights_only=True)
    assert all(torch.equal(value, found[name]) for name, value in weights.items()), "what was stored is of that step"
    assert keeper.waited == waited, "it stood for the copy alone"


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
    settings = config(**SETTINGS, max_stale=2)
    assert train(settings, digits).epoch == 2
    assert "2 in a row are missing, 2 may be (--max-stale)" in capsys.readouterr().out
    failing(monkeypatch, 100)
    with pytest.raises(StorageError, match=r"3 checkpoints in a row could not be stored \(SLOW_DOWN"):
        train(config(**SETTINGS, max_stale=2, run_name="other"), digits)


def test_a_run_is_not_over_without_its_last_checkpoint(
    config: Config, digits: Dataset, storage: RunStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(model="forgetful", epochs=1, max_stale=0)
    failing(monkeypatch, 1)
    replica = train(settings, digits)
    assert CheckpointStore(storage, 1).names == [f"checkpoint_{replica.step:08d}"], "it is tried once more"
    failing(monkeypatch, 100)
    with pytest.raises(StorageError, match="the last checkpoint could not be stored"):
        train(config(model="forgetful", epochs=1, run_name="other"), digits)


def test_a_full_disk_costs_the_checkpoint(
    config: Config, digits: Dataset, storage: RunStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(**SETTINGS)
    replica = Replica(settings, digits, CPU)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Keeper(replica, storage, settings) as keeper:
        keeper.resume()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            keeper.save()
            until(lambda: not keeper.storing, 180)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "the checkpoint of step 0 could not be stored" in capsys.readouterr().out
    assert CheckpointStore(storage, 1).names == ["checkpoint_00000000"], "there is room again"


def test_metrics_that_were_lost_after_the_last_epoch_come_with_the_results(
    config: Config, digits: Dataset, storage: RunStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("AWS Error SLOW_DOWN: please slow down")

    settings = config(**SETTINGS).completed()
    replica = Replica(settings, digits, CPU)
    with Keeper(replica, storage, settings) as keeper, monkeypatch.context() as patch:
        patch.setattr(results, "note", fail)
        keeper.resume()
        for _ in range(settings.epochs):
            replica.run_epoch()
            keeper.save()
        until(lambda: not keeper.storing, 180)
    assert not storage.exists(METRICS)
    results.write(storage, settings, results.outcome(replica, digits, keeper.stored), None)
    assert len(storage.read(METRICS).splitlines()) == settings.epochs


def test_what_is_left_of_a_lost_checkpoint_goes_with_the_next(
    config: Config, digits: Dataset, storage: RunStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, store = Replica(config(**SETTINGS), digits, CPU), CheckpointStore(storage, 1)
    upload = RunStorage.upload

    def fail(self: RunStorage, file: Path, name: str) -> None:
        upload(self, file, name)
        raise OSError("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(RunStorage, "upload", fail)
        with pytest.raises(OSError, match="the answer was lost"):
            put(store, replica, tmp_path / "new")
    assert storage.folders("checkpoint_") == ["checkpoint_00000000"]
    replica.run_epoch()
    put(store, replica, tmp_path / "new")
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
    keeper = Keeper(Replica(settings, digits, CPU), storage, settings, alive=lambda: signs.append(time.time()))
    with keeper:
        keeper.resume()
        keeper.save()
    assert bool(signs) is seen


def test_a_notice_has_the_step_stored_before_the_ranks_leave(
    config: Config, digits: Dataset, storage: RunStorage
) -> None:
    settings = config(model="forgetful", epochs=2)
    replica = Replica(settings, digits, CPU)
    notices = iter([None, None, time.time() + 30])
    keeper = Keeper(replica, storage, settings, lambda: next(notices))
    with keeper:
        keeper.resume()
        with pytest.raises(Leave):
            replica.run_epoch(keeper.step)
    assert CheckpointStore(storage, 1).names == [f"checkpoint_{replica.step:08d}"]
    assert 0 < replica.step < replica.steps, "in the middle of the epoch"
