"""The training loop in plain PyTorch: one trainer of a data-parallel run.

It takes rank and world size from torch.distributed where a process group is up, so it runs the same under Ray Train,
under torchrun and alone. Where it runs, and what becomes of its checkpoints, is the caller's business.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from training.engine import ddp, optim, random_state
from training.engine.step_timer import StepTimer
from training.engine.trainer import EpochMetrics, OnStep, TrainerState
from training.errors import UsageError
from training.recipes.images import batch_norm, models
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset
from training.recipes.images.loader import Batch, BatchLoader


class ImageMetrics(EpochMetrics):
    """The metrics of an epoch, with accuracies (0..1) and the numbers of samples."""

    train_accuracy: float
    test_accuracy: float
    train_samples: int
    test_samples: int


# DDP orders its buckets anew, by the order in which gradients came, before the third step.
BUCKET_REBUILD_STEPS = 2


@dataclass
class EpochState:
    """An epoch under way.

    Attributes:
        sums: What this rank has counted in it.
        learning_rate: The one that it began with.
        step: The steps done of it.
        seconds: How long they took.
    """

    sums: MetricSums
    learning_rate: float
    step: int = 0
    seconds: float = 0.0


class ImageTrainer:
    """A model with its optimizer, its schedule and the epochs behind it, on one rank.

    Args:
        config: The run's settings.
        dataset: The whole data set; each rank takes its share.
        device: Where the model and the batches live.

    Raises:
        UsageError: The model, the batch size or the compiler that the settings want can't be had.
    """

    def __init__(self, config: ImageConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL's collectives on objects go over the current device
            torch.backends.cudnn.benchmark = True  # the shapes of a step are those of the next
        self.batches = BatchLoader(dataset, config, self.rank, self.world_size, device)
        self.timer = StepTimer(device)
        self._autocast = config.precision == "bf16" or (config.precision == "auto" and ddp.all_have_bf16(device))
        channels_last = config.channels_last == "on" or (config.channels_last == "auto" and device.type == "cuda")
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model = self._build(dataset)
        self.ddp_model = ddp.wrap_ddp(self.model, config, device, self._autocast, self.timer)
        self.optimizer, self.schedule = optim.build(
            self.model, config, self.batches.global_batch, config.epochs * self.batches.steps
        )
        self._loss_scale = torch.tensor(self.world_size / self.batches.microbatches, device=device)
        self.history: list[ImageMetrics] = []
        self.current_epoch: EpochState | None = None

    @property
    def epoch(self) -> int:
        """The epoch that comes next, counted from 0."""
        return len(self.history)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the same on every rank."""
        return self.batches.steps

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self.current_epoch is not None

    @property
    def data_summary(self) -> dict[str, Any]:
        """What `result.json` says of the data set."""
        dataset = self.batches.dataset
        return {
            "name": dataset.name,
            "train_samples": len(dataset.train),
            "test_samples": len(dataset.test),
            "classes": dataset.classes,
            "mean": dataset.mean,
            "std": dataset.std,
            "fingerprint": dataset.fingerprint,
        }

    @property
    def step(self) -> int:
        """Optimizer steps done since the start of the training."""
        return self.epoch * self.steps_per_epoch + (self.current_epoch.step if self.current_epoch else 0)

    def run_epoch(
        self, on_step: OnStep = lambda step, steps: None, on_test: Callable[[], None] = lambda: None
    ) -> ImageMetrics:
        """Train an epoch, or what is left of one that a checkpoint was taken in; test; note it in the history.

        Args:
            on_step: Called after every step with the steps done and the steps of the epoch.
            on_test: Called after every batch of the test.

        Returns:
            Losses (mean cross-entropy, in training with its label smoothing) and accuracies (0..1) over all samples of
            all ranks, the seconds taken, and what the watch saw of the steps.
        """
        epoch = self.current_epoch = self.current_epoch or EpochState(
            MetricSums(self.device), float(self.schedule.get_last_lr()[0])
        )
        self._train(epoch, on_step)
        train = epoch.sums.mean()
        watched = self.timer.summary()
        tested = time.perf_counter()
        test = self._test(on_test)
        metrics: ImageMetrics = {
            "epoch": self.epoch,
            "train_loss": train.loss,
            "train_accuracy": train.accuracy,
            "train_samples": train.samples,
            "test_loss": test.loss,
            "test_accuracy": test.accuracy,
            "test_samples": test.samples,
            "learning_rate": epoch.learning_rate,
            "train_seconds": epoch.seconds,
            "test_seconds": time.perf_counter() - tested,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "samples_per_second": train.samples / epoch.seconds,
            **watched,
            "steps": self.steps_per_epoch,
            "world_size": self.world_size,
            "global_batch": self.batches.global_batch,
        }
        self.history.append(metrics)
        self.current_epoch = None
        return metrics

    def state_dict(self) -> TrainerState:
        """Return what a later `load_state_dict` needs to continue; its tensors are those that are trained."""
        from torch.distributed.checkpoint.state_dict import (
            get_optimizer_state_dict,
        )  # takes a second, for the first time

        epoch = self.current_epoch
        own: dict[str, Any] = {"random": random_state.capture(self.device)}
        if epoch:
            own["buffers"] = dict(self.model.named_buffers())
            own["sums"] = epoch.sums.state()
        return {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "progress": {
                "world_size": self.world_size,
                "schedule": self.schedule.state_dict(),
                "history": list(self.history),
                "epoch": epoch and {"learning_rate": epoch.learning_rate, "step": epoch.step, "seconds": epoch.seconds},
            },
            "ranks": [own],
        }

    def load_state_dict(self, state: TrainerState) -> None:
        """Continue where `state` was taken, on as many ranks or on another number."""
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        progress = state["progress"]
        ranks = state["ranks"]
        as_many = progress["world_size"] == self.world_size
        for group, own in zip(state["optimizer"]["param_groups"], self.optimizer.param_groups, strict=True):
            group["fused"] = own["fused"]  # --fused-optimizer may change
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(progress["schedule"])
        self.history = list(progress["history"])
        self.current_epoch = EpochState(MetricSums(self.device), **progress["epoch"]) if progress["epoch"] else None
        self._rebuild_ddp_buckets(min(self.step, BUCKET_REBUILD_STEPS))
        if as_many or self.rank < len(ranks):
            random_state.restore(ranks[0 if as_many else self.rank]["random"], self.device)
        if self.current_epoch:
            self._load_buffers([each["buffers"] for each in ranks])
            for each in ranks if as_many or self.rank == 0 else []:  # they are added up over the ranks later
                self.current_epoch.sums.load(each["sums"])

    def _load_buffers(self, ranks: list[dict[str, Tensor]]) -> None:
        """Take over the mean of the running statistics of these ranks."""
        for name, buffer in self.model.named_buffers():
            values = torch.stack([each[name].double() for each in ranks])
            buffer.copy_(values.mean(0) if buffer.is_floating_point() else values[0])

    def _rebuild_ddp_buckets(self, steps: int) -> None:
        """Let DDP order its buckets, as it has done after so many steps.

        With three ranks or more the order of the sums, and so their last digit, follows from it. What these steps leave
        behind are running statistics, which are put back, and random states, which are loaded over.
        """
        if self.world_size < 3:
            return
        before = [buffer.clone() for buffer in self.model.buffers()]
        images, labels = next(self.batches.train(0))
        self.ddp_model.train()
        for _ in range(steps):
            cross_entropy(self._forward(self.ddp_model, images), labels).backward()
            self.optimizer.zero_grad(set_to_none=True)
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)

    def _build(self, dataset: Dataset) -> torch.nn.Module:
        torch.manual_seed(self.config.seed)
        built = models.build(self.config.model, dataset.channels, dataset.classes)
        random_state.seed(self.config.seed + self.rank)  # of dropout and the like, which differ between ranks
        if self.batches.microbatches != self.world_size and any(
            isinstance(each, SyncBatchNorm) for each in built.modules()
        ):
            raise UsageError(
                f"--num-workers: {self.config.num_workers} has fewer workers than shares now, and this model's "
                "SyncBatchNorm needs all of them at once; give a fixed number of workers"
            )
        groups = batch_norm.BatchNormGroups.for_run(self.config.batch_size, self.config.norm_batch, self.world_size)
        placed = batch_norm.group(built.to(self.device), groups)
        for tensor in (*placed.parameters(), *placed.buffers()):
            if tensor.dim() == 4:  # the layouts are of images, and `to` would refuse a tensor of five dimensions
                tensor.data = tensor.data.contiguous(memory_format=self._layout)
        if self.config.compile == "on":
            _check_compiler(self.device)
            placed.compile()
        return placed

    def _train(self, epoch: EpochState, on_step: OnStep) -> None:
        self.ddp_model.train()
        self.timer.start()
        before, started = epoch.seconds, time.perf_counter()
        batches = self.timer.timed_batches(self.batches.train(self.epoch, epoch.step))
        for shares in zip(*[batches] * len(self.batches.local_microbatches), strict=True):
            self._step(shares, epoch.sums)
            self.timer.end_step()
            epoch.step += 1
            epoch.seconds = before + time.perf_counter() - started
            on_step(epoch.step, self.steps_per_epoch)
        epoch.seconds = before + time.perf_counter() - started

    def _step(self, shares: Sequence[Batch], sums: MetricSums) -> None:
        """One step of the optimizer from this rank's shares of it. Nothing waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        for number, (images, labels) in enumerate(shares, start=1):
            with self._sync_gradients(number == len(shares)):
                logits = self._forward(self.ddp_model, images)
                loss = cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
                loss.backward(
                    self._loss_scale
                )  # DDP takes the mean over the ranks, which may have shares of other numbers
            sums.add(labels, logits.detach(), loss.detach())
        self.timer.allreduce_finished()
        self.optimizer.step()
        self.schedule.step()

    def _sync_gradients(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are sent with the last share of a step."""
        alone = last or not isinstance(self.ddp_model, DistributedDataParallel)
        return nullcontext() if alone else self.ddp_model.no_sync()

    @torch.no_grad()
    def _test(self, on_batch: Callable[[], None]) -> Means:
        self.model.eval()
        batch_norm.sync_buffers(self.model)
        sums = MetricSums(self.device)
        for images, labels in self.batches.test():
            logits = self._forward(self.model, images)
            sums.add(labels, logits, cross_entropy(logits, labels))
            on_batch()
        return sums.mean()

    def _forward(self, network: torch.nn.Module, images: Tensor) -> Tensor:
        """Logits in fp32, whatever the precision of the layers."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return network(images.contiguous(memory_format=self._layout)).float()


def _check_compiler(device: torch.device) -> None:
    """For a GPU torch.compile has C code compiled, for a CPU C++."""
    named, usual = ("CC", ("cc", "gcc", "clang")) if device.type == "cuda" else ("CXX", ("c++", "g++", "clang++"))
    if not any(shutil.which(name) for name in (os.environ.get(named, ""), *usual)):
        raise UsageError(f"--compile: 'on' needs a compiler ({', '.join(usual)}), and there is none; leave it off")


class Means(NamedTuple):
    """Mean loss and accuracy (0..1) over a number of samples."""

    loss: float
    accuracy: float
    samples: int


class MetricSums:
    """Sums of an epoch on this rank; nothing is read back from the device before `mean`."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, right answers
        self.samples = 0

    def add(self, labels: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Count a batch: labels [n], logits [n, classes] and their mean loss."""
        correct = (logits.argmax(dim=1) == labels).sum()
        self.sums += torch.stack([loss * len(labels), correct])
        self.samples += len(labels)

    def state(self) -> tuple[list[float], int]:
        """What was counted."""
        return self.sums.tolist(), self.samples

    def load(self, state: tuple[list[float], int]) -> None:
        """Add what was counted elsewhere."""
        sums, samples = state
        self.sums += self.sums.new_tensor(sums)
        self.samples += samples

    def mean(self) -> Means:
        """Return the means over the samples of all ranks."""
        totals = torch.cat([self.sums, self.sums.new_tensor([self.samples])])
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss, correct, samples = totals.tolist()
        return Means(loss / samples, correct / samples, int(samples))
