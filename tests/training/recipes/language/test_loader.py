from typing import Any

import numpy as np
import pytest
import torch

from ray_on_ecs.errors import UsageError
from training.recipes.language.corpus import Corpus
from training.recipes.language.loader import IGNORED, SequenceLoader

CPU = torch.device("cpu")


def numbered(train: int = 1001, test: int = 96) -> Corpus:
    """A corpus whose tokens are 0, 1, 2 and so on."""
    tokens = (np.arange(train, dtype=np.uint16), np.arange(test, dtype=np.uint16))
    return Corpus("numbers", None, None, *tokens, train, test, 1, "")  # ty: ignore[invalid-argument-type]


def loader(rank: int = 0, ranks: int = 1, text: Corpus | None = None, **settings: Any) -> SequenceLoader:
    given: dict[str, Any] = {"context": 10, "step_sequences": 6, "batch_size": 2, "seed": 0, **settings}
    return SequenceLoader(text or numbered(), rank=rank, world_size=ranks, device=CPU, **given)


def step_of(ranks: int, step: int, **settings: Any) -> list[int]:
    """The first tokens of all sequences of a step, over all ranks."""
    found = []
    for rank in range(ranks):
        [turns] = loader(rank, ranks, **settings).train(step, 1)
        found += [
            tokens[0].item() for batch in turns for tokens, targets in zip(*batch, strict=True) if targets[0] >= 0
        ]
    return sorted(found)


def test_targets_are_the_tokens_that_follow() -> None:
    for turns in loader().train(0, 3):
        for tokens, targets in turns:
            assert tokens.shape == targets.shape == (2, 10)
            assert torch.equal(targets, tokens + 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
def test_a_step_has_the_same_sequences_on_any_number_of_ranks(ranks: int) -> None:
    for step in (0, 5, 20):
        assert step_of(ranks, step) == step_of(1, step)
    turns = {len(batches) for rank in range(ranks) for batches in loader(rank, ranks).train(0, 16)}
    assert len(turns) == 1, "ranks of a sharded model compute equally often"


def test_a_pass_has_each_sequence_once_and_the_next_another_order() -> None:
    passes = []
    for number in range(2):
        firsts = [step_of(1, number * 16 + step) for step in range(16)]
        assert len({first for step in firsts for first in step}) == 16 * 6
        passes.append(firsts)
    assert passes[0] != passes[1]
    assert [step_of(1, step, seed=1) for step in range(16)] != passes[0]


def test_a_training_that_goes_on_sees_what_is_next() -> None:
    whole = [[batch[0].tolist() for batch in turns] for turns in loader().train(0, 40)]
    rest = [[batch[0].tolist() for batch in turns] for turns in loader().train(13, 27)]
    assert rest == whole[13:], "a position is all that a checkpoint needs"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_test_token_is_predicted_on_one_rank(ranks: int) -> None:
    targets: list[int] = []
    batches = set()
    for rank in range(ranks):
        mine = list(loader(rank, ranks).test())
        batches.add(len(mine))
        targets += [each for _, batch in mine for each in batch.flatten().tolist() if each != IGNORED]
    assert sorted(targets) == list(range(1, 96))
    assert len(batches) == 1, "ranks of a sharded model compute equally often"


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UsageError, match="--global-batch: a step is 101 sequences of 10 tokens, and numbers has 1,001"):
        loader(step_sequences=101)
    with pytest.raises(UsageError, match="no two test tokens"):
        loader(text=numbered(test=1))
