"""The training loop in plain PyTorch: one replica of a data-parallel run.

It takes rank and world size from torch.distributed where a process group is up, so it runs the same under Ray Train,
under torchrun and alone. Where it runs, and what becomes of its checkpoints, is the caller's business.
"""

import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from training import ddp, model, norm, optim
from training.batches import Batches
from training.config import TrainingConfig
from training.data import Dataset
from training.errors import UsageError
from training.watch import Watch

Metrics = dict[str, Any]
OnStep = Callable[[int, int], None]


def best(history: list[Metrics]) -> Metrics:
    """The epoch with the highest test accuracy, the earliest of several."""
    return max(history, key=lambda each: each["test_accuracy"])


class Replica:
    """A model with its optimizer, its schedule and the epochs behind it, on one rank.

    Args:
        config: The run's settings.
        dataset: The whole data set; each rank takes its share.
        device: Where the model and the batches live.

    Raises:
        UsageError: The model, the batch size or the compiler that the settings want can't be had.
    """

    def __init__(self, config: TrainingConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL's collectives on objects go over the current device
            torch.backends.cudnn.benchmark = True  # the shapes of a step are those of the next
        self.batches = Batches(dataset, config, self.rank, self.world_size, device)
        self.watch = Watch(device)
        self._autocast = config.precision == "bf16" or (config.precision == "auto" and ddp.all_have_bf16(device))
        channels_last = config.channels_last == "on" or (config.channels_last == "auto" and device.type == "cuda")
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model = self._build(dataset)
        self.replicated = ddp.replicate(self.model, config, device, self._autocast, self.watch)
        self.optimizer, self.schedule = optim.build(
            self.model, config, self.batches.global_batch, config.epochs * self.batches.steps
        )
        self.history: list[Metrics] = []

    @property
    def epoch(self) -> int:
        """The epoch that comes next, counted from 0."""
        return len(self.history)

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch, the same on every rank."""
        return self.batches.steps

    def run_epoch(self, on_step: OnStep = lambda step, steps: None) -> Metrics:
        """Train one epoch, test, and append the metrics to the history.

        Args:
            on_step: Called after every step with the steps done and the steps of the epoch.

        Returns:
            Losses (mean cross-entropy, in training with its label smoothing) and accuracies (0..1) over all samples of
            all ranks, the seconds taken, and what the watch saw of the steps.
        """
        learning_rate = self.schedule.get_last_lr()[0]
        started = time.perf_counter()
        train = self._train(on_step)
        seconds = time.perf_counter() - started
        watched = self.watch.summary()
        tested = time.perf_counter()
        test = self._test()
        metrics = {
            "epoch": self.epoch,
            **{f"train_{name}": value for name, value in train.items()},
            **{f"test_{name}": value for name, value in test.items()},
            "learning_rate": learning_rate,
            "train_seconds": seconds,
            "test_seconds": time.perf_counter() - tested,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "samples_per_second": train["samples"] / seconds,
            **watched,
            "steps": self.steps,
            "world_size": self.world_size,
            "global_batch": self.batches.global_batch,
        }
        self.history.append(metrics)
        return metrics

    def state(self) -> dict[str, Any]:
        """All that a later `load` needs to go on, but the weights; the same call on every rank."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": self._gather(_random_state(self.device)),
            "history": self.history,
        }

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Continue where `weights` and `state` were taken."""
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.history = state["history"]
        if self.rank < len(state["random"]):
            _set_random_state(state["random"][self.rank], self.device)

    def _build(self, dataset: Dataset) -> torch.nn.Module:
        torch.manual_seed(self.config.seed)
        built = model.build(self.config.model, dataset.channels, dataset.classes)
        torch.manual_seed(self.config.seed + self.rank)  # of dropout and the like, which differ between ranks
        groups = norm.Groups.of(self.config.batch_size, self.config.norm_batch, self.world_size)
        placed = norm.group(built.to(self.device), groups)
        for tensor in (*placed.parameters(), *placed.buffers()):
            if tensor.dim() == 4:  # the layouts are of images, and `to` would refuse a tensor of five dimensions
                tensor.data = tensor.data.contiguous(memory_format=self._layout)
        if self.config.compile == "on":
            _check_compiler(self.device)
            placed.compile()
        return placed

    def _train(self, on_step: OnStep) -> dict[str, Any]:
        self.replicated.train()
        tally = Tally(self.device)
        self.watch.start()
        for step, (images, labels) in enumerate(self.watch.waiting_for(self.batches.train(self.epoch)), start=1):
            tally.add(labels, *self._step(images, labels))
            self.watch.stepped()
            on_step(step, self.steps)
        return tally.mean()

    def _step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the optimizer; the logits and the loss that it was made from. Nothing waits for the device."""
        logits = self._forward(self.replicated, images)
        loss = cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.watch.received()
        self.optimizer.step()
        self.schedule.step()
        return logits.detach(), loss.detach()

    @torch.no_grad()
    def _test(self) -> dict[str, Any]:
        self.model.eval()
        norm.share_buffers(self.model)
        tally = Tally(self.device)
        for images, labels in self.batches.test():
            logits = self._forward(self.model, images)
            tally.add(labels, logits, cross_entropy(logits, labels))
        return tally.mean()

    def _forward(self, network: torch.nn.Module, images: Tensor) -> Tensor:
        """Logits in fp32, whatever the precision of the layers."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return network(images.contiguous(memory_format=self._layout)).float()

    def _gather(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def _random_state(device: torch.device) -> dict[str, Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _check_compiler(device: torch.device) -> None:
    """For a GPU torch.compile has C code compiled, for a CPU C++."""
    named, usual = ("CC", ("cc", "gcc", "clang")) if device.type == "cuda" else ("CXX", ("c++", "g++", "clang++"))
    if not any(shutil.which(name) for name in (os.environ.get(named, ""), *usual)):
        raise UsageError(f"--compile: 'on' needs a compiler ({', '.join(usual)}), and there is none; leave it off")


class Tally:
    """Sums of an epoch on this rank; nothing is read back from the device before `mean`."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, right answers
        self.samples = 0

    def add(self, labels: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Count a batch: labels [n], logits [n, classes] and their mean loss."""
        hits = (logits.argmax(dim=1) == labels).sum()
        self.sums += torch.stack([loss * len(labels), hits])
        self.samples += len(labels)

    def mean(self) -> dict[str, Any]:
        """Loss and accuracy over the samples of all ranks, and how many they were."""
        totals = torch.cat([self.sums, self.sums.new_tensor([self.samples])])
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss, hits, samples = totals.tolist()
        return {"loss": loss / samples, "accuracy": hits / samples, "samples": int(samples)}
