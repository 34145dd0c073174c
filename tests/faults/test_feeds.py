"""Ray Data on CPU helpers, as the training uses it: where parts are prepared, and in which order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.head import SECONDS
from tests.local_cluster import LocalCluster, kill_tree
from tests.waiting import until

# Prepares parts on a cluster as a worker does, and prints each with the node on which that was done. A part waits there
# as long as it has a file in a folder; where it has begun is in another file.
FEED = """
import json, sys, time
from pathlib import Path
import numpy as np
import ray
from ray.util import placement_group_table
from training.engine.feed import thread_feed
from ray_on_ecs.errors import UsageError
from training import preprocessing as helpers

parts, settings = json.loads(sys.argv[1]), json.loads(sys.argv[2])
folder = Path(settings["folder"])
helpers.PIPELINE_PARTS = settings["pipeline_parts"]
helpers.LOOK_SECONDS = 0.2

def say(**what):
    print(json.dumps(what), flush=True)

def prepare(part):
    node = ray.get_runtime_context().get_node_id()
    if part == "broken" or part == settings["only_here"] and node != settings["here"]:
        raise UsageError(f"--data-dir: {part} is broken")
    (folder / f"{part}.begun").write_text(node)
    while (folder / f"{part}.hold").exists():
        time.sleep(0.02)
    return np.array([[int(part), *node.encode()]] * 3)

ray.init(logging_level="ERROR")
settings["here"] = ray.get_runtime_context().get_node_id()
say(here=settings["here"])
feed = helpers.helper_feed(thread_feed(1), None, 1, may_start=True)
asked = lambda: sum(each["state"] == "PENDING" for each in placement_group_table().values())
try:
    for prepared in feed(parts, prepare):
        assert prepared.shape[0] == 3 and prepared.flags.writeable
        say(part=int(prepared[0, 0]), node=bytes(prepared[0, 1:].tolist()).decode(), asked=asked())
except UsageError as error:
    say(error=str(error), cause=repr(error.__cause__))
say(ended=True, asked=asked())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A head without CPUs, and a node of a worker."""
    with LocalCluster(1) as cluster:
        yield cluster


@pytest.fixture
def add_helper(cluster: LocalCluster) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a helper, for this test alone."""
    started: list[subprocess.Popen[bytes]] = []

    def add() -> subprocess.Popen[bytes]:
        started.append(cluster.add_helper(2))
        return started[-1]

    yield add
    for each in started:
        kill_tree(each.pid)


class Feeding:
    """A driver that prepares parts; a context, at whose end it is gone.

    Attributes:
        here: The node of the driver.
    """

    def __init__(self, cluster: LocalCluster, folder: Path, parts: list[Any], **settings: Any) -> None:
        self._folder = folder
        given = {"folder": str(folder), "pipeline_parts": 100, "only_here": None, **settings}
        self._driver = subprocess.Popen(
            [sys.executable, "-c", FEED, json.dumps(parts), json.dumps(given)],
            env=cluster.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines = self._driver.stdout or iter(())
        self.here = ""

    def __enter__(self) -> Feeding:
        self.here = self.line()["here"]
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self._driver.pid)
        self._driver.communicate()

    def line(self) -> dict[str, Any]:
        """The next line of JSON that it prints."""
        for line in self._lines:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"it ended with {self._driver.wait(SECONDS)}")

    def rest(self) -> list[dict[str, Any]]:
        """The lines up to the end; none but the last is without a part."""
        lines = [self.line()]
        while "ended" not in lines[-1]:
            lines.append(self.line())
        return lines

    def node_of(self, part: int) -> str:
        """Wait until a part has begun, and return on which node."""
        begun = self._folder / f"{part}.begun"
        until(lambda: begun.exists() and begun.read_text(), SECONDS)
        return begun.read_text()


Hold = Callable[[int], Path]


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """Makes a part wait until the file that it returns is gone."""

    def make(part: int) -> Path:
        path = tmp_path / f"{part}.hold"
        path.touch()
        return path

    return make


def test_without_helpers_the_worker_prepares_and_a_helper_that_it_asks_for_takes_over(
    cluster: LocalCluster, add_helper: Callable[[], subprocess.Popen[bytes]], tmp_path: Path, hold: Hold
) -> None:
    held = hold(15)
    with Feeding(cluster, tmp_path, list(range(45)), pipeline_parts=20) as driver:
        driver.node_of(15)
        add_helper()
        held.unlink()
        *lines, end = driver.rest()
    assert [each["part"] for each in lines] == list(range(45)), "in their order"
    own, others = {each["node"] for each in lines[:20]}, {each["node"] for each in lines[20:]}
    assert own == {driver.here}
    assert len(others) == 1
    assert others != own, "the first 20 were asked for when there was no helper"
    assert lines[0]["asked"] == 1, "the stack counts the requests that wait"
    assert end["asked"] == 0


def test_helpers_that_die_take_no_part_with_them(
    cluster: LocalCluster, add_helper: Callable[[], subprocess.Popen[bytes]], tmp_path: Path, hold: Hold
) -> None:
    helpers = [add_helper() for _ in range(2)]
    in_first, in_second = hold(30), hold(45)
    with Feeding(cluster, tmp_path, list(range(60))) as driver:
        first = driver.node_of(30)
        [dies] = [each for each in helpers if is_node(cluster, each, first)]
        kill_tree(dies.pid)
        in_first.unlink()
        lines = [driver.line() for _ in range(31)]
        second = lines[30]["node"]
        [left] = [each for each in helpers if each is not dies]
        kill_tree(left.pid)
        in_second.unlink()
        lines += driver.rest()[:-1]
    assert [each["part"] for each in lines] == list(range(60)), "no part is lost or comes twice"
    assert second not in (first, driver.here), "the other one has done it"
    assert {each["node"] for each in lines[45:]} == {driver.here}, "without the last one the worker goes on"
    assert lines[-1]["asked"] == 1, "another helper would take over"


def is_node(cluster: LocalCluster, process: subprocess.Popen[bytes], node: str) -> bool:
    return any(node in " ".join(each.cmdline()) for each in cluster.worker_processes(process, "raylet/raylet"))


def test_what_a_helper_can_not_prepare_the_worker_prepares_or_names(
    cluster: LocalCluster, add_helper: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    add_helper()
    with Feeding(cluster, tmp_path, [0, 1, 2, "3", 4, "broken", 6], only_here="3") as driver:
        *lines, error, _ = driver.rest()
    assert [each["part"] for each in lines] == [0, 1, 2, 3, 4]
    assert [each["node"] == driver.here for each in lines] == [False] * 3 + [True] * 2
    assert error == {"error": "--data-dir: broken is broken", "cause": "None"}, "the user's mistake, without a trace"
