"""How long the steps of an epoch take, and what of it is waiting; the device is asked once, at the end of the epoch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class StepTimes(TypedDict):
    """The steps of an epoch, over all ranks; see `engine.trainer.EpochMetrics`."""

    step_seconds_median: float
    step_seconds_p95: float
    data_wait_fraction: float
    exposed_comm_fraction: float
    gpu_memory_bytes: int | None


class StepTimer:
    """Watches one rank's steps. Call `start` before the first step of an epoch and `end_step` after each.

    On a GPU the moments are events in its stream, so nobody waits for it; on a CPU they are the clock's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        """Forget what was seen, and begin an epoch."""
        self._steps: list[Any] = [self._now()]
        self._waits: list[tuple[Any, Any]] = []
        self._ready: Any = None
        self._exchanges: list[tuple[Any, Any]] = []
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def timed_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, with note of the time until each is handed out."""
        iterator, missing = iter(batches), object()
        while True:
            asked = self._now()
            batch: Any = next(iterator, missing)
            self._waits.append((asked, self._now()))
            if batch is missing:
                return
            yield batch

    def gradients_ready(self) -> None:
        """Gradients are ready to be sent. After the last of a step nothing is left but to wait for the network."""
        self._ready = self._now()

    def allreduce_finished(self) -> None:
        """The backward pass is over and the gradients are those of all ranks."""
        if self._ready is not None:
            self._exchanges.append((self._ready, self._now()))
            self._ready = None

    def end_step(self) -> None:
        """A step is done."""
        self._steps.append(self._now())

    def summary(self) -> StepTimes:
        """What the epoch came to, over all ranks; the same call on every rank.

        Returns:
            `step_seconds_median` and `step_seconds_p95` over the steps of all ranks; `data_wait_fraction` and
            `exposed_comm_fraction`, of all ranks' time: until a batch was there, and between the last gradient's being
            ready and the end of its exchange, also with a slower rank; `gpu_memory_bytes`, the most that training
            held on any rank's GPU, None on CPUs.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        steps = [self._between(*pair) for pair in zip(self._steps, self._steps[1:], strict=False)]
        data, network = (sum(self._between(*pair) for pair in pairs) for pairs in (self._waits, self._exchanges))
        everyone = _gather(torch.tensor([self._peak(), data, network, *steps], dtype=torch.float64), self._device)
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

    def _peak(self) -> float:
        return float(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else 0.0


def _gather(row: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The rows of all ranks, one above the other."""
    if not dist.is_initialized():
        return row[None]
    row = row.to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).cpu()
