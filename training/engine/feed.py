"""Parts of a data set that are prepared ahead of the training which uses them.

A recipe says what the parts are, in which order, and how to prepare one; a feed says where that is done. So the batches
are the same ones wherever they are prepared, and a run that was cut begins with the part that it needs next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

Part = TypeVar("Part")
Prepared = TypeVar("Prepared")

# Yields what a function makes of each part, in the order of the parts. Part and function travel between nodes.
Feed = Callable[[Iterable[Any], Callable[[Any], np.ndarray]], Iterator[np.ndarray]]

# Prepared parts that wait for the training, beside those that are being prepared.
AHEAD = 4


def in_threads(
    parts: Iterable[Part], prepare: Callable[[Part], Prepared], threads: int = 1, ahead: int = AHEAD
) -> Iterator[Prepared]:
    """Yield `prepare(part)` for each part, in order; threads of this process prepare the next ones meanwhile."""
    waiting = iter(parts)
    pool = ThreadPoolExecutor(threads, "feed")
    pending: deque[Future[Prepared]] = deque()
    try:
        while True:
            pending.extend(pool.submit(prepare, part) for part in islice(waiting, threads + ahead - len(pending)))
            if not pending:
                return
            yield pending.popleft().result()
    finally:  # a training that is interrupted doesn't wait for what nobody needs any more
        pool.shutdown(wait=False, cancel_futures=True)


def thread_feed(threads: int) -> Feed:
    """Return a feed of so many threads of this process."""
    return partial(in_threads, threads=threads)
