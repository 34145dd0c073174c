"""Scripts with all kinds of writes, killed at any moment: a restart never finds torn files."""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.run.files import folder as run_folder
from ray_on_ecs.run.files import scan as folder_scan
from ray_on_ecs.run.group import Directive
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot
from tests.aws import BUCKET
from tests.flaky_s3 import flaky_proxy
from tests.run_folders import Nodes
from tests.waiting import until

KILLS = int(os.environ.get("TORTURE_KILLS", "12"))
SCAN_SECONDS, QUIET_SECONDS = 0.08, 0.3
# A request that is repeated takes up to a second, in which the next step begins.
DROPPED, LOST = 0.02, 0.02
# A writer that the machine has stopped this long in the middle of a step looks idle.
STALL_SECONDS = QUIET_SECONDS * 0.7

# Each step is written in place, by a temporary file and a rename, as a folder of shards with rotation and a link to it.
WRITER = r"""
import os, pathlib, random, shutil, sys, threading, time
node, nodes, pause, stall = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[5]), float(sys.argv[6])
seed, shared = sys.argv[3:5]
random.seed(f"{seed}-{node}")
model, optim, link = f"model{node}.pt", f"optim{node}.pt", f"latest{node}"
step = int(open(model, "rb").read(8)) if os.path.exists(model) else 0
beat_file = os.open(f"{shared}/beat{node}", os.O_CREAT | os.O_WRONLY)
last = time.monotonic()

def beat(in_step=True):
    global last
    now = time.monotonic()
    if now - last > stall:
        with open(f"{shared}/stalled", "a") as file: print(step, file=file)
    last = now
    os.pwrite(beat_file, f"{step:08d} {int(in_step)} {now:020.6f}".encode(), 0)

def status():
    number = 0
    while True:
        number += 1
        pathlib.Path(f"status{node}.json").write_text(f'{{"number": {number}}}')
        time.sleep(0.02)

def slow(path, size):
    data = (f"{step:08d}" * (size // 8)).encode()
    with open(path, "wb") as file:
        for start in range(0, size, size // 8):
            file.write(data[start : start + size // 8]); file.flush(); time.sleep(0.003); beat()

threading.Thread(target=status, daemon=True).start()
log = open(f"train{node}.log", "a")
while True:
    step += 1
    pathlib.Path(f"{shared}/at-{seed}-{node}-{step}").touch()
    while not all(os.path.exists(f"{shared}/at-{seed}-{each}-{step}") for each in range(nodes)):
        beat(); time.sleep(0.005)
    print(step, file=log, flush=True)
    slow(model, 160_000)
    slow("tmp", 160_000); os.replace("tmp", optim); beat()
    folder = pathlib.Path(f"checkpoint-{step}"); folder.mkdir(exist_ok=True)
    for k in range(3): slow(folder / f"shard{node}-{k}.bin", 40_000)
    for old in pathlib.Path().glob("checkpoint-*"):
        if int(old.name[11:]) < step - 1: shutil.rmtree(old)
    if os.path.lexists(link): os.unlink(link)
    os.symlink(folder.name, link)
    beat(in_step=False)
    end = time.monotonic() + random.uniform(pause, 1.5 * pause)
    while time.monotonic() < end: time.sleep(0.01); beat(in_step=False)
"""


@pytest.fixture
def storage(s3: Any, aws_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunStorage]:
    """A run in an S3 that drops requests and answers."""
    with flaky_proxy(aws_server, DROPPED, LOST, spared=20) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield RunStorage.open(f"s3://{BUCKET}/torture", tmp_path.name)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "SCAN_SECONDS", SCAN_SECONDS)
    monkeypatch.setattr(run_folder, "QUIET_SECONDS", QUIET_SECONDS)
    monkeypatch.setattr(folder_scan, "RESTLESS_SECONDS", 4 * SCAN_SECONDS)
    monkeypatch.setattr(run_folder, "LOG_SECONDS", 0.5)


def reader(folder: Path) -> Any:
    return lambda name: (folder / name).read_bytes() if (folder / name).exists() else None


def tags_of(read: Any, node: int) -> tuple[int, set[str]]:
    """Return the step of a node's files, and the torn ones."""
    model = read(f"model{node}.pt")
    if model is None:
        return 0, set()
    step = model[:8]
    sizes = {f"model{node}.pt": 160_000, f"optim{node}.pt": 160_000}
    sizes |= {f"checkpoint-{int(step or b'0')}/shard{node}-{k}.bin": 40_000 for k in range(3)}
    torn = {name for name, size in sizes.items() if read(name) != step * (size // 8)}
    return int(step or b"0"), torn


def check_folder(folder: Path, count: int) -> tuple[int, set[str]]:
    """Return the step of a node's folder, and the torn files in it."""
    found = [tags_of(reader(folder), node) for node in range(count)]
    step = found[0][0]
    torn = set().union(*(torn for _, torn in found)) | {f"node {n}" for n, (s, _) in enumerate(found) if s != step}
    if step:
        links = [folder / f"latest{node}" for node in range(count)]
        torn |= {link.name for link in links if not link.is_symlink() or os.readlink(link) != f"checkpoint-{step}"}
        torn |= {"too new" for path in folder.glob("checkpoint-*") if int(path.name[11:]) > step}
    return step, torn


def manifest_step(storage: RunStorage) -> int:
    kept = read_snapshot(storage).files.get("latest0")
    return int(str(kept.link).removeprefix("checkpoint-")) if kept else 0


class Attempt:
    """Writers on nodes with empty disks, and a thread for each node that stores their files."""

    def __init__(self, storage: RunStorage, root: Path, count: int, seed: int, pause: float) -> None:
        self.nodes = Nodes(storage, root / f"disks{seed}", time, count)  # ty: ignore[invalid-argument-type]
        self.found = {check_folder(node.folder, count)[0] for node in self.nodes.nodes}
        self.torn = set().union(*(check_folder(node.folder, count)[1] for node in self.nodes.nodes))
        self._telling = threading.Lock()
        self._stop = threading.Event()
        self._arguments = [str(count), str(seed), str(root), str(pause), str(STALL_SECONDS)]
        self._threads = [threading.Thread(target=self._poll, args=[node]) for node in range(count)]
        self._processes: list[ScriptProcess] = []

    def __enter__(self) -> Attempt:
        for node, each in enumerate(self.nodes.nodes):
            argv = [sys.executable, "-c", WRITER, str(node), *self._arguments]
            self._processes.append(ScriptProcess(argv, ProcessOptions(os.environ, each.folder, print)))
        self.nodes.directive = Directive(pids={node: (each.pid,) for node, each in enumerate(self._processes)})
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        self.killed_at = time.monotonic()
        time.sleep(2 * QUIET_SECONDS)  # the driver, which would say that they were killed, is away
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _poll(self, node: int) -> None:
        while not self._stop.wait(SCAN_SECONDS):
            with self._telling:
                self.nodes.tell(node)
            self.nodes.files[node].store()


def restart(storage: RunStorage, root: Path, count: int, seed: int, pause: float) -> Attempt | None:
    """Return another attempt; None if the storage was away."""
    try:
        return Attempt(storage, root, count, seed, pause)
    except OSError:
        return None


def has_stalled(root: Path, step: int, killed_at: float) -> bool:
    """Return whether the machine has stopped a writer for long about this step."""
    known = (root / "stalled").read_text().split() if (root / "stalled").exists() else []
    beats = [path.read_text().split() for path in root.glob("beat*")]
    stalled = any(in_step == "1" and killed_at - float(at) > STALL_SECONDS for _, in_step, at in beats)
    return stalled or any(abs(int(each) - step) <= 1 for each in known)


@pytest.mark.fault
@pytest.mark.parametrize(("count", "pause"), [(1, 1.2), (2, 1.5)])
def test_killed_script_leaves_no_torn_files(storage: RunStorage, tmp_path: Path, count: int, pause: float) -> None:
    chance = random.Random(7)
    killed_at = 0.0
    last, on_disk, stalls, new = 0, 0, 0, 0
    for kill in range(KILLS + 1):
        attempt = until(lambda kill=kill: restart(storage, tmp_path, count, kill, pause))
        step = manifest_step(storage)
        if attempt.torn and has_stalled(tmp_path, step, killed_at):
            stalls += 1
            for folder in ("files", "versions"):
                storage.delete_folder(folder)
            storage.delete("files.json")
            last = 0
            continue
        assert not attempt.torn, f"attempt {kill}, step {step}"
        assert attempt.found == {step}
        assert step >= last
        new += step > last
        last = step
        if kill == KILLS:
            break
        with attempt:
            time.sleep(chance.uniform(0.8, 2.8 + count))
        killed_at = attempt.killed_at
        on_disk += any(tags_of(reader(each.folder), node)[1] for node, each in enumerate(attempt.nodes.nodes))
        shutil.rmtree(tmp_path / f"disks{kill}")
    print(f"{KILLS} kills: 0 torn after restore, {on_disk} torn on disk, {new} new steps of {last}, {stalls} stalls")
    with until(lambda: restart(storage, tmp_path, count, KILLS + 1, pause)):
        until(lambda: manifest_step(storage) > last)
