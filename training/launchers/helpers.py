"""The CPU helpers of a stack, on which Ray Data prepares what the workers train on.

Each worker has a pipeline of its own, of the parts that it needs next, in their order: which part goes to which worker
does not depend on who is faster, so that a run sees the same batches with helpers, without, and after a restart. Ray
Data shares the helpers between the pipelines, starts a task again whose node is gone, and asks for more helpers while
they are all busy.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import ray
import ray.data
from ray.data import ExecutionResources
from ray.util import placement_group, remove_placement_group

from training.engine.feed import AHEAD, Feed
from training.errors import TrainingError
from training.launchers.ray_cluster import HELPERS, NODE_GROUP_LABEL, is_helper
from training.run.workers_parameter import read_workers

HELPER_LABELS = {NODE_GROUP_LABEL: HELPERS}
# Parts of a pipeline. After each it is asked anew whether there are helpers.
PIPELINE_PARTS = 512

_PART, _PREPARED, _ERROR = "part", "prepared", "error"


def helper_feed(otherwise: Feed, cpus: int | None, workers: int) -> Feed:
    """Return a feed of the helpers, wherever there are any.

    Args:
        otherwise: The feed to use while there are none.
        cpus: How many of their CPUs all workers may use together, or None for all.
        workers: The number of workers.
    """

    def feed(parts: Iterable[Any], prepare: Callable[[Any], np.ndarray]) -> Iterator[np.ndarray]:
        waiting = iter(parts)
        while some := list(islice(waiting, PIPELINE_PARTS)):
            if _has_helpers():
                yield from _on_helpers(some, prepare, math.inf if cpus is None else math.ceil(cpus / workers))
            else:
                with _asking_for_a_helper():
                    yield from otherwise(some, prepare)

    return feed


def _has_helpers() -> bool:
    return any(node["Alive"] and is_helper(node["Labels"]) for node in ray.nodes())


@contextmanager
def _asking_for_a_helper() -> Generator[None]:
    """Let the stack start a helper, if it can have any: it counts the requests that wait in Ray."""
    workers = read_workers()
    if not (workers and workers.get("scaling", {}).get(HELPERS)):
        yield
        return
    group = placement_group([{"CPU": 1.0}], bundle_label_selector=[HELPER_LABELS])
    try:
        yield
    finally:
        remove_placement_group(group)


def _on_helpers(parts: list[Any], prepare: Callable[[Any], np.ndarray], cpus: float) -> Iterator[np.ndarray]:
    """Yield what a Ray Data pipeline makes of the parts.

    Raises:
        TrainingError: What `prepare` raised.
        RayError: Ray could not run it.
    """

    def make(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        try:
            return {_PREPARED: prepare(pickle.loads(batch[_PART][0]))}
        except TrainingError as error:  # as a value: of an exception Ray would keep the text alone
            return {_ERROR: np.frombuffer(pickle.dumps(error), np.uint8)}

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it tells the beginning and end of each pipeline
    data = ray.data.from_items([{_PART: pickle.dumps(part)} for part in parts], override_num_blocks=len(parts))
    context = data.context
    options = context.execution_options
    options.preserve_order = True
    options.label_selector = HELPER_LABELS
    options.resource_limits = ExecutionResources(cpu=cpus)
    context.enable_progress_bars = False
    context.target_max_block_size = None  # one block for each part
    blocks = data.map_batches(make, batch_size=None)
    for batch in blocks.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=AHEAD):
        if _ERROR in batch:
            raise pickle.loads(batch[_ERROR].tobytes())
        yield np.require(batch[_PREPARED], requirements="W")  # PyTorch needs memory that may be written to
