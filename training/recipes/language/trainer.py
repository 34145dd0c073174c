"""The trainer of a language model: one rank of a run under DDP or FSDP2, in plain PyTorch.

It takes rank and world size from torch.distributed if a process group is up, so it runs the same under Ray Train, under
torchrun and alone. Starting processes and storing checkpoints is left to its callers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ray_on_ecs.checkpoint.trainer import TrainerState
from ray_on_ecs.errors import UsageError
from training.engine import ddp, optim, random_state
from training.engine.agreement import is_alike
from training.engine.compiler import check_compiler
from training.engine.epochs import EpochState, EpochTrainer
from training.engine.trainer import EpochMetrics, OnStep
from training.recipes.language import sharding
from training.recipes.language.config import LanguageConfig
from training.recipes.language.corpus import Corpus
from training.recipes.language.loader import IGNORED, Batch, SequenceLoader
from training.recipes.language.model import Fill, ModelConfig, generate
from training.recipes.language.peak_flops import peak_flops

BETAS = (0.9, 0.95)


class LanguageMetrics(EpochMetrics):
    """The metrics of an epoch of a language model; a sample is a sequence, and losses are means over tokens.

    Attributes:
        train_bits_per_byte: The training loss in bits per byte of text, which models with other tokenizers have, too.
        test_bits_per_byte: The same of the test loss.
        test_log_likelihood: Mean log-likelihood of a test token: the test loss with its sign turned.
        train_tokens: Number of tokens that were trained on, over all ranks.
        test_tokens: Number of tokens that were predicted in the test.
        tokens_per_second: Training tokens of all ranks per second.
        model_flops_utilization: Fraction (0..1) of what all GPUs can compute in bf16 that the model's own operations
            took (`ModelConfig.flops_per_token`); None if that isn't known.
    """

    train_bits_per_byte: float
    test_bits_per_byte: float
    test_log_likelihood: float
    train_tokens: int
    test_tokens: int
    tokens_per_second: float
    model_flops_utilization: float | None


class LanguageTrainer(EpochTrainer):
    """A language model with its optimizer and the metrics of its finished epochs, on one rank.

    Attributes:
        shape: The shape of the model.
        model: The model, without DDP; its parameters are DTensors under FSDP.
        parallel_model: The same model under DDP, if there are several ranks with a copy each.
        batches: The batches of this rank.
        optimizer: The optimizer.

    Args:
        config: The run's settings.
        shape: The shape of the model.
        fill: Fills its parameters at the start of the training.
        corpus: The whole corpus; each rank takes its part.
        device: Where the model and the batches are.

    Raises:
        UsageError: The settings don't fit the corpus, the ranks have different corpora, or the compiler is missing.
    """

    def __init__(
        self, config: LanguageConfig, shape: ModelConfig, fill: Fill, corpus: Corpus, device: torch.device
    ) -> None:
        super().__init__(device)
        config = config.resolve_device(device.type)
        self.config = config
        if not is_alike(corpus.fingerprint, device):
            raise UsageError(f"--corpus: {corpus.name} is not the same on every node; give s3://bucket/prefix")
        self.batches = SequenceLoader(
            corpus,
            context=shape.context,
            step_sequences=config.step_sequences(self.world_size),
            batch_size=config.local_batch_size,
            seed=config.seed,
            rank=self.rank,
            world_size=self.world_size,
            device=device,
        )
        self._sharded = config.sharding == "full" and self.world_size > 1
        bf16 = config.precision == "bf16" or (config.precision == "auto" and ddp.all_have_bf16(device))
        self._autocast = bf16 and not self._sharded  # a sharded model casts its weights instead
        self.shape = shape
        self.model: nn.Module = self._build(fill, bf16)
        self.parallel_model = self.model if self._sharded else self._wrap(bf16)
        self.optimizer = optim.build_optimizer(self.model, config, BETAS)
        self._loss_scale = self.world_size / (self.batches.step_sequences * shape.context)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch: a pass over the corpus, or a part of `--max-steps`."""
        return self.config.max_steps // self.config.epochs if self.config.max_steps else self.batches.steps

    @property
    def data_summary(self) -> dict[str, Any]:
        """The corpus's entry in `result.json`."""
        corpus = self.batches.corpus
        return {
            "name": corpus.name,
            "documents": corpus.documents,
            "train_tokens": len(corpus.train),
            "train_bytes": corpus.train_bytes,
            "train_samples": self.batches.sequences,
            "test_tokens": len(corpus.test),
            "test_bytes": corpus.test_bytes,
            "test_samples": self.batches.test_sequences,
            "vocab_size": corpus.tokenizer.get_vocab_size(),
            "context": self.batches.context,
            "parameters": self.shape.parameters,
            "fingerprint": corpus.fingerprint,
        }

    def run_epoch(
        self, on_step: OnStep = lambda step, steps: None, on_test: Callable[[], None] = lambda: None
    ) -> LanguageMetrics:
        """Train the rest of the epoch, test, and add the metrics to the history; every rank must call it.

        Args:
            on_step: Called after every step with the steps done and the steps of the epoch.
            on_test: Called after every batch of the test.

        Returns:
            The metrics, over all tokens of all ranks.

        Raises:
            DivergedError: The training or test loss is not finite; every rank raises it.
        """
        epoch = self.current_epoch = self.current_epoch or EpochState(
            LossSum(self.device), self._learning_rate(self.step)
        )
        batches = self.batches.train(self.step, self.steps_per_epoch - epoch.step)
        train_loss, train_tokens = self._train(self.parallel_model, epoch, batches, on_step)
        step_times = self.timer.summary()
        if self._sharded:
            step_times["exposed_comm_fraction"] = None  # weights are sent while others are computed with
        started = time.perf_counter()
        test_loss, test_tokens = self._test(on_test)
        self._check_finite("test loss", test_loss)
        corpus = self.batches.corpus
        metrics: LanguageMetrics = {
            "epoch": self.epoch,
            "train_loss": train_loss,
            "train_bits_per_byte": train_loss / math.log(2) * len(corpus.train) / corpus.train_bytes,
            "train_tokens": train_tokens,
            "test_loss": test_loss,
            "test_bits_per_byte": test_loss / math.log(2) * len(corpus.test) / corpus.test_bytes,
            "test_log_likelihood": -test_loss,
            "test_tokens": test_tokens,
            "learning_rate": epoch.learning_rate,
            "train_seconds": epoch.seconds,
            "test_seconds": time.perf_counter() - started,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "samples_per_second": train_tokens / self.batches.context / epoch.seconds,
            "tokens_per_second": train_tokens / epoch.seconds,
            "model_flops_utilization": self._utilization(train_tokens / epoch.seconds),
            **step_times,
            "steps": self.steps_per_epoch,
            "world_size": self.world_size,
            "global_batch": self.batches.step_sequences,
        }
        self.history.append(metrics)
        self.current_epoch = None
        return metrics

    def state_dict(self) -> TrainerState:
        """Return what a later `load_state_dict` needs to continue; its tensors are those that are trained.

        Raises:
            DivergedError: A weight is not finite; every rank raises it.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        self._check_finite("largest weight", sharding.largest_weight(self.model))
        epoch = self.current_epoch
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "progress": {
                "world_size": self.world_size,
                "history": list(self.history),
                "epoch": epoch and epoch.position(),
            },
            "ranks": [{"random": random_state.capture(self.device), "sums": epoch.sums.state() if epoch else None}],
        }

    def load_state_dict(self, state: TrainerState) -> None:
        """Continue where `state` was taken, on as many ranks or on another number."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        progress = state["progress"]
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self._load_epochs(progress, LossSum(self.device))
        self._load_ranks(progress, state["ranks"])

    def continue_text(self, prompt: str, count: int) -> str:
        """Return a prompt and `count` tokens that the model adds to it; every rank must call it."""
        corpus = self.batches.corpus
        tokens = corpus.tokenizer.encode(prompt, add_special_tokens=False).ids or [corpus.end or 0]
        self.model.eval()
        given = torch.tensor(tokens, device=self.device)
        with self._precision():
            made = generate(self.model, given, count, context=self.batches.context, seed=self.config.seed)
        sharding.reshard(self.model)
        return corpus.tokenizer.decode(made.tolist())

    def _build(self, fill: Fill, bf16: bool) -> nn.Module:
        gradients = bf16 if self.config.gradient_dtype == "auto" else self.config.gradient_dtype == "bf16"
        policy = sharding.mixed_precision(bf16=bf16, bf16_gradients=gradients) if self._sharded else None
        recompute = self.config.activation_checkpointing == "on"
        model = sharding.build(self.shape, fill, self.device, policy=policy, recompute=recompute)
        random_state.seed_all(random_state.derive_seed(self.config.seed, random_state.RANK, self.rank))
        if self.config.compile == "on":
            check_compiler(self.device)
            for block in model.blocks:  # one by one, since they are alike: the compiler sees one of them
                block.compile()
        return model

    def _wrap(self, bf16: bool) -> nn.Module:
        turns = self.batches.turns > 1
        return ddp.wrap_ddp(
            self.model,
            self.config,
            self.device,
            bf16=bf16,
            timer=self.timer,
            accumulates=turns or self.config.static_graph == "off",
        )

    def _advice(self) -> str:
        lr, norm = self.config.lr, self.config.clip_norm
        return f"start another run with a lower --lr (now {lr:g}) or --clip-norm (now {norm:g})"

    def _step(self, turns: Sequence[Batch], sums: LossSum) -> None:
        """Take one step of the optimizer from this rank's batches. Nothing waits for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        for number, (tokens, targets) in enumerate(turns, start=1):
            # FSDP adds gradients up over the ranks each time: a sum of its own would be as large as all weights.
            with self._sync_gradients(self.parallel_model, last=number == len(turns)):
                loss = self._loss(self.parallel_model, tokens, targets)
                # DDP and FSDP take the mean over the ranks: this makes it the mean over the step's tokens.
                (loss * self._loss_scale).backward()
            sums.add(loss.detach(), targets)
        self.timer.allreduce_finished()
        sharding.clip_gradients(self.model, self.config.clip_norm)
        self.optimizer.step()

    @torch.no_grad()
    def _test(self, on_batch: Callable[[], None]) -> Mean:
        self.model.eval()
        sums = LossSum(self.device)
        for tokens, targets in self.batches.test():
            sums.add(self._loss(self.model, tokens, targets), targets)
            on_batch()
        sharding.reshard(self.model)
        return sums.mean()

    def _loss(self, network: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the tokens' losses, in fp32 whatever the precision of the layers."""
        with self._precision():
            logits = network(tokens)
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast)

    def _learning_rate(self, step: int) -> float:
        return learning_rate(self.config, step, self.steps_per_epoch * self.config.epochs)

    def _utilization(self, tokens_per_second: float) -> float | None:
        peak = peak_flops(self.device)
        if peak is None:
            return None
        return tokens_per_second * self.shape.flops_per_token(self.batches.context) / (peak * self.world_size)


class Mean(NamedTuple):
    """The mean loss over a number of tokens."""

    loss: float
    tokens: int


class LossSum:
    """The sum of the loss over tokens on this rank; nothing is read from the device before `mean`."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens

    def add(self, loss: Tensor, targets: Tensor) -> None:
        """Add the loss of a batch, a sum over its targets."""
        self.sums += torch.stack([loss.double(), (targets != IGNORED).sum().double()])

    def state(self) -> list[float]:
        """Return the sums."""
        return self.sums.tolist()

    def load(self, state: list[float]) -> None:
        """Add sums of another rank or of an earlier process."""
        self.sums += self.sums.new_tensor(state)

    def mean(self) -> Mean:
        """Return the mean over the tokens of all ranks, and their number; every rank must call it."""
        totals = self.sums.clone()
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss, tokens = totals.tolist()
        return Mean(loss / tokens, int(tokens))


def learning_rate(config: LanguageConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0: it rises in a line, and falls along a cosine.

    (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983)
    """
    warmup = math.ceil(config.warmup_fraction * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    final = config.final_lr_fraction
    return config.lr * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
