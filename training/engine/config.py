"""The settings that every recipe shares: how long it trains, its optimizer, its precision and DDP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from ray_on_ecs.config import AUTO_ON_OFF, ON_OFF, RunConfig, fault_tolerance, setting

DEFAULT_LR = {"adamw": 3e-3, "sgd": 0.1}
DEFAULT_WEIGHT_DECAY = {"adamw": 0.05, "sgd": 5e-4}
DTYPES = ("auto", "bf16", "fp32")
CPU_BATCH_SIZE = 64
# A GPU alone is busy with 512 small images. Several have to wait for the network, unless each step has more to compute:
# docs/training.md has the arithmetic.
GPU_BATCH_SIZE = 512
GPUS_BATCH_SIZE = 2048

how = partial(setting, group="how")
how_fast = partial(setting, group="how fast")


def _per_optimizer(defaults: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} for {name}" for name, value in defaults.items())


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig):
    """The settings of a run that `engine.fit` trains."""

    epochs: int = how(4, "passes over the training set", type=int, at_least=1)
    batch_size: int | None = how(
        None,
        "samples per step on each worker; the global batch is this times the workers "
        f"(default: {CPU_BATCH_SIZE} on CPUs, {GPU_BATCH_SIZE} on one GPU, up to {GPUS_BATCH_SIZE} on each of several)",
        type=int,
        at_least=1,
    )
    optimizer: str = how(
        "adamw", "both use a one-cycle schedule; sgd uses Nesterov momentum", choices=tuple(DEFAULT_LR)
    )
    lr: float | None = how(
        None,
        "peak learning rate at a global batch of 256; sgd scales it with the global batch, adamw with its square root "
        f"(default: {_per_optimizer(DEFAULT_LR)})",
        type=float,
        above=0.0,
    )
    weight_decay: float | None = how(
        None,
        f"weight decay, not applied to biases and norms (default: {_per_optimizer(DEFAULT_WEIGHT_DECAY)})",
        type=float,
        at_least=0.0,
    )
    seed: int = how(
        0, "seed of the weights, the shuffling and the augmentation", type=int, at_least=0, at_most=2**32 - 1
    )
    precision: str = how_fast("auto", "bf16 autocast, or fp32; auto: bf16 on GPUs that support it", choices=DTYPES)
    gradient_dtype: str = how_fast(
        "auto", "dtype in which workers exchange gradients; auto: that of --precision", choices=DTYPES
    )
    fused_optimizer: str = how_fast(
        "on", "run an optimizer step as one kernel instead of one for each operation", choices=ON_OFF, may_change=True
    )
    compile: str = how_fast(
        "off",
        "torch.compile; it needs a compiler, which the image contains if it is built with one",
        choices=ON_OFF,
        may_change=True,
    )
    bucket_mb: float | None = how_fast(
        None,
        "MB of gradients per DDP all-reduce (default: DDP's own, 25 after a first 1)",
        type=float,
        above=0.0,
        may_change=True,
    )
    static_graph: str = how_fast(
        "auto",
        "on: DDP assumes that every step uses the same parameters; off: steps may skip some; auto: on for the models "
        "that come with a recipe",
        choices=AUTO_ON_OFF,
        may_change=True,
    )
    data_workers: int | None = how_fast(
        None,
        "CPUs that prepare data that is not kept in memory: of the stack's helpers for all workers together, at least "
        "one for each, or else threads of each worker (default: all that there are)",
        type=int,
        at_least=1,
        may_change=True,
    )

    keep_checkpoints: int = fault_tolerance(
        3, "number of latest checkpoints to keep, in addition to the best one", type=int, at_least=1
    )
    checkpoint_seconds: float = fault_tolerance(
        300.0, "seconds between checkpoints within an epoch; each epoch also ends with one", type=float, at_least=0.0
    )
    max_failed_checkpoints: int = fault_tolerance(
        3, "checkpoints in a row that may fail to be stored before the run ends", type=int, at_least=0
    )

    def microbatches(self, world_size: int) -> int:
        """Return the micro-batches of `batch_size` samples in a step: one for each worker that the run may have."""
        return self.workers[1] if self.workers else world_size

    @property
    def local_batch_size(self) -> int:
        """Samples in a micro-batch: `batch_size`, or the default for the device and the number of workers."""
        return self.default_batch_size if self.batch_size is None else self.batch_size

    @property
    def default_batch_size(self) -> int:
        """The batch size of a run that gives none; until the device is known it is that of CPUs."""
        if self.device != "cuda":
            return CPU_BATCH_SIZE
        return GPU_BATCH_SIZE if self.microbatches(1) == 1 else GPUS_BATCH_SIZE

    @property
    def base_lr(self) -> float:
        """Peak learning rate at a global batch of 256: `lr`, or the optimizer's default."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    @property
    def decay(self) -> float:
        """Weight decay of the weights: `weight_decay`, or the optimizer's default."""
        return DEFAULT_WEIGHT_DECAY[self.optimizer] if self.weight_decay is None else self.weight_decay

    def resolve_defaults(self) -> Self:
        """Return this config with the optimizer's defaults and a run name filled in."""
        return replace(super().resolve_defaults(), lr=self.base_lr, weight_decay=self.decay)

    def resolve_device(self, device: str) -> Self:
        """Return this config for `cuda` or `cpu`, with its default batch size filled in; `num_workers` comes first."""
        config = replace(self, device=device)
        return replace(config, batch_size=config.local_batch_size)
