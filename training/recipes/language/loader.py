"""The order in which the ranks see the corpus, and the batches made of it.

The training tokens are cut into sequences, which are shuffled anew for each pass. A step takes the next sequences of
that order, as many on any number of workers. Each rank takes every so many of them, in turns of `--batch-size`. Where
they can't be shared equally, a rank fills up with sequences whose targets are ignored: under FSDP all ranks have to
compute equally often.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ray_on_ecs.errors import UsageError, counted
from training.engine import random_state
from training.engine.feed import in_threads
from training.recipes.language.corpus import Corpus

# The target of a position that has none, as torch's cross_entropy has it.
IGNORED = -100

# Tokens and those that follow each of them, [n, context], int64.
Batch = tuple[Tensor, Tensor]


class SequenceLoader:
    """A corpus as one rank takes it.

    Args:
        corpus: The whole corpus.
        context: Tokens of a sequence.
        step_sequences: Sequences in a step, over all ranks.
        batch_size: Most sequences that a rank computes at once.
        seed: Of the shuffles.
        rank: This rank.
        world_size: The number of ranks.
        device: Where the batches are needed.

    Raises:
        UsageError: The training tokens don't fill one step, or there are no test tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        context: int,
        step_sequences: int,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.corpus = corpus
        self.context = context
        self.step_sequences = step_sequences
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.device = device
        # A sequence of n tokens has n - 1 to predict from them, and the next one begins with its last.
        self.sequences = (len(corpus.train) - 1) // context
        self._check()

    @property
    def steps(self) -> int:
        """Steps in a pass over the corpus; sequences that don't fill a last one are left out of the pass."""
        return self.sequences // self.step_sequences

    @property
    def turns(self) -> int:
        """How often each rank computes in a step."""
        return math.ceil(self._own_sequences / self.batch_size)

    @property
    def test_sequences(self) -> int:
        """Sequences of the test tokens; the last one may be short."""
        return math.ceil((len(self.corpus.test) - 1) / self.context)

    def train(self, first_step: int, steps: int) -> Iterator[list[Batch]]:
        """Yield this rank's batches of each of `steps` steps, from a step of the whole training on."""
        shuffle = lru_cache(1)(self._shuffle)

        def turns(step: int) -> list[Batch]:
            number, position = divmod(step, self.steps)
            first = position * self.step_sequences
            return list(self._batches(self.corpus.train, shuffle(number)[first : first + self.step_sequences]))

        for batches in in_threads(range(first_step, first_step + steps), turns):
            yield [self._sent(each) for each in batches]

    def test(self) -> Iterator[Batch]:
        """Yield this rank's part of the test sequences: every token on exactly one rank."""
        return map(self._sent, self._batches(self.corpus.test, np.arange(self.test_sequences)))

    @property
    def _own_sequences(self) -> int:
        return math.ceil(self.step_sequences / self.world_size)

    def _shuffle(self, number: int) -> np.ndarray:
        """Return the order of the sequences in a pass."""
        seed = random_state.derive_seed(self.seed, random_state.SHUFFLE, number)
        return torch.randperm(self.sequences, generator=torch.Generator().manual_seed(seed)).numpy()

    def _batches(self, tokens: np.ndarray, numbers: np.ndarray) -> Iterator[Batch]:
        """Yield this rank's share of the sequences with these numbers."""
        mine = list(numbers[self.rank :: self.world_size])
        mine += [None] * (math.ceil(len(numbers) / self.world_size) - len(mine))
        for start in range(0, len(mine), self.batch_size):
            yield self._batch([self._sequence(tokens, number) for number in mine[start : start + self.batch_size]])

    def _sequence(self, tokens: np.ndarray, number: int | None) -> np.ndarray:
        """Return `context` + 1 tokens; those that are not there are `IGNORED`."""
        sequence = np.full(self.context + 1, IGNORED, np.int64)
        if number is not None:
            found = tokens[number * self.context : (number + 1) * self.context + 1]
            sequence[: len(found)] = found
        return sequence

    def _batch(self, sequences: list[np.ndarray]) -> Batch:
        """Return tokens and targets in the node's memory, page-locked for a GPU, which can then copy meanwhile."""
        batch = torch.from_numpy(np.stack(sequences))
        tokens, targets = batch[:, :-1].clamp(min=0), batch[:, 1:].contiguous()
        return (tokens.pin_memory(), targets.pin_memory()) if self.device.type == "cuda" else (tokens, targets)

    def _sent(self, batch: Batch) -> Batch:
        tokens, targets = batch
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def _check(self) -> None:
        if len(self.corpus.test) < 2:
            raise UsageError(f"--corpus: {self.corpus.name} has no two test tokens; raise --test-fraction")
        if self.steps < 1:
            raise UsageError(
                f"--global-batch: a step is {counted(self.step_sequences, 'sequence')} of {self.context} tokens, and "
                f"{self.corpus.name} has {len(self.corpus.train):,} tokens to train on; give a smaller --global-batch, "
                "--batch-size or --context, or more text"
            )
