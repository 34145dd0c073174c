"""Calls to AWS at the same time, whose answers and errors are taken in the caller's order, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Each function that waits has some eight frames on Python's stack.
AT_ONCE = 16


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Make calls of the AWS provider's functions at the same time, and equal ones once; all Futures are done.

    A function that waits for its answer runs Pulumi's event loop, and so other callbacks, in which functions may wait,
    as in those of `Output.apply`. In a thread it could not wait for what the program's loop does, such as transforms.
    https://github.com/pulumi/pulumi/pull/3056
    """
    names = [repr(call) for call in calls]
    answers: dict[str, Future[Any]] = {name: Future() for name in names}
    todo = list(dict(zip(names, calls, strict=True)).items())

    def make(name: str, call: Callable[[], Any]) -> None:
        answer = answers[name]
        if answer.running() or answer.done():
            return
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(call())
        except Exception as error:  # The SDK raises a bare Exception for every error of the provider.
            answer.set_exception(error)

    while todo:
        batch, todo = todo[:AT_ONCE], todo[AT_ONCE:]
        for each in batch[1:]:
            asyncio.get_running_loop().call_soon(make, *each)
        for each in batch:
            make(*each)
    return [answers[name] for name in names]


def in_threads(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Start calls of boto3 clients, which threads can share, at the same time; the Futures wait for the answers.

    The caller makes the clients: their profile is in pulumi_aws, which imports its modules when they are first used.
    """
    pool = ThreadPoolExecutor(AT_ONCE)
    answers = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return answers
