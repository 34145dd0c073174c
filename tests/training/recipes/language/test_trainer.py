import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from ray_on_ecs.checkpoint.manager import CheckpointManager
from ray_on_ecs.errors import DivergedError, UsageError
from ray_on_ecs.tracking.storage import RunStorage
from tests.training.ranks import Ranks
from training.recipes.language import recipe
from training.recipes.language.config import LanguageConfig
from training.recipes.language.corpus import Corpus
from training.recipes.language.model import random_weights
from training.recipes.language.trainer import LanguageTrainer, learning_rate

CPU = torch.device("cpu")
FULL = StateDictOptions(full_state_dict=True)
Config = Callable[..., LanguageConfig]


def make(config: LanguageConfig, text: Corpus) -> LanguageTrainer:
    shape = recipe._shape(config, text.tokenizer.get_vocab_size())
    return LanguageTrainer(config, shape, random_weights(config.seed, shape.layers), text, CPU)


def train_rank(rank: int, ranks: int, config: LanguageConfig, text: Corpus) -> dict[str, Any]:
    """All epochs on one of several ranks: its metrics, the whole weights, and what the model writes."""
    trainer = make(config, text)
    for _ in range(config.epochs):
        trainer.run_epoch()
    largest = max(each.numel() for each in trainer.model.parameters())
    local = [each.to_local() for each in trainer.model.parameters() if isinstance(each, DTensor)]
    return {
        "history": trainer.history,
        "weights": get_model_state_dict(trainer.model, options=FULL),
        "share": max((each.numel() for each in local), default=largest) / largest,
        "text": trainer.continue_text("import ", 8),
    }


def assert_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["history"], other["history"], strict=True):
        for name in ("train_loss", "test_loss"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-5), name
        for name in ("train_tokens", "test_tokens", "learning_rate"):
            assert theirs[name] == mine[name], name


@pytest.mark.parametrize(
    ("ranks", "changed"),
    [
        (2, {}),
        (2, {"sharding": "full"}),
        (2, {"batch_size": 1}),
        (2, {"batch_size": 1, "sharding": "full"}),
        (3, {"batch_size": 1, "sharding": "full"}),
        (3, {}),
        (2, {"sharding": "full", "activation_checkpointing": "on"}),
        (2, {"activation_checkpointing": "on"}),
        (2, {"tied_weights": "off", "sharding": "full"}),
    ],
)
def test_any_number_of_workers_trains_the_same_model(
    config: Config, code: Corpus, on_ranks: Ranks, ranks: int, changed: dict[str, Any]
) -> None:
    settings = config(max_steps=12, epochs=2, global_batch=8, batch_size=8)
    tied = {"tied_weights": changed["tied_weights"]} if "tied_weights" in changed else {}
    alone = train_rank(0, 1, replace(settings, **tied), code)
    several = on_ranks(ranks, train_rank, replace(settings, **changed), code)
    assert several[0]["history"][-1]["test_tokens"] == len(code.test) - 1, "every token, once"
    for each in several:
        assert_same_training(alone, each)
        assert each["text"] == several[0]["text"]
    if several[0]["weights"]:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(several[0]["weights"][name], weight, atol=2e-5, rtol=1e-3)


def test_bf16_learns_as_well(config: Config, code: Corpus, on_ranks: Ranks) -> None:
    settings = config(max_steps=12, global_batch=8, batch_size=4)
    exact = train_rank(0, 1, settings, code)["history"][0]
    for sharding in ("none", "full"):
        changed = replace(settings, precision="bf16", sharding=sharding)
        found = on_ranks(2, train_rank, changed, code)[0]
        assert found["history"][0]["test_loss"] == pytest.approx(exact["test_loss"], rel=2e-3)
        assert {each.dtype for each in found["weights"].values()} == {torch.float32}, (
            "steps smaller than bf16's last bit"
        )


def test_shares_of_weights_are_shares(config: Config, code: Corpus, on_ranks: Ranks) -> None:
    settings = config(max_steps=1, global_batch=2, sharding="full")
    assert [each["share"] for each in on_ranks(2, train_rank, settings, code)] == [0.5, 0.5]


def test_it_learns_more_than_which_token_follows_which(config: Config, code: Corpus) -> None:
    trainer = make(config(max_steps=450, global_batch=16, batch_size=16, lr=3e-3), code)
    metrics = trainer.run_epoch()
    assert metrics["test_loss"] < bigram_loss(code)
    assert metrics["test_bits_per_byte"] == pytest.approx(
        metrics["test_loss"] / math.log(2) * len(code.test) / code.test_bytes
    )
    assert metrics["tokens_per_second"] > 0
    assert metrics["model_flops_utilization"] is None, "what a CPU could do isn't known"


def bigram_loss(text: Corpus) -> float:
    """The test loss of how often each token followed each other one, with the best of some pseudo-counts."""
    size = text.tokenizer.get_vocab_size()
    counts = np.zeros((size, size))
    np.add.at(counts, (text.train[:-1], text.train[1:]), 1)
    single = np.bincount(text.train, minlength=size) + 1
    losses = []
    for weight in (1, 5, 20, 100):
        smoothed = counts + weight * single / single.sum()
        chances = smoothed / smoothed.sum(axis=1, keepdims=True)
        losses.append(-np.log(chances[text.test[:-1], text.test[1:]]).mean())
    return min(losses)


def test_gradients_are_clipped_to_their_norm_over_all_ranks(config: Config, code: Corpus, on_ranks: Ranks) -> None:
    settings = config(max_steps=1, global_batch=4, clip_norm=1e-3)
    for sharding in ("none", "full"):
        for norm in on_ranks(2, clipped_norm, replace(settings, sharding=sharding), code):
            assert norm == pytest.approx(1e-3, rel=1e-3)
    assert clipped_norm(0, 1, replace(settings, clip_norm=0.0), code) > 0.1, "0 leaves them"


def clipped_norm(rank: int, ranks: int, config: LanguageConfig, text: Corpus) -> float:
    """The norm of the gradients that the optimizer has seen, over all ranks."""
    trainer = make(config, text)
    trainer.run_epoch()
    gradients = [each.grad for each in trainer.model.parameters() if each.grad is not None]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
    return float(torch.nn.utils.get_total_norm(whole))


def test_the_learning_rate_rises_in_a_line_and_falls_along_a_cosine(config: Config) -> None:
    settings = config(lr=1.0, warmup_fraction=0.1, final_lr_fraction=0.1)
    rates = [learning_rate(settings, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[55] == pytest.approx(0.55), "halfway between the peak and the end"
    assert rates[99] == pytest.approx(0.1, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_loss_that_is_no_number_ends_the_run(config: Config, code: Corpus) -> None:
    trainer = make(config(max_steps=4, lr=1e6, clip_norm=0.0), code)
    with torch.no_grad():
        trainer.model.get_parameter("embedding.weight").fill_(float("nan"))
    with pytest.raises(DivergedError, match=r"training loss is nan in epoch 0 by step 4 of 4; .* lower --lr"):
        trainer.run_epoch()
    with pytest.raises(DivergedError, match="largest weight is nan"):
        trainer.state_dict()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own look
def test_compiling_changes_neither_the_losses_nor_the_names(config: Config, code: Corpus) -> None:
    off, on = (make(config(max_steps=3, global_batch=4, compile=choice), code) for choice in ("off", "on"))
    expected, found = off.run_epoch(), on.run_epoch()
    for name in ("train_loss", "test_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert on.state_dict()["model"].keys() == off.state_dict()["model"].keys()


def test_ranks_with_other_texts_are_refused(config: Config, code: Corpus, on_ranks: Ranks) -> None:
    assert on_ranks(2, refused, config(), code) == ["--corpus: "] * 2


def refused(rank: int, ranks: int, config: LanguageConfig, text: Corpus) -> str:
    with pytest.raises(UsageError) as caught:
        make(config, replace(text, fingerprint=str(rank)))
    return str(caught.value)[:10]


def train_some(
    rank: int, ranks: int, config: LanguageConfig, text: Corpus, folder: str, stop_after: int | None
) -> list[Any]:
    """Resume, train to the end or to a step, where a checkpoint is taken; returns the history."""
    trainer = make(config, text)
    storage = RunStorage.open(folder, "run")
    with CheckpointManager(trainer, storage, config, score="test_log_likelihood") as checkpoints:
        checkpoints.resume()

        def on_step(step: int, steps: int) -> None:
            if trainer.step == stop_after:
                checkpoints.save()
                raise StopIteration

        try:
            while trainer.epoch < config.epochs:
                trainer.run_epoch(on_step)
                checkpoints.save()
        except StopIteration:
            pass
    return trainer.history


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [("full", "full", "full"), ("none", "none", "none"), ("full", "none", "full")],
)
def test_a_run_goes_on_where_it_was_on_another_number_of_workers(
    config: Config, code: Corpus, on_ranks: Ranks, tmp_path: Path, first: str, second: str, third: str
) -> None:
    settings = config(max_steps=20, epochs=2, global_batch=8, batch_size=2)
    uninterrupted = train_rank(0, 1, settings, code)
    parts = zip((4, 2, 1), (7, 13, None), (first, second, third), strict=True)
    for ranks, stop_after, sharding in parts:
        changed = replace(settings, sharding=sharding)
        history = on_ranks(ranks, train_some, changed, code, str(tmp_path), stop_after)[0]
    assert_same_training(uninterrupted, {"history": history})
    assert history[0]["world_size"] == 2, "an epoch ended on two workers"
    assert history[1]["world_size"] == 1


def test_as_many_workers_go_on_bit_for_bit(config: Config, code: Corpus, on_ranks: Ranks, tmp_path: Path) -> None:
    settings = config(max_steps=8, epochs=1, global_batch=4, batch_size=2, sharding="full")
    uninterrupted = on_ranks(2, train_some, settings, code, str(tmp_path / "whole"), None)[0]
    on_ranks(2, train_some, settings, code, str(tmp_path / "parts"), 5)
    resumed = on_ranks(2, train_some, settings, code, str(tmp_path / "parts"), None)[0]
    for name in ("train_loss", "test_loss"):
        assert resumed[-1][name] == uninterrupted[-1][name]
