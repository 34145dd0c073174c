"""Step times of an epoch, and the parts of them spent waiting; a GPU is asked once, at the end of the epoch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class StepTimes(TypedDict):
    """Times of an epoch's steps, over all ranks.

    Attributes:
        step_seconds_median: Median over the steps of all ranks.
        step_seconds_p95: 95th percentile over the steps of all ranks.
        data_wait_fraction: Fraction of all ranks' step time spent waiting for a batch.
        exposed_comm_fraction: Fraction of all ranks' step time between a rank's last gradient and the end of its
            all-reduce, which includes waiting for slower ranks; None where communication has no such end.
        gpu_memory_bytes: Peak memory that PyTorch allocated on any rank's GPU, or None on CPUs.
    """

    step_seconds_median: float
    step_seconds_p95: float
    data_wait_fraction: float
    exposed_comm_fraction: float | None
    gpu_memory_bytes: int | None


class StepTimer:
    """Times one rank's steps. Call `start` before the first step of an epoch and `end_step` after each.

    On a GPU it records events in the stream, so nothing waits for the device; on a CPU it reads the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        """Begin an epoch; forget the one before."""
        self._steps: list[Any] = [self._now()]
        self._waits: list[tuple[Any, Any]] = []
        self._ready: Any = None
        self._exchanges: list[tuple[Any, Any]] = []
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def timed_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and record how long each took to arrive."""
        iterator = iter(batches)
        while True:
            asked = self._now()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waits.append((asked, self._now()))
            yield batch

    def gradients_ready(self) -> None:
        """Record that this rank's gradients are computed. The rest of the backward pass is exposed communication."""
        self._ready = self._now()

    def allreduce_finished(self) -> None:
        """Record that the gradients are the mean over all ranks."""
        if self._ready is not None:
            self._exchanges.append((self._ready, self._now()))
            self._ready = None

    def end_step(self) -> None:
        """Record that a step is done."""
        self._steps.append(self._now())

    def summary(self) -> StepTimes:
        """Return the times of the epoch over all ranks; every rank must call it, and waits for its device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        steps = [self._between(*pair) for pair in pairwise(self._steps)]
        row = [self._peak_memory(), self._total(self._waits), self._total(self._exchanges), *steps]
        everyone = _gather(torch.tensor(row, dtype=torch.float64), self._device)
        times = everyone[:, 3:]
        total = times.sum().item()
        return {
            "step_seconds_median": times.flatten().quantile(0.5).item(),
            "step_seconds_p95": times.flatten().quantile(0.95).item(),
            "data_wait_fraction": everyone[:, 1].sum().item() / total,
            "exposed_comm_fraction": everyone[:, 2].sum().item() / total,
            "gpu_memory_bytes": int(everyone[:, 0].max()) if self._device.type == "cuda" else None,
        }

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1000 if self._device.type == "cuda" else second - first

    def _total(self, pairs: Iterable[tuple[Any, Any]]) -> float:
        return sum(self._between(*pair) for pair in pairs)

    def _peak_memory(self) -> float:
        return float(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else 0.0


def _gather(row: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the rows of all ranks, [ranks, values], on the CPU."""
    if not dist.is_initialized():
        return row[None]
    row = row.to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).cpu()
