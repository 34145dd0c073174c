"""The training loop in plain PyTorch: one replica of a data-parallel run.

It takes rank and world size from torch.distributed where a process group is up, so it runs the same under Ray Train,
under torchrun and alone. Where it runs, and what becomes of its checkpoints, is the caller's business.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from training import data, model
from training.config import TrainingConfig
from training.data import Dataset

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
        device: Where the model and the data live.
    """

    def __init__(self, config: TrainingConfig, dataset: Dataset, device: torch.device) -> None:
        self.config, self.dataset, self.device = config, dataset, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL's collectives on objects go over the current device
        self.train, self.test = dataset.train.to(device), dataset.test.to(device)
        torch.manual_seed(config.seed)
        self.model = model.build(config.model, dataset.channels, dataset.classes).to(device)
        self.replicated = self._replicate()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=config.lr, total_steps=config.epochs * self.steps
        )
        self.history: list[Metrics] = []

    @property
    def epoch(self) -> int:
        """The epoch that comes next, counted from 0."""
        return len(self.history)

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch, the same on every rank."""
        return data.steps(len(self.train), self.config.batch_size, self.world_size)

    def run_epoch(self, on_step: OnStep = lambda step, steps: None) -> Metrics:
        """Train one epoch, test, and append the metrics to the history.

        Args:
            on_step: Called after every step with the steps done and the steps of the epoch.

        Returns:
            Losses (mean cross-entropy) and accuracies (0..1) over all samples of all ranks, and the seconds taken.
        """
        learning_rate = self.schedule.get_last_lr()[0]
        started = time.perf_counter()
        train = self._train(on_step)
        trained = time.perf_counter()
        test = self._test()
        seconds = trained - started
        metrics = {
            "epoch": self.epoch,
            **{f"train_{name}": value for name, value in train.items()},
            **{f"test_{name}": value for name, value in test.items()},
            "learning_rate": learning_rate,
            "train_seconds": seconds,
            "test_seconds": time.perf_counter() - trained,
            "samples_per_second": train["samples"] / seconds,
            "steps": self.steps,
            "world_size": self.world_size,
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

    def _replicate(self) -> nn.Module:
        if self.world_size == 1:
            return self.model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(self.model, device_ids=ids)

    def _train(self, on_step: OnStep) -> dict[str, Any]:
        self.replicated.train()
        batches = data.train_batches(
            self.dataset.train, self.config.batch_size, self.epoch, self.rank, self.world_size, self.config.seed
        )
        tally = Tally(self.device)
        for step, indices in enumerate(batches, start=1):
            labels, logits, loss = self._forward(self.replicated, self.train, indices)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            tally.add(labels, logits.detach(), loss.detach())
            on_step(step, len(batches))
        return tally.mean()

    @torch.no_grad()
    def _test(self) -> dict[str, Any]:
        self.model.eval()
        self._share_buffers()
        tally = Tally(self.device)
        for indices in data.test_batches(self.dataset.test, 4 * self.config.batch_size, self.rank, self.world_size):
            tally.add(*self._forward(self.model, self.test, indices))
        return tally.mean()

    def _share_buffers(self) -> None:
        """Give every rank rank 0's batch-norm statistics, so that what is tested is what is saved."""
        if self.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)

    def _forward(self, network: nn.Module, split: data.Split, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        indices = indices.to(self.device, non_blocking=True)
        labels = split.labels[indices]
        logits = network(self.dataset.normalize(split.images[indices]))
        return labels, logits, cross_entropy(logits, labels)

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
