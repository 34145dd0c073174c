"""Checkpoints: a run that is cut anywhere ends as one that wasn't, and nothing that is stored is lost or half there."""

import json
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_on_ecs.checkpoint import dcp, manager, manifest, saver
from ray_on_ecs.checkpoint.manager import CheckpointManager, Preempted
from ray_on_ecs.checkpoint.preemption import Preemption
from ray_on_ecs.checkpoint.saver import AsyncSaver
from ray_on_ecs.checkpoint.snapshot import load_weights
from ray_on_ecs.checkpoint.store import CheckpointStore
from ray_on_ecs.errors import StorageError
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.storage import RunStorage
from tests.aws import BUCKET
from tests.flaky_s3 import flaky_proxy
from tests.training.ranks import Ranks
from tests.waiting import until
from training import results
from training.recipes.language import recipe
from training.recipes.language.config import LanguageConfig
from training.recipes.language.corpus import Corpus
from training.recipes.language.model import random_weights
from training.recipes.language.recipe import LANGUAGE
from training.recipes.language.trainer import LanguageTrainer

CPU = torch.device("cpu")
Config = Callable[..., LanguageConfig]


class Cut(Exception):
    """A run is cut off here."""


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "test")


def make(config: LanguageConfig, text: Corpus) -> LanguageTrainer:
    shape = recipe._shape(config, text.tokenizer.get_vocab_size())
    return LanguageTrainer(config, shape, random_weights(config.seed, shape.layers), text, CPU)


def train(config: LanguageConfig, text: Corpus, cut: int | None = None) -> LanguageTrainer:
    """Train on, to the end or until a step was made; a checkpoint is taken after every step."""
    trainer = make(config, text)

    def on_step(step: int, steps: int) -> None:
        until(
            lambda: not checkpoints.save_in_progress, 180, between=0.005
        )  # else no checkpoint would be saved after this step
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


def curve(trainer: LanguageTrainer) -> list[dict[str, Any]]:
    """What was learned, without what depends on the clock."""
    kept = ("epoch", "train_loss", "test_loss", "learning_rate", "train_tokens")
    return [{name: each[name] for name in kept} for each in trainer.history]


def same(one: LanguageTrainer, other: LanguageTrainer) -> bool:
    """Whether two trainers are equal to the last bit."""
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs) and curve(one) == curve(other)


SCORE = LANGUAGE.score
SETTINGS = {"epochs": 2, "max_steps": 10, "checkpoint_seconds": 0.0}


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 6, 8, 9])
def test_a_run_that_is_cut_anywhere_ends_as_one_that_was_not(config: Config, code: Corpus, cut: int) -> None:
    whole = train(config(**SETTINGS, run_name="whole"), code)
    assert whole.steps_per_epoch == 5, "the cuts are in the middle and at the ends of the epochs"
    settings = config(**SETTINGS)
    with pytest.raises(Cut):
        train(settings, code, cut)
    torch.manual_seed(99)
    assert same(train(settings, code), whole), "optimizer, order, chance or count was not restored"


def test_a_run_that_is_cut_again_and_again_ends_as_well(config: Config, code: Corpus) -> None:
    whole = train(config(**SETTINGS, run_name="whole"), code)
    settings = config(**SETTINGS)
    for cut in (2, 3, 6):
        with pytest.raises(Cut):
            train(settings, code, cut)
    assert same(train(settings, code), whole)


def train_rank(rank: int, ranks: int, config: LanguageConfig, text: Corpus, cut: int | None = None) -> Any:
    """What a rank has at the end; None if it is cut."""
    try:
        trainer = train(config, text, cut)
    except Cut:
        return None
    return {"weights": trainer.model.state_dict(), "curve": curve(trainer), "epoch": trainer.history[-1]}


@pytest.mark.parametrize("cut", [2, 9])
def test_several_ranks_that_are_cut_end_as_if_they_were_not(
    config: Config, code: Corpus, on_ranks: Ranks, cut: int
) -> None:
    # Buckets of 10 kB: each rank has several.
    ranks = 2
    settings = {**SETTINGS, "bucket_mb": 0.01}
    whole = on_ranks(ranks, train_rank, config(**settings, run_name="whole"), code)
    assert on_ranks(ranks, train_rank, config(**settings), code, cut) == [None] * ranks
    again = on_ranks(ranks, train_rank, config(**settings), code)
    for before, after in zip(whole, again, strict=True):
        assert before["curve"] == after["curve"]
        assert all(torch.equal(value, after["weights"][name]) for name, value in before["weights"].items()), (
            "the order in which gradients are added up was another"
        )


@pytest.mark.parametrize("fewer", [1, 3])
def test_fewer_workers_make_the_same_steps(config: Config, code: Corpus, on_ranks: Ranks, fewer: int) -> None:
    settings = config(epochs=2, max_steps=10, num_workers="1:4")
    whole = on_ranks(4, train_rank, settings, code)
    less = on_ranks(fewer, train_rank, config(**{**vars(settings), "run_name": "less"}), code)
    for one, other in zip(whole[0]["curve"], less[0]["curve"], strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4), "the global batch is another"
        assert other["learning_rate"] == one["learning_rate"], "the schedule is another"
    for name, value in whole[0]["weights"].items():
        torch.testing.assert_close(less[0]["weights"][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_a_run_goes_on_with_another_number_of_workers(
    config: Config, code: Corpus, on_ranks: Ranks, before: int, after: int
) -> None:
    settings = {"epochs": 3, "max_steps": 21, "batch_size": 4, "num_workers": "1:3", "checkpoint_seconds": 0.0}
    on_ranks(before, train_rank, config(**settings), code, 10)
    ended = on_ranks(after, train_rank, config(**settings), code)[0]
    assert ended["epoch"]["global_batch"] == 3 * 4
    assert [each["train_tokens"] for each in ended["curve"]] == [7 * 12 * 64] * 3, "a token was lost or counted twice"
    assert ended["epoch"]["test_loss"] < ended["curve"][0]["test_loss"], "it has gone on learning"


def stored(config: LanguageConfig, text: Corpus, storage: RunStorage, steps: int) -> LanguageTrainer:
    """A run of which a checkpoint is taken after each of its first steps."""
    with pytest.raises(Cut):
        train(config, text, steps + 1)
    return make(config, text)


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:100]), "bytes"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"), "holds something else"),
        (lambda file: file.unlink(), "missing"),
    ],
    ids=["truncated", "changed", "lost"],
)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(
    config: Config,
    code: Corpus,
    storage: RunStorage,
    capsys: pytest.CaptureFixture[str],
    name: str,
    harm: Any,
    word: str,
) -> None:
    settings = config(**SETTINGS)
    trainer = stored(settings, code, storage, 3)
    newest = CheckpointStore(storage, 3, SCORE).names[-1]
    harm(Path(storage.path(newest, name)))
    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        checkpoints.resume()
        assert 0 < trainer.step < int(newest.removeprefix("checkpoint_"))
        trainer.run_epoch()
        checkpoints.save()
    assert f"{newest} is not complete ({name}" in (said := capsys.readouterr().out)
    assert word in said
    assert "resuming from checkpoint_" in said
    assert newest not in storage.folders("checkpoint_"), "it is deleted with the next one"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"files": {}}'])
def test_a_checkpoint_that_was_not_finished_is_none(
    config: Config, code: Corpus, storage: RunStorage, content: str | None
) -> None:
    stored(config(**SETTINGS), code, storage, 3)
    *_, before, newest = CheckpointStore(storage, 3, SCORE).names
    file = Path(storage.path(newest, "checkpoint.json"))
    file.unlink() if content is None else file.write_text(content)
    assert CheckpointStore(storage, 3, SCORE).names[-1] == before


def test_a_run_without_one_whole_checkpoint_starts_anew(config: Config, code: Corpus, storage: RunStorage) -> None:
    settings = config(**SETTINGS)
    trainer = stored(settings, code, storage, 3)
    fresh = [weights.clone() for weights in trainer.model.parameters()]
    for name in CheckpointStore(storage, 3, SCORE).names:
        Path(storage.path(name, "__0_0.distcp")).write_bytes(b"")
    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        checkpoints.resume()
    assert trainer.step == 0
    assert all(map(torch.equal, trainer.model.parameters(), fresh)), "what is not whole is not loaded in part"


def test_the_last_ones_and_the_best_are_kept(config: Config, code: Corpus, storage: RunStorage) -> None:
    trainer = make(config(**{**SETTINGS, "epochs": 6, "max_steps": 30}, keep_checkpoints=2), code)
    with CheckpointManager(trainer, storage, trainer.config, score=SCORE) as checkpoints:
        for score in (0.2, 0.9, 0.9, 0.4, 0.5, 0.6):
            end_epoch(trainer, score)
            checkpoints.save()
            until(lambda: not checkpoints.save_in_progress, 180)
    store = CheckpointStore(storage, 2, SCORE)
    assert store.names == storage.folders("checkpoint_") == [f"checkpoint_{n * 5:08d}" for n in (2, 5, 6)]
    assert store.best == "checkpoint_00000010", "the earliest of the best"
    found = json.loads(storage.read("checkpoint_00000010/checkpoint.json"))
    assert (found["step"], found["epochs"], found["score"], found["world_size"]) == (10, 2, 0.9, 1)


def end_epoch(trainer: LanguageTrainer, score: float) -> None:
    """Train an epoch and claim a score for it."""
    trainer.run_epoch()
    trainer.history[-1][SCORE] = score


def test_weights_are_exported_as_plain_state_dicts(config: Config, code: Corpus, storage: RunStorage) -> None:
    trainer = make(config(**SETTINGS), code)
    weights = []
    with CheckpointManager(trainer, storage, trainer.config, score=SCORE) as checkpoints:
        for score in (0.9, 0.1):
            end_epoch(trainer, score)
            checkpoints.save()
            weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    for name, expected in (("best/model.pt", weights[0]), ("model.pt", weights[1])):
        found = torch.load(storage.path(name), weights_only=True)
        assert list(found) == list(expected)
        trainer.model.load_state_dict(found)
        assert all(torch.equal(value, found[key]) for key, value in expected.items())


class Gate:
    """Holds back, in this process, the parts of checkpoints that are being written, or lets them fail.

    Attributes:
        opened: While it is set, parts are written.
        failures: So many parts fail.
        parts: The names of the parts whose writing began.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.failures = 0
        self.parts: list[str] = []
        open_writer = RunStorage.open_writer

        def gated(storage: RunStorage, name: str) -> Any:
            if name.endswith(".distcp"):
                self.parts.append(name.partition("/")[0])
                assert self.opened.wait(180), "the training waits for the checkpoint"
                if self.failures:
                    self.failures -= 1
                    raise OSError("AWS Error SLOW_DOWN: please slow down")
            return open_writer(storage, name)

        monkeypatch.setattr(RunStorage, "open_writer", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_training_goes_on_while_a_checkpoint_is_stored(
    config: Config, code: Corpus, storage: RunStorage, gate: Gate
) -> None:
    settings = config(**SETTINGS)
    trainer = make(settings, code)
    gate.opened.clear()
    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        trainer.run_epoch()
        checkpoints.save()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.run_epoch()
        assert not storage.exists("checkpoint_00000005/checkpoint.json")
        gate.opened.set()
    found = load_weights(storage, "checkpoint_00000005")
    assert all(torch.equal(value, found[name]) for name, value in weights.items()), "what was stored is of that step"


def run_epochs(rank: int, ranks: int, config: LanguageConfig, text: Corpus) -> dict[str, Any]:
    """End epochs of some scores while the first checkpoint can't be stored; then let it be stored."""
    storage = RunStorage.open(config.storage_path, str(config.run_name))
    reported: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        gate.opened.clear()
        waits: list[float] = []
        wait = AsyncSaver.wait
        patch.setattr(AsyncSaver, "wait", lambda saver, *limit: (waits.append(time.time()), wait(saver, *limit)))
        trainer = make(config, text)
        with CheckpointManager(
            trainer, storage, config, score=SCORE, on_epoch_saved=lambda history: reported.append(len(history))
        ) as checkpoints:
            checkpoints.resume()
            for score in (0.1, 0.2, 0.9, 0.3, 0.4, 0.5):
                end_epoch(trainer, score)
                checkpoints.save()
            waited = len(waits)
            gate.opened.set()
    return {"waited": waited, "parts": gate.parts, "reported": reported, "step": trainer.steps_per_epoch}


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_epoch_waits_for_the_checkpoint_before(
    config: Config, code: Corpus, storage: RunStorage, on_ranks: Ranks, ranks: int
) -> None:
    settings = config(**{**SETTINGS, "epochs": 6, "max_steps": 30}, keep_checkpoints=1)
    answers = on_ranks(ranks, run_epochs, settings, code)
    first, best, last = (f"checkpoint_{n * answers[0]['step']:08d}" for n in (1, 3, 6))
    for answer in answers:
        assert answer["waited"] == 0, "training has waited for the storage"
        assert answer["parts"] == [first, best, last], "of those that wait the best is kept, and the last is taken"
    assert CheckpointStore(storage, 1, SCORE).names == [best, last]
    assert answers[0]["reported"] == [6], "the metrics of all epochs are written, at once"


def test_a_pending_checkpoint_is_stored_as_soon_as_there_is_room(
    config: Config, code: Corpus, storage: RunStorage, gate: Gate
) -> None:
    settings = config(**{**SETTINGS, "epochs": 3, "max_steps": 15})
    trainer = make(settings, code)
    gate.opened.clear()

    def on_step(step: int, steps: int) -> None:
        checkpoints.step(step, steps)
        until(lambda: not checkpoints.save_in_progress, 180)

    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        for score in (0.1, 0.2):
            end_epoch(trainer, score)
            checkpoints.save()
        gate.opened.set()
        until(lambda: not checkpoints.save_in_progress, 180)
        trainer.run_epoch(on_step)
    assert gate.parts[:3] == [f"checkpoint_{step:08d}" for step in (5, 10, 12)], "the first poll after it starts it"


def test_lost_checkpoints_cost_no_run_until_too_many_are_missing(
    config: Config, code: Corpus, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.failures = 2
    settings = config(**SETTINGS, max_failed_checkpoints=2)
    assert train(settings, code).epoch == 2
    assert "2 in a row failed, --max-failed-checkpoints is 2" in capsys.readouterr().out
    gate.failures = 100
    with pytest.raises(StorageError, match=r"3 checkpoints in a row could not be stored \(SLOW_DOWN"):
        train(config(**SETTINGS, max_failed_checkpoints=2, run_name="other"), code)


def test_a_run_is_not_over_without_its_last_checkpoint(
    config: Config, code: Corpus, storage: RunStorage, gate: Gate
) -> None:
    settings = config(epochs=1, max_steps=5, max_failed_checkpoints=0)
    gate.failures = 1
    trainer = train(settings, code)
    assert CheckpointStore(storage, 1, SCORE).names == [f"checkpoint_{trainer.step:08d}"], "it is tried once more"
    gate.failures = 100
    with pytest.raises(StorageError, match="the last checkpoint could not be stored"):
        train(config(epochs=1, max_steps=5, run_name="other"), code)


def lose_a_part(rank: int, ranks: int, config: LanguageConfig, text: Corpus) -> list[str]:
    """Train while the last rank can't store its part once; returns the parts that this rank has begun to store."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        gate.failures = int(rank == ranks - 1)
        trainer = make(config, text)
        storage = RunStorage.open(config.storage_path, str(config.run_name))
        with CheckpointManager(trainer, storage, config, score=SCORE) as checkpoints:
            trainer.run_epoch()
            checkpoints.save()
    return gate.parts


def test_a_part_that_one_rank_can_not_store_is_stored_again_by_all(
    config: Config, code: Corpus, storage: RunStorage, on_ranks: Ranks
) -> None:
    parts = on_ranks(2, lose_a_part, config(**SETTINGS), code)
    [name] = CheckpointStore(storage, 1, SCORE).names
    assert parts == [[name, name], [name, name]]


def leave_in_the_middle(rank: int, ranks: int, config: LanguageConfig, text: Corpus) -> bool:
    """Fail while the last rank's part is held back; returns whether this rank's saving threads have ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "LAST_SECONDS", 0.1)
        gate = Gate(patch)
        if rank == ranks - 1:
            gate.opened.clear()
        trainer = make(config, text)
        storage = RunStorage.open(config.storage_path, str(config.run_name))
        with suppress(Cut), CheckpointManager(trainer, storage, config, score=SCORE) as checkpoints:
            trainer.run_epoch()
            checkpoints.save()
            raise Cut
        if rank == 0:
            until(no_threads, 180)
        dist.barrier()  # rank 0 would make a checkpoint of the part if it had not left yet
        gate.opened.set()
        until(no_threads, 180)
    return True


def no_threads() -> bool:
    """Whether no thread of this rank stores checkpoints."""
    return not any(each.name.startswith("checkpoints") for each in threading.enumerate())


def test_a_rank_that_fails_is_not_held_by_the_parts_of_others(
    config: Config, code: Corpus, storage: RunStorage, on_ranks: Ranks
) -> None:
    assert on_ranks(2, leave_in_the_middle, config(**SETTINGS), code) == [True, True]
    assert CheckpointStore(storage, 1, SCORE).names == [], "without one part there is no checkpoint"


def test_a_full_disk_costs_the_checkpoint(
    config: Config, code: Corpus, storage: RunStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(**SETTINGS)
    trainer = make(settings, code)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
        trainer.run_epoch()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            checkpoints.save()
            until(lambda: not checkpoints.save_in_progress, 180)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "the checkpoint of step 5 could not be stored" in capsys.readouterr().out
    assert CheckpointStore(storage, 1, SCORE).names == ["checkpoint_00000005"], "there is room again"


def test_checkpoints_leave_nothing_on_the_machine(
    config: Config, code: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))  # whoever wants a temporary file fails
    settings = config(**SETTINGS)
    with pytest.raises(Cut):
        train(settings, code, 3)
    assert train(settings, code).epoch == 2


def test_metrics_that_were_lost_after_the_last_epoch_come_with_the_results(
    config: Config, code: Corpus, storage: RunStorage
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("AWS Error SLOW_DOWN: please slow down")

    settings = config(**SETTINGS).resolve_defaults()
    trainer = make(settings, code)
    with CheckpointManager(trainer, storage, settings, score=SCORE, on_epoch_saved=fail) as checkpoints:
        checkpoints.resume()
        for _ in range(settings.epochs):
            trainer.run_epoch()
            checkpoints.save()
    assert not storage.exists(layout.METRICS)
    results.write_results(storage, LANGUAGE, settings, results.run_summary(trainer, checkpoints.summary), None)
    assert len(storage.read(layout.METRICS).splitlines()) == settings.epochs


def test_what_is_left_of_a_lost_checkpoint_goes_with_the_next(
    config: Config, code: Corpus, storage: RunStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(config(**SETTINGS, keep_checkpoints=1), code)
    with CheckpointManager(trainer, storage, trainer.config, score=SCORE) as checkpoints:
        end_epoch(trainer, 0.1)
        with monkeypatch.context() as patch:
            patch.setattr(RunStorage, "file_sizes", lambda *_: {})
            checkpoints.save()
            until(lambda: not checkpoints.save_in_progress, 180)
        assert storage.folders("checkpoint_") == ["checkpoint_00000005"]
        end_epoch(trainer, 0.2)
        checkpoints.save()
    assert storage.folders("checkpoint_") == CheckpointStore(storage).names == ["checkpoint_00000010"]


@pytest.mark.parametrize(("hang_timeout", "seen"), [(600.0, True), (1e-6, False)])
def test_who_waits_too_long_for_a_checkpoint_gives_no_sign_of_life(
    config: Config,
    code: Corpus,
    storage: RunStorage,
    monkeypatch: pytest.MonkeyPatch,
    gate: Gate,
    hang_timeout: float,
    seen: bool,
) -> None:
    waits: list[object] = []

    def wait_for(jobs: Any, timeout: float) -> None:
        waits.append(jobs)
        if len(waits) == 3:
            seen_while_waiting.append(bool(signs))
            gate.opened.set()
        saver_wait(jobs, timeout=timeout)

    saver_wait = saver.wait_for
    monkeypatch.setattr(saver, "wait_for", wait_for)
    monkeypatch.setattr(saver, "HEARTBEAT_SECONDS", 0.01)
    settings = config(**SETTINGS, hang_timeout=hang_timeout)
    trainer = make(settings, code)
    signs: list[float] = []
    seen_while_waiting: list[bool] = []
    gate.opened.clear()
    with CheckpointManager(
        trainer, storage, settings, score=SCORE, heartbeat=lambda: signs.append(time.time())
    ) as checkpoints:
        trainer.run_epoch()
        checkpoints.save()
    assert seen_while_waiting == [seen]


def test_whoever_reads_a_checkpoint_gives_signs_of_life(
    config: Config, code: Corpus, storage: RunStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(**SETTINGS)
    trainer = stored(settings, code, storage, 3)
    size = max(each.stat().st_size for each in Path(storage.path()).glob("*/*.distcp"))
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(dcp, "CHUNK_BYTES", 10_000)
    signs: list[int] = []
    with CheckpointManager(trainer, storage, settings, score=SCORE, heartbeat=lambda: signs.append(1)) as checkpoints:
        checkpoints.resume()
        assert len(signs) >= 2 * size // 10_000 > 10, "one for each chunk, in verifying and in loading"


def test_a_notice_has_the_step_stored_before_the_ranks_leave(config: Config, code: Corpus, storage: RunStorage) -> None:
    settings = config(epochs=2, max_steps=40)
    trainer = make(settings, code)
    notices = iter([None, None, Preemption([0], time.time() + 300)])
    checkpoints = CheckpointManager(trainer, storage, settings, score=SCORE, preemption=lambda: next(notices))
    with checkpoints:
        checkpoints.resume()
        with pytest.raises(Preempted):
            trainer.run_epoch(checkpoints.step)
    assert CheckpointStore(storage, 1, SCORE).names == [f"checkpoint_{trainer.step:08d}"]
    assert 0 < trainer.step < trainer.steps_per_epoch, "in the middle of the epoch"


def test_a_notice_that_comes_too_late_for_the_state_is_said_in_a_line(
    config: Config, code: Corpus, storage: RunStorage, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(epochs=2, max_steps=10)
    trainer = make(settings, code)
    checkpoints = CheckpointManager(
        trainer, storage, settings, score=SCORE, preemption=lambda: Preemption([0], time.time() + 0.2)
    )
    with suppress(Preempted), checkpoints:
        trainer.run_epoch()
        checkpoints.save()
        until(lambda: not checkpoints.save_in_progress, 180)
        gate.opened.clear()
        try:
            trainer.run_epoch(checkpoints.step)
        finally:
            gate.opened.set()
    [line] = [each for each in capsys.readouterr().out.splitlines() if "before the deadline" in each]
    first = trainer.steps_per_epoch
    assert f"checkpoint_{first + 1:08d} could not be stored before the deadline (the last one took" in line
    assert f"the run will resume from checkpoint_{first:08d}" in line


@pytest.mark.parametrize("fused", ["on", "off"])
def test_a_fused_optimizer_can_be_turned_on_and_off(config: Config, code: Corpus, fused: str) -> None:
    settings = config(**SETTINGS, fused_optimizer={"on": "off", "off": "on"}[fused])
    with pytest.raises(Cut):
        train(settings, code, 3)
    trainer = train(replace(settings, fused_optimizer=fused), code)
    assert [bool(group["fused"]) for group in trainer.optimizer.param_groups] == [fused == "on"] * 2


def test_checkpoints_survive_a_bad_line_to_the_storage(
    config: Config,
    code: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    aws_server: str,
    aws_variables: dict[str, str],
    s3_client: Any,
) -> None:
    whole = train(config(**SETTINGS, run_name="whole"), code)
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)
    with flaky_proxy(aws_server, 0.2, 0.2) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
        settings = config(**{**SETTINGS, "checkpoint_seconds": 1e6}, storage_path=f"s3://{BUCKET}/bad-line")
        storage = RunStorage.open(settings.storage_path, "test")
        trainer = make(settings, code)
        with CheckpointManager(trainer, storage, settings, score=SCORE) as checkpoints:
            trainer.run_epoch()
            checkpoints.save()
        assert same(train(settings, code), whole)
        assert min(line.failed, line.lost) > 5
