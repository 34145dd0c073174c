"""Random orders of writes, looks, uploads, polls and ends: a restored file never names another that is not there.

Each script saves checkpoints, and names the newest in a different way. A step of it may happen between any two calls
of a look: within a scan, between copies, before each call of the storage. The clock is the test's, and so is each time
of a file, so that an order is repeated by its seed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs.run.files import folder as run_folder
from ray_on_ecs.run.files import frozen, scan
from ray_on_ecs.storage import snapshot
from ray_on_ecs.storage.run_storage import RunStorage
from tests.run_folders import Clock, FaultyStorage, Nodes

SEEDS = int(os.environ.get("ORDERS", "250"))
EVENTS = 32
KEPT = 2
Steps = Iterator[None]


class Killed(BaseException):
    """The machines are gone."""


def whole(step: int) -> str:
    return f"<{step}>" * 4


class Order:
    """A script on each node, their runner and their driver, in one random order of steps."""

    def __init__(self, seed: str, script: Callable[[Order, int], Steps], count: int, tmp: Path, clock: Clock) -> None:
        self.chance = random.Random(seed)
        self.clock = clock
        self.count = count
        self.open: list[dict[str, bool]] = [{} for _ in range(count)]
        self.writing, self.saved, self.named = 0, [0] * count, 0
        self.is_running, self.pace = False, 1.0
        self.steps_left = self.chance.randrange(EVENTS // 4, EVENTS * 4)
        self._tmp, self._number = tmp, 0
        self.storage = RunStorage.open(str(tmp / "storage"), "mine")
        self.end = ""
        self.scripts = [script(self, node) for node in range(count)]

    def start(self) -> Nodes:
        """Start on empty disks."""
        self._number += 1
        storage = FaultyStorage.of(self.storage, self.between)
        nodes = Nodes(storage, self._tmp / f"disks{self._number}", self.clock, self.count)
        nodes.writers = (psutil.Process(),)
        return nodes

    def folder(self, node: int) -> Path:
        return self.nodes.nodes[node].folder

    def between(self, *_: object) -> None:
        """Let the scripts do some steps, or the machines fail, in the middle of a look."""
        if not self.is_running or self.chance.random() > self.pace:
            return
        for _step in range(self.chance.choice((0, 0, 0, 1, 2, 5))):
            self.step()
        if self.steps_left < 0 and self.end == "lost":
            raise Killed

    def step(self) -> None:
        self.steps_left -= 1
        if self.is_running and self.steps_left >= 0:
            next(self.chance.choice(self.scripts))

    def stamp(self, path: Path) -> None:
        self._number += 1
        time = int(self.clock.now * 1e9) + self._number
        os.utime(path, ns=(time, time))

    def put(self, node: int, name: str, text: str, mode: str = "w") -> Steps:
        """Write a file in two parts."""
        path = self.folder(node) / name
        path.parent.mkdir(exist_ok=True)
        self.open[node][name] = mode == "a"
        self.writing += 1
        with path.open(mode) as file:
            self.stamp(path)
            for part in (text[: len(text) // 2], text[len(text) // 2 :]):
                yield
                file.write(part)
                file.flush()
                self.stamp(path)
            yield
        del self.open[node][name]
        self.writing -= 1

    def save(self, node: int, step: int) -> Steps:
        """Save a node's part of a checkpoint, once the one before is named; wait for the others' parts."""
        while self.named < step - 1:
            yield
        yield from self.put(node, f"ckpt-{step}/{node}", whole(step))
        self.saved[node] = step
        while min(self.saved) < step:
            yield

    def rotate(self, node: int, step: int, kept: int = KEPT) -> Steps:
        """Delete a node's part of the oldest checkpoint, once a newer one is named."""
        (self.folder(node) / f"ckpt-{step - kept}" / str(node)).unlink(missing_ok=True)
        yield

    def run(self, nodes_end: str) -> None:
        """Let things happen until the scripts end in a way: with their machines, by a kill, or by themselves."""
        self.nodes = self.start()
        self.end, self.is_running = nodes_end, True
        try:
            while self.steps_left >= 0:
                node = self.chance.randrange(self.count)
                event = self.chance.choice(("step", "step", "step", "wait", "tell", "look", "poll", "pause"))
                if event == "step":
                    for _ in range(self.chance.choice((1, 1, 3, 12))):
                        self.step()
                elif event == "wait":
                    self.clock.now += self.chance.choice((0.1, 0.5, 2.5, 12.0))
                elif event == "tell":
                    self.nodes.tell(node)
                elif event == "look":
                    self.nodes.look(node)
                else:  # several rounds, in which the nodes may find a common moment
                    self.pace = 0.03 if event == "pause" else 1.0
                    for _ in range(3 if event == "pause" else 1):
                        self.nodes.poll(2.0 if event == "pause" else 0.5)
                    self.pace = 1.0
        except Killed:
            return
        finally:
            self.is_running = False
        if nodes_end != "lost":
            self.finish()

    def finish(self) -> None:
        killed: dict[int, float | None] = {}
        if self.end == "exit":
            while self.writing or min(self.saved) > self.named:
                next(self.chance.choice(self.scripts))
        elif self.end == "killed":
            killed = dict.fromkeys(range(self.count), 0.0)
        else:  # the worker sends SIGTERM when no file is open, and the script may go on for a moment
            for node, script in enumerate(self.scripts):
                while not all(self.open[node].values()):
                    next(script)
                self.clock.now += 0.02
                killed[node] = self.clock.now
                for _ in range(self.chance.choice((0, 0, 0, 1, 2))):
                    next(script)
        self.nodes.end(killed)

    def check(self, named: Callable[[Path], set[int]]) -> int:
        """Return the step that a restart finds; all it finds is whole, and what is named is there."""
        self.nodes = self.start()
        names: set[int] = set()
        for node in self.nodes.nodes:
            for path in node.folder.glob("ckpt-*/*"):
                assert path.read_text() == whole(int(path.parent.name[5:]))
            names = named(node.folder)
            for step in names:
                assert {path.name for path in (node.folder / f"ckpt-{step}").glob("*")} == set(
                    map(str, range(self.count))
                )
        return max(names, default=0)


def script(name: Callable[[Order, int], Steps], *, rotates_first: bool = False) -> Callable[[Order, int], Steps]:
    """Return a script that saves checkpoints, of which node 0 names the newest, and that is never quite idle."""

    def run(order: Order, node: int) -> Steps:
        step = 0
        while True:
            step += 1
            yield from order.save(node, step)
            if rotates_first:
                yield from order.rotate(node, step)
            if node == 0:
                yield from name(order, step)
                order.named = step
            while order.named < step:
                yield
            if not rotates_first:
                yield from order.rotate(node, step)
            for number in range(order.chance.choice((0, 1, 30))):
                if order.chance.random() < 0.3:
                    yield from order.put(node, f"status{node}.json", str(number))
                yield

    return run


def in_place(order: Order, step: int) -> Steps:
    yield from order.put(0, "latest_checkpointed_iteration.txt", f"{step:04d}")


def in_csv(order: Order, step: int) -> Steps:
    yield from order.put(0, "latest.csv", f"step\n{step:04d}")


def renamed(order: Order, step: int) -> Steps:
    yield from order.put(0, "tmp", f"{step:04d}")
    (order.folder(0) / "tmp").rename(order.folder(0) / "latest")


def appended(order: Order, step: int) -> Steps:
    yield from order.put(0, "steps.txt", f"{step}\n", "a")


def held_open(order: Order, step: int) -> Steps:
    """Append to a log that stays open."""
    yield from order.put(0, "steps.txt", f"{step}\n", "a")
    order.open[0]["steps.txt"] = True


def linked(order: Order, step: int) -> Steps:
    link = order.folder(0) / "last.ckpt"
    (order.folder(0) / "new").symlink_to(f"ckpt-{step}")
    yield
    (order.folder(0) / "new").rename(link)
    yield


def listed(order: Order, step: int) -> Steps:
    """Name all checkpoints before the oldest is deleted."""
    steps = list(range(max(1, step - KEPT + 1), step + 1))
    yield from order.put(0, "trainer_state.tmp", json.dumps(steps))
    (order.folder(0) / "trainer_state.tmp").rename(order.folder(0) / "trainer_state.json")


def number_in(name: str) -> Callable[[Path], set[int]]:
    def read(folder: Path) -> set[int]:
        return {int((folder / name).read_text().split()[-1])} if (folder / name).exists() else set()

    return read


def last_line(folder: Path) -> set[int]:
    text = (folder / "steps.txt").read_text() if (folder / "steps.txt").exists() else ""
    lines = text[: text.rfind("\n") + 1].split()
    return {int(lines[-1])} if lines else set()


def target(folder: Path) -> set[int]:
    link = folder / "last.ckpt"
    return {int(os.readlink(link)[5:])} if link.is_symlink() else set()


def all_in_list(folder: Path) -> set[int]:
    path = folder / "trainer_state.json"
    return set(json.loads(path.read_text())) if path.exists() else set()


KINDS: dict[str, tuple[Any, Callable[[Path], set[int]]]] = {
    "in place": (script(in_place), number_in("latest_checkpointed_iteration.txt")),
    "csv": (script(in_csv), number_in("latest.csv")),
    "renamed": (script(renamed), number_in("latest")),
    "appended": (script(appended), last_line),
    "held open": (script(held_open), last_line),
    "link": (script(linked), target),
    "rotated first": (script(in_place, rotates_first=True), number_in("latest_checkpointed_iteration.txt")),
    "list": (script(listed), all_in_list),
}
ENDS = ("lost", "killed", "at rest", "exit")


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "UPLOADS_AT_ONCE", 1)
    monkeypatch.setattr(snapshot, "COPIES_AT_ONCE", 1)
    monkeypatch.setattr(scan, "SLOW_SECONDS", 1e9)  # a checkpoint is not open for so long without being written,
    monkeypatch.setattr(scan, "GROWING", ())  # and a tracker not for two seconds
    monkeypatch.setattr(run_folder, "is_running", lambda process: True)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_restored_files_name_only_what_is_there(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    order: Order
    body, named = KINDS[kind]
    scanned, copied = scan.state_of, frozen._copy

    def hooked(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if order.chance.random() < 0.3:
                order.between()
            return original(*args, **options)

        return call

    def open_files(folder: Path, *_: object) -> dict[str, bool]:
        return dict(order.open[[node.folder for node in order.nodes.nodes].index(folder)])

    def sleep(seconds: float) -> None:
        clock.now += seconds
        order.between()

    monkeypatch.setattr(scan, "state_of", hooked(scanned))
    monkeypatch.setattr(frozen, "_copy", hooked(copied))
    monkeypatch.setattr(run_folder, "open_for_writing", open_files)
    clock.sleep = sleep
    found: dict[str, list[tuple[int, int]]] = {end: [] for end in ENDS}
    for number in range(SEEDS // (2 * len(KINDS)) + 1):
        seed, end = f"{kind}-{count}-{number}", ENDS[number % len(ENDS)]
        order = Order(seed, body, count, tmp_path / str(number), clock)
        try:
            order.run(end)
            found[end].append((order.check(named), order.named))
        except Exception as cause:
            raise AssertionError(f"seed {seed}, {end}: {cause!r}") from cause
    assert all(step == newest for step, newest in found["exit"])
    assert any(0 < step == newest for step, newest in found["at rest"]), "a kill at rest loses nothing"
