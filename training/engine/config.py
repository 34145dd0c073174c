"""The settings that every recipe shares: how long it trains, its optimizer, its precision and DDP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from ray_on_ecs.config import AUTO_ON_OFF, ON_OFF, RunConfig, fault_tolerance, setting

DTYPES = ("auto", "bf16", "fp32")
CPU_BATCH_SIZE = 8
GPU_BATCH_SIZE = 16

how = partial(setting, group="how")
how_fast = partial(setting, group="how fast")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig):
    """The settings of a run that `engine.fit` trains."""

    epochs: int = how(
        1, "passes over the training tokens; each ends with a test and a checkpoint", type=int, at_least=1
    )
    batch_size: int | None = how(
        None,
        "sequences that each worker computes at once; a step of more takes several turns "
        f"(default: {CPU_BATCH_SIZE} on CPUs, {GPU_BATCH_SIZE} on GPUs)",
        type=int,
        at_least=1,
    )
    optimizer: str = how("adamw", "with betas of 0.9 and 0.95", choices=("adamw",))
    lr: float = how(1e-3, "peak learning rate", type=float, above=0.0)
    weight_decay: float = how(0.1, "weight decay, not applied to norms", type=float, at_least=0.0)
    seed: int = how(0, "seed of the weights and the shuffling", type=int, at_least=0, at_most=2**32 - 1)
    precision: str = how_fast("auto", "bf16 autocast, or fp32; auto: bf16 on GPUs that support it", choices=DTYPES)
    gradient_dtype: str = how_fast(
        "auto", "dtype in which workers exchange gradients; auto: that of --precision", choices=DTYPES
    )
    fused_optimizer: str = how_fast(
        "on", "run an optimizer step as one kernel instead of one for each operation", choices=ON_OFF, may_change=True
    )
    compile: str = how_fast(
        "off",
        "torch.compile; it needs a compiler, which the image contains",
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
        "on: DDP assumes that every step uses the same parameters, as it does; auto: unless a step takes several turns",
        choices=AUTO_ON_OFF,
        may_change=True,
    )
    data_workers: int | None = how_fast(
        None,
        "CPUs that tokenize a corpus: of the stack's helpers for all workers together, at least one for each, or else "
        "threads of each worker (default: all that there are)",
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
        return GPU_BATCH_SIZE if self.device == "cuda" else CPU_BATCH_SIZE

    def resolve_device(self, device: str) -> Self:
        """Return this config for `cuda` or `cpu`, with its default batch size filled in; `num_workers` comes first."""
        config = replace(self, device=device)
        return replace(config, batch_size=config.local_batch_size)
