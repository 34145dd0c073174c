"""Receipt of a run's network: the one that NCCL has chosen and its bandwidth, beside what the instances have.

The driver lets the workers measure it at the first start on several nodes, and with --require-efa also at later ones
on other nodes. A measurement that fails or hangs delays the start by `LIMIT_SECONDS` at most, and never ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import EfaError, counted, resume_line
from ray_on_ecs.run.group import Place, WorkerStatuses
from ray_on_ecs.run.nccl_log import EFA, Transport
from ray_on_ecs.run.network import BYTES

# On large instances PyTorch's import, CUDA and NCCL take half of it.
LIMIT_SECONDS = 60.0
TOO_LONG = f"it did not end within {LIMIT_SECONDS:.0f} s"
NO_TORCH = "No module named 'torch'"


@dataclass(frozen=True)
class InstanceNetwork:
    """Network of the instances as the stack describes it.

    Attributes:
        types: Their types.
        efa: EFA interfaces of each; 0 without EFA, and if that is not known.
        gbits: Baseline bandwidth of the slowest type in Gbit/s, or None if it is not known.
    """

    types: tuple[str, ...] = ()
    efa: int = 0
    gbits: float | None = None


@dataclass(frozen=True)
class Receipt:
    """Result of one measurement."""

    nodes: int
    ranks: int  # processes that have measured
    transport: Transport | None  # of ranks that differ, with the fewest EFA interfaces; None if it is not known
    seconds: float  # of an all-reduce; 0 if it was not measured
    failure: str  # why it was not measured
    instances: InstanceNetwork

    @property
    def gbits(self) -> float | None:
        """Bus bandwidth in Gbit/s: what each node sends, and receives, during an all-reduce by rings.

        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md#allreduce
        """
        if not (self.seconds and self.ranks):
            return None
        return 2 * (self.ranks - 1) / self.ranks * BYTES / self.seconds * 8 / 1e9

    @property
    def is_without_efa(self) -> bool:
        """True if NCCL is known to use another network than EFA."""
        return self.transport is not None and self.transport.name != EFA

    @property
    def line(self) -> str:
        """The receipt in one line."""
        used = str(self.transport) if self.transport else "the network that is used is not known"
        if self.gbits is None:
            way_out = "--network-check off starts the script without the measurement"
            return f"network: {used}; its bandwidth was not measured: {self.failure}; {way_out}"
        has = self.instances
        baseline = f", baseline of {' and '.join(has.types)}: {has.gbits:g} Gbit/s" if has.gbits else ""
        size = f"all-reduce of {BYTES // 2**20} MiB on {self.nodes} nodes"
        return f"network: {used}; {size}: {self.gbits:.3g} Gbit/s per node{baseline}"

    @property
    def has_torch(self) -> bool:
        """False if there is nothing to measure with, as in an image for another library."""
        return NO_TORCH not in self.failure

    @property
    def warning(self) -> str:
        """Line on EFA that is paid and not used; empty if there is none."""
        has, used = self.instances.efa, self.transport
        if not has or used is None or used.library != "NCCL":
            return ""
        if used.name != EFA:
            why = f" ({used.reason})" if used.reason else ""
            return f"network: the instances have EFA ({counted(has, 'interface')}), and {used} instead{why}"
        if 0 < used.count < has:
            return f"network: NCCL has found {used.count} of the {has} EFA interfaces of a node"
        return ""

    def document(self) -> dict[str, Any]:
        """Return the receipt for run.json; unknown values are None."""
        used, has = self.transport, self.instances
        return {
            "library": used and used.library,
            "transport": used and used.name,
            "interfaces": list(used.interfaces) if used else [],
            "interface_count": (used.count or None) if used else None,
            "reason": (used.reason or None) if used else None,
            "nodes": self.nodes,
            "ranks": self.ranks or None,
            "bytes": BYTES,
            "seconds": self.seconds or None,
            "busbw_gbits": round(self.gbits, 3) if self.gbits else None,
            "instance_types": list(has.types),
            "baseline_gbits": has.gbits,
            "efa_interfaces": has.efa,
            "failure": self.failure or None,
            "warning": self.warning or None,
        }


class NetworkCheck:
    """The driver's side of the measurements of a run."""

    def __init__(self, config: RunConfig) -> None:
        starts_ranks = not (config.mpi or config.per_node or config.driver)
        self._is_on = starts_ranks and config.network_check == "on"
        self._requires_efa = config.require_efa
        self._nodes: set[str] = set()  # that measure
        self._measured: set[str] = set()
        self._until = 0.0

    def begin(self, places: Sequence[Place]) -> bool:
        """Return whether the workers in these places are to measure the network now."""
        nodes = {place.node_id for place in places}
        if not self._is_on or len(nodes) < 2 or nodes <= self._measured:
            return False
        self._nodes, self._until = nodes, time.monotonic() + LIMIT_SECONDS
        return True

    def result(self, workers: WorkerStatuses, count: int, instances: Callable[[], InstanceNetwork]) -> Receipt | None:
        """Return the receipt of `count` workers once all have measured, one has failed, or the time is over.

        A start that ends before has not measured. After a receipt all GPUs would wait again for a line that hardly
        changes, so only --require-efa measures other nodes, unless that has hung.
        """
        parts = {rank: worker.network for rank, worker in workers.items() if worker.network}
        failed = {rank: part.failure for rank, part in parts.items() if part.failure}
        is_done = len(parts) == count and all(part.has_ended for part in parts.values())
        if not (failed or is_done or time.monotonic() >= self._until):
            return None
        rank = min(failed, default=0)
        failure = f"rank {rank}: {failed[rank]}" if failed else "" if is_done else TOO_LONG
        self._measured |= self._nodes
        self._is_on = self._requires_efa and failure != TOO_LONG
        used = [part.transport for part in parts.values() if part.transport]
        least = min(used, key=lambda each: (each.name == EFA, each.count), default=None)
        times = [part.seconds for part in parts.values() if part.seconds > 0]
        seconds = 0.0 if failure else max(times, default=0.0)
        return Receipt(len(self._nodes), len(times), least, seconds, failure, instances())


def efa_error(receipt: Receipt, run_name: str | None, *, has_begun: bool) -> EfaError:
    """Return the error of a run that must use EFA and does not; `has_begun` is True once its script was started."""
    why = f" ({receipt.transport.reason})" if receipt.transport and receipt.transport.reason else ""
    what = f"--require-efa: {receipt.transport}, not EFA{why}"
    if not has_begun:
        return EfaError(f"{what}; the script was not started; see docs/efa.md, or leave --require-efa out")
    way_on = f"see docs/efa.md; {resume_line(run_name)}"
    return EfaError(f"{what}; the script was not started again, and its files are kept; {way_on}")
