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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import pyarrow
import ray
import ray.data
from ray.data import ExecutionResources
from ray.util import placement_group, remove_placement_group

from ray_on_ecs.contract import HELPERS, NODE_GROUP_LABEL
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.run.ray_cluster import is_helper
from training.engine.feed import Feed

HELPER_LABELS = {NODE_GROUP_LABEL: HELPERS}
# Parts of a pipeline. After each it is asked anew whether there are helpers.
PIPELINE_PARTS = 512

# Parts of one task: between two tasks on a CPU some hundredths of a second pass.
TASK_PARTS = 4
FIRST_TASKS = (1, 1, 2)
# Tasks whose results are fetched to the worker's node before it needs them.
AHEAD_TASKS = 1
# After so long without a result it is asked whether there is a helper left.
LOOK_SECONDS = 10.0

_PART, _RESULT = "part", "result"


def helper_feed(otherwise: Feed, cpus: int | None, workers: int, may_start: bool) -> Feed:
    """Return a feed of the helpers, wherever there are any.

    Args:
        otherwise: The feed to use while there are none. It also takes what the helpers can't prepare, such as files
            that only this node has, and says what is wrong with what can't be prepared at all.
        cpus: How many of their CPUs all workers may use together, or None for all; each worker has one at least.
        workers: The number of workers.
        may_start: Whether the stack starts helpers when a run asks for them.
    """
    share = math.inf if cpus is None else math.ceil(cpus / workers)

    def feed(parts: Iterable[Any], prepare: Callable[[Any], np.ndarray]) -> Iterator[np.ndarray]:
        waiting = iter(parts)
        while some := list(islice(waiting, PIPELINE_PARTS)):
            prepared = 0
            if _has_helpers():
                for result in _on_helpers(some, prepare, share):
                    yield result
                    prepared += 1
            if rest := some[prepared:]:
                with _asking_for_a_helper() if may_start else nullcontext():
                    yield from otherwise(rest, prepare)

    return feed


def _has_helpers() -> bool:
    return any(node["Alive"] and is_helper(node["Labels"]) for node in ray.nodes())


@contextmanager
def _asking_for_a_helper() -> Generator[None]:
    """Let the stack start a helper: it counts the requests that wait in Ray."""
    group = placement_group([{"CPU": 1.0}], bundle_label_selector=[HELPER_LABELS])
    try:
        yield
    finally:
        remove_placement_group(group)


def _on_helpers(parts: list[Any], prepare: Callable[[Any], np.ndarray], cpus: float) -> Iterator[np.ndarray]:
    """Yield what a Ray Data pipeline makes of the parts, up to one that it can't prepare, or the end of all helpers.

    Raises:
        RayError: Ray could not run it.
    """

    def make(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = np.empty(len(batch[_PART]), object)  # of bytes: numpy's own type for them would cut zeros off
        made[:] = [pickle.dumps(_result(prepare, pickle.loads(part))) for part in batch[_PART]]
        return {_RESULT: made}

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it tells the beginning and end of each pipeline
    data = ray.data.from_arrow(
        [pyarrow.table({_PART: [pickle.dumps(part) for part in some]}) for some in _tasks(parts)]
    )
    context = data.context
    options = context.execution_options
    options.preserve_order = True
    options.label_selector = HELPER_LABELS
    options.resource_limits = ExecutionResources(cpu=cpus)
    context.enable_progress_bars = False
    context.target_max_block_size = None  # one block for each task
    # Its own prefetching would hold back what is there until the blocks after it are.
    results = data.map_batches(make, batch_size=None)
    for block in _fetched(iter(results.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0))):
        for result in block:
            if result is None:
                return
            yield result


def _fetched(blocks: Iterator[Mapping[str, np.ndarray]]) -> Iterator[list[np.ndarray | None]]:
    """Yield the results of each block, which a thread fetches ahead; ends early if there is no helper any more."""

    def fetch() -> list[np.ndarray | None] | None:
        block = next(blocks, None)
        return None if block is None else [pickle.loads(each) for each in block[_RESULT]]

    pool = ThreadPoolExecutor(1, "fetch")
    pending = deque(pool.submit(fetch) for _ in range(1 + AHEAD_TASKS))
    try:
        while True:
            try:
                results = pending[0].result(LOOK_SECONDS)
            except TimeoutError:
                if _has_helpers():
                    continue
                return
            if results is None:
                return
            pending.popleft()
            pending.append(pool.submit(fetch))
            yield results
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _result(prepare: Callable[[Any], np.ndarray], part: Any) -> np.ndarray | None:
    """Prepare a part; None if that can't be done here."""
    try:
        return prepare(part)
    except TrainingError:
        return None


def _tasks(parts: list[Any]) -> Iterator[list[Any]]:
    """Yield the parts of each task. The first ones are small, so that the training can begin."""
    waiting = iter(parts)
    for size in chain(FIRST_TASKS, repeat(TASK_PARTS)):
        if not (some := list(islice(waiting, size))):
            return
        yield some
