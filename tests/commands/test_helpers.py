"""Ray Data on CPU helpers, as the training uses it: where parts are prepared, and in which order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.commands.head import SECONDS
from tests.local_cluster import LocalCluster, kill_tree

# Prepares parts on a cluster as a worker does, and prints where; before some parts it waits until it is told to go on.
FEED = """
import json, os, sys
import numpy as np
import ray
from training.engine.feed import thread_feed
from training.errors import UsageError
from training.launchers import helpers

helpers.PIPELINE_PARTS = 20
NODES = {}

def prepare(part):
    if part == "broken":
        raise UsageError("--data-dir: broken")
    node = ray.get_runtime_context().get_node_id()
    return np.array([[part, *node.encode()]] * 3)

def main():
    ray.init(logging_level="ERROR")
    feed = helpers.helper_feed(thread_feed(1), None, 1)
    for parts in json.loads(sys.argv[1]):
        try:
            made = []
            for prepared in feed(parts, prepare):
                assert prepared.shape[0] == 3 and prepared.flags.writeable
                made.append([int(prepared[0, 0]), bytes(prepared[0, 1:].tolist()).decode()])
                if len(made) == 15:
                    print(json.dumps({"prepared": 15}), flush=True)
                    sys.stdin.readline()
            print(json.dumps(made), flush=True)
        except UsageError as error:
            print(json.dumps({"error": str(error), "cause": repr(error.__cause__)}), flush=True)

main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A head without CPUs, and a node of a worker."""
    with LocalCluster(1) as cluster:
        yield cluster


class Feeding:
    """A driver that prepares some series of parts; a context, at whose end it is gone."""

    def __init__(self, cluster: LocalCluster, *series: list[object]) -> None:
        self._driver = subprocess.Popen(
            [sys.executable, "-c", FEED, json.dumps(series)],
            env=cluster.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Feeding:
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self._driver.pid)
        self._driver.communicate()

    def line(self) -> Any:
        """The next line of JSON that it prints."""
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise AssertionError(f"it ended with {self._driver.wait(SECONDS)}")

    def go_on(self) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.write("\n")
        self._driver.stdin.flush()


def test_without_helpers_the_worker_prepares_and_a_helper_takes_over(cluster: LocalCluster) -> None:
    with Feeding(cluster, list(range(45)), ["broken"]) as driver:
        assert driver.line() == {"prepared": 15}
        helper = cluster.add_helper(2)
        driver.go_on()
        made = driver.line()
        assert [number for number, _ in made] == list(range(45)), "in their order"
        own, others = {node for _, node in made[:20]}, {node for _, node in made[20:]}
        assert len(own) == len(others) == 1
        assert own != others, "the first 20 were asked for when there was no helper"
        assert driver.line() == {"error": "--data-dir: broken", "cause": "None"}, "the user's mistake, without a trace"
    kill_tree(helper.pid)


def test_a_helper_that_dies_takes_no_part_with_it(cluster: LocalCluster) -> None:
    first, second = cluster.add_helper(), cluster.add_helper()
    with Feeding(cluster, list(range(60))) as driver:
        assert driver.line() == {"prepared": 15}
        kill_tree(first.pid)
        driver.go_on()
        assert [number for number, _ in driver.line()] == list(range(60)), "no part is lost or comes twice"
    kill_tree(second.pid)
