"""The trainer of an image classifier: one rank of a data-parallel run, in plain PyTorch.

It takes rank and world size from torch.distributed if a process group is up, so it runs the same under Ray Train, under
torchrun and alone. Starting processes and storing checkpoints is left to its callers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm

from ray_on_ecs.checkpoint.trainer import TrainerState
from ray_on_ecs.errors import UsageError, counted
from training.engine import ddp, optim, random_state
from training.engine.agreement import is_alike
from training.engine.compiler import check_compiler
from training.engine.epochs import EpochState, EpochTrainer
from training.engine.feed import Feed, in_threads
from training.engine.trainer import EpochMetrics, OnStep
from training.recipes.images import models, running_statistics
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset
from training.recipes.images.loader import Batch, BatchLoader


class ImageMetrics(EpochMetrics):
    """The metrics of an epoch of image classification.

    Attributes:
        train_accuracy: Fraction of the training images, as they were augmented, that were classified correctly.
        test_accuracy: Fraction of the test images that are classified correctly.
        train_samples: Number of training images in the epoch, over all ranks.
        test_samples: Number of test images.
    """

    train_accuracy: float
    test_accuracy: float
    train_samples: int
    test_samples: int


# DDP rebuilds its buckets, in the order in which gradients arrived, before the third step.
BUCKET_REBUILD_STEPS = 2


class ImageTrainer(EpochTrainer):
    """A model with its optimizer, its schedule and the metrics of its finished epochs, on one rank.

    Attributes:
        model: The model, without DDP.
        ddp_model: The same model under DDP, if there are several ranks.
        batches: The batches of this rank.
        optimizer: The optimizer.
        schedule: The learning rate schedule, which advances with every step.

    Args:
        config: The run's settings.
        dataset: The whole data set; each rank takes its part.
        device: Where the model and the batches are.
        feed: Prepares the batches of images that are in files.

    Raises:
        UsageError: The settings don't fit the model or the data set, or the compiler is missing.
    """

    def __init__(self, config: ImageConfig, dataset: Dataset, device: torch.device, feed: Feed = in_threads) -> None:
        super().__init__(device)
        config = config.resolve_device(device.type)
        self.config = config
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # every step has the same shapes
        if not is_alike(dataset.fingerprint, device):
            raise UsageError(
                f"--data-dir: {dataset.name} has not the same images on every node; give s3://bucket/prefix"
            )
        self.batches = BatchLoader(dataset, config, self.rank, self.world_size, device, feed)
        self._autocast = config.precision == "bf16" or (config.precision == "auto" and ddp.all_have_bf16(device))
        self._channels_last = config.channels_last == "on" or (config.channels_last == "auto" and device.type == "cuda")
        self.model = self._build(dataset)
        static_graph = config.static_graph == "on" or (config.static_graph == "auto" and config.model in models.MODELS)
        self.ddp_model = ddp.wrap_ddp(
            self.model, config, device, bf16=self._autocast, static_graph=static_graph, timer=self.timer
        )
        self.optimizer, self.schedule = optim.build(
            self.model, config, self.batches.global_batch, config.epochs * self.batches.steps
        )
        self._loss_scale = torch.tensor(self.world_size / self.batches.microbatches, device=device)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the same on every rank."""
        return self.batches.steps

    @property
    def data_summary(self) -> dict[str, Any]:
        """The data set's entry in `result.json`."""
        dataset = self.batches.dataset
        return {
            "name": dataset.name,
            "train_samples": len(dataset.train),
            "test_samples": len(dataset.test),
            "classes": dataset.classes,
            **({"class_names": list(dataset.class_names)} if dataset.class_names else {}),
            "mean": dataset.mean,
            "std": dataset.std,
            "fingerprint": dataset.fingerprint,
        }

    def run_epoch(
        self, on_step: OnStep = lambda step, steps: None, on_test: Callable[[], None] = lambda: None
    ) -> ImageMetrics:
        """Train the rest of the epoch, test, and add the metrics to the history; every rank must call it.

        Args:
            on_step: Called after every step with the steps done and the steps of the epoch.
            on_test: Called after every batch of the test.

        Returns:
            The metrics, over all samples of all ranks.

        Raises:
            DivergedError: The training or test loss is not finite; every rank raises it.
        """
        epoch = self.current_epoch = self.current_epoch or EpochState(
            MetricSums(self.device), float(self.schedule.get_last_lr()[0])
        )
        train = self._train(self.ddp_model, epoch, self.batches.train(self.epoch, epoch.step), on_step)
        step_times = self.timer.summary()
        started = time.perf_counter()
        test = self._test(on_test)
        self._check_finite("test loss", test.loss)
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
            "test_seconds": time.perf_counter() - started,
            "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "samples_per_second": train.samples / epoch.seconds,
            **step_times,
            "steps": self.steps_per_epoch,
            "world_size": self.world_size,
            "global_batch": self.batches.global_batch,
        }
        self.history.append(metrics)
        self.current_epoch = None
        return metrics

    def state_dict(self) -> TrainerState:
        """Return what a later `load_state_dict` needs to continue; its tensors are those that are trained.

        Raises:
            DivergedError: A weight is not finite; every rank raises it.
        """
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # takes a second, the first time

        self._check_finite("largest weight", float(get_total_norm(self.model.parameters(), math.inf)))
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
                "epoch": epoch and epoch.position(),
            },
            "ranks": [own],
        }

    def load_state_dict(self, state: TrainerState) -> None:
        """Continue where `state` was taken, on as many ranks or on another number."""
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        progress = state["progress"]
        ranks = state["ranks"]
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(progress["schedule"])
        self._load_epochs(progress, MetricSums(self.device))
        self._rebuild_ddp_buckets(min(self.step, BUCKET_REBUILD_STEPS))
        self._load_ranks(progress, ranks)
        if self.current_epoch:
            self._load_buffers([each["buffers"] for each in ranks])

    def _load_buffers(self, ranks: list[dict[str, Tensor]]) -> None:
        """Take over the running statistics: the mean over these ranks, by the micro-batches that each had."""
        counts = [len(range(rank, self.batches.microbatches, len(ranks))) for rank in range(len(ranks))]
        weights = torch.tensor(counts, dtype=torch.float64, device=self.device) / sum(counts)
        for name, buffer in self.model.named_buffers():
            values = torch.stack([each[name].double() for each in ranks])
            buffer.copy_(torch.tensordot(weights, values, dims=1) if buffer.is_floating_point() else values[0])

    def _rebuild_ddp_buckets(self, steps: int) -> None:
        """Let DDP order its buckets, as it has done after so many steps.

        With three ranks or more the order of the sums, and so their last digit, follows from it. What these steps leave
        behind are running statistics, which are put back, and random states, which are loaded over.
        """
        if self.world_size < 3:
            return
        before = [buffer.clone() for buffer in self.model.buffers()]
        dataset = self.batches.dataset
        shape = dataset.train.images.shape[1:]
        images = dataset.normalize(torch.zeros(self.batches.batch_size, *shape, dtype=torch.uint8, device=self.device))
        labels = torch.zeros(len(images), dtype=torch.int64, device=self.device)
        self.ddp_model.train()
        for _ in range(steps):
            cross_entropy(self._forward(self.ddp_model, images), labels).backward()
            self.optimizer.zero_grad(set_to_none=True)
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)

    def _build(self, dataset: Dataset) -> torch.nn.Module:
        torch.manual_seed(self.config.seed)
        model = models.build(self.config.model, dataset.channels, dataset.classes)
        # Dropout and the like differ between ranks.
        random_state.seed_all(random_state.derive_seed(self.config.seed, random_state.RANK, self.rank))
        if self.batches.microbatches != self.world_size and any(
            isinstance(module, SyncBatchNorm) for module in model.modules()
        ):
            raise UsageError(
                f"--num-workers: {self.config.num_workers} trains on {counted(self.world_size, 'worker')} now, and "
                f"this model's SyncBatchNorm needs all {self.batches.microbatches} at once; give a fixed number of "
                "workers"
            )
        model = model.to(self.device)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = self._with_layout(tensor.data)
        if self.config.compile == "on":
            check_compiler(self.device)
            model.compile()
        return model

    def _advice(self) -> str:
        last = f"it was {self.history[-1]['train_loss']:.4g} in epoch {self.epoch - 1}; " if self.history else ""
        fp32 = " or --precision fp32" if self._autocast else ""
        return f"{last}start another run with a lower --lr (now {self.config.base_lr:g}){fp32}"

    def _step(self, microbatches: Sequence[Batch], sums: MetricSums) -> None:
        """Take one step of the optimizer from this rank's micro-batches. Nothing waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        for number, (images, labels) in enumerate(running_statistics.once_per_step(self.model, microbatches), start=1):
            with self._sync_gradients(self.ddp_model, last=number == len(microbatches)):
                logits = self._forward(self.ddp_model, images)
                loss = cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
                # DDP takes the mean over the ranks, which may have different numbers of micro-batches.
                loss.backward(self._loss_scale)
            sums.add(labels, logits.detach(), loss.detach())
        self.timer.allreduce_finished()
        self.optimizer.step()
        self.schedule.step()

    @torch.no_grad()
    def _test(self, on_batch: Callable[[], None]) -> Means:
        self.model.eval()
        running_statistics.sync_buffers(self.model, len(self.batches.local_microbatches) / self.batches.microbatches)
        sums = MetricSums(self.device)
        for images, labels in self.batches.test():
            logits = self._forward(self.model, images)
            sums.add(labels, logits, cross_entropy(logits, labels))
            on_batch()
        return sums.mean()

    def _forward(self, network: torch.nn.Module, images: Tensor) -> Tensor:
        """Return the logits [n, classes] of images [n, ...] in fp32, whatever the precision of the layers."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return network(self._with_layout(images)).float()

    def _with_layout(self, tensor: Tensor) -> Tensor:
        """Return images or weights of four dimensions in the memory layout of the run; others have no choice of one."""
        if not self._channels_last or tensor.dim() != 4:
            return tensor
        return tensor.to(memory_format=torch.channels_last)  # `contiguous` would leave one channel as it is


class Means(NamedTuple):
    """Mean loss and accuracy (0..1) over a number of samples."""

    loss: float
    accuracy: float
    samples: int


class MetricSums:
    """Sums over an epoch's samples on this rank; nothing is read from the device before `mean`."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, correct answers
        self.samples = 0

    def add(self, labels: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Add a batch: labels [n], logits [n, classes] and their mean loss."""
        correct = (logits.argmax(dim=1) == labels).sum()
        self.sums += torch.stack([loss * len(labels), correct])
        self.samples += len(labels)

    def state(self) -> tuple[list[float], int]:
        """Return the sums, and the number of samples."""
        return self.sums.tolist(), self.samples

    def load(self, state: tuple[list[float], int]) -> None:
        """Add sums of another rank or of an earlier process."""
        sums, samples = state
        self.sums += self.sums.new_tensor(sums)
        self.samples += samples

    def mean(self) -> Means:
        """Return the means over the samples of all ranks; every rank must call it, and waits for its device."""
        totals = torch.cat([self.sums, self.sums.new_tensor([self.samples])])
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss, correct, samples = totals.tolist()
        return Means(loss / samples, correct / samples, int(samples))
