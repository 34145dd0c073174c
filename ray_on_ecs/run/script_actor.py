"""Actor of Ray that is the process of one worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util import get_node_ip_address

from ray_on_ecs import logs
from ray_on_ecs.run.group import Directive, Place, WorkerRank, WorkerStatus
from ray_on_ecs.run.worker import ScriptWorker, Settings


@dataclass(frozen=True)
class Location:
    """The node and the GPUs of an actor."""

    node_id: str
    host: str
    gpus: tuple[str, ...]


class ScriptActor:
    """A worker's process."""

    _worker: ScriptWorker

    def locate(self) -> Location:
        """Return where it is."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Location(ray.get_runtime_context().get_node_id(), get_node_ip_address(), tuple(gpus))

    def begin(self, settings: Settings, rank: WorkerRank, place: Place, gpus: Sequence[str], mark: str) -> None:
        """Start the worker, whose last line to print is `mark`.

        The GPUs are those of all workers of the node: a script takes one by LOCAL_RANK, as under torchrun.
        """
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        logs.set_up("", settings.config.variables)
        self._worker = ScriptWorker(settings, rank, place)
        threading.Thread(target=self._run, args=(mark,), name="worker", daemon=True).start()

    def _run(self, mark: str) -> None:
        self._worker.run()
        print(mark, flush=True)

    def poll(self, number: int, directive: Directive, known: int, seconds: float) -> tuple[int, WorkerStatus]:
        """See Exchange."""
        return self._worker.exchange.poll(number, directive, known, seconds)
