"""Faults of a user's script on two nodes with an S3: it has its files wherever it restarts."""

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aws import BUCKET
from tests.disturbed_run import END_SECONDS
from tests.local_cluster import LocalCluster, kill_tree
from tests.waiting import until

# Counts steps on two ranks; rank 0 saves every twentieth. It needs only a second of Python.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import ray_on_ecs

file = Path(os.environ["RUN_DIR"], "state.json")
names = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
rank, size = (int(os.environ[name]) for name in names)
step = json.loads(file.read_text())["step"] if file.exists() else 0
print(f"rank {rank} begins at step {step}, {size} workers")
data = os.environ.get("INPUT_DATA")

def save():
    if rank == 0:
        file.with_suffix(".tmp").write_text(json.dumps({"step": step}))
        file.with_suffix(".tmp").rename(file)

stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
while step < 60:
    time.sleep(0.4)
    if data:
        Path(data, "part").read_bytes()
    step += 1
    ray_on_ecs.progress(step)
    ray_on_ecs.log(value=step)
    if step % 20 == 0 or stopping:
        save()
    if stopping:
        print(f"rank {rank} stops at step {step}, {ray_on_ecs.seconds_left():.0f} s are left")
        sys.exit(0)
"""
DRAIN_SECONDS = 60


@pytest.fixture(scope="module")
def cluster(aws_variables: dict[str, str]) -> Iterator[LocalCluster]:
    variables = {
        **aws_variables,
        "PYTHONUNBUFFERED": "1",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS),
    }
    with LocalCluster(2, variables) as cluster:
        yield cluster


class ScriptRun:
    """A run of the script, with its output."""

    def __init__(self, cluster: LocalCluster, folder: Path, client: Any, name: str, workers: str, *flags: str) -> None:
        self._cluster, self._client, self._name = cluster, client, name
        self._log = folder / "log"
        (folder / "code").mkdir()
        (folder / "code" / "count.py").write_text(SCRIPT)
        storage = ("--storage-path", f"s3://{BUCKET}/scripts", "--run-name", name)
        own = (*flags, *storage, "--num-workers", workers, "--max-restarts", "1", "--working-dir", str(folder / "code"))
        with self._log.open("wb") as log:
            self.command: subprocess.Popen[bytes] = cluster.start_training(*own, "count.py", log=log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def begun(self) -> set[tuple[int, int]]:
        """The ranks that began, with their steps. (Nodes that share a machine repeat some lines.)"""
        return {(int(rank), int(step)) for rank, step in re.findall(r"rank (\d) begins at step (\d+)", self.log)}

    def read(self, name: str) -> str | None:
        """Return a file of the run's folder in S3, or None."""
        try:
            answer = self._client.get_object(Bucket=BUCKET, Key=f"scripts/{self._name}/{name}")
        except self._client.exceptions.NoSuchKey:
            return None
        return answer["Body"].read().decode()

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition; the command must not end before."""
        until(lambda: condition() or self.command.poll() is not None, END_SECONDS, lambda: self.log)
        assert self.command.poll() is None, self.log

    def finish(self) -> int:
        """Wait for the command's end, replace ended nodes meanwhile, and return its exit status."""

        def has_ended() -> bool:
            self._cluster.replace_ended()
            return self.command.poll() is not None

        until(has_ended, END_SECONDS, lambda: self.log)
        return self.command.returncode


Start = Callable[..., ScriptRun]


@pytest.fixture
def start(cluster: LocalCluster, tmp_path: Path, s3_client: Any) -> Iterator[Start]:
    runs: list[ScriptRun] = []

    def start(name: str, *flags: str, workers: str = "2") -> ScriptRun:
        cluster.replace_ended()
        runs.append(ScriptRun(cluster, tmp_path, s3_client, name, workers, *flags))
        return runs[-1]

    yield start
    for run in runs:
        kill_tree(run.command.pid)
        run.command.wait()


def assert_complete(run: ScriptRun) -> None:
    """Check that each step is in the metrics once."""
    records = [json.loads(line) for line in (run.read("metrics.jsonl") or "").splitlines()]
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert steps[-1] == 60
    assert json.loads(run.read("files/state.json") or "") == {"step": 60}


@pytest.mark.parametrize("launcher", ["", "--mpi"], ids=["by itself", "mpi"])
def test_script_saves_and_resumes_after_its_node_drains(start: Start, cluster: LocalCluster, launcher: str) -> None:
    run = start(f"notice{launcher}", *launcher.split())
    run.wait_for(lambda: run.read("files.json"))
    cluster.workers[0].send_signal(signal.SIGTERM)
    assert run.finish() == 0, run.log
    stopped = {int(step) for step in re.findall(r"rank 0 stops at step (\d+)", run.log)}
    assert run.begun == {(rank, step) for rank in (0, 1) for step in {0, *stopped}}, "no step was lost"
    left = re.findall(r"stops at step \d+, (\S+) s are left", run.log)
    assert left, run.log
    assert all(0 < float(seconds) < DRAIN_SECONDS for seconds in left)
    assert "nodes are being reclaimed; restarting; whether it continues is up to the script" in run.log
    assert "(newest kept file: state.json of " in run.log
    assert_complete(run)


def test_script_of_a_dead_node_resumes_from_storage(start: Start, cluster: LocalCluster, tmp_path: Path) -> None:
    mount = tmp_path / "mnt"
    mount.mkdir()
    (mount / "part").touch()
    run = start("killed", "--input", f"DATA={mount}")
    run.wait_for(lambda: run.read("files.json"))
    kill_tree(cluster.workers[0].pid)
    assert run.finish() == 0, run.log
    resumed = {step for _, step in run.begun} - {0}
    assert resumed
    # If the node of rank 1 died, rank 0 has saved when it was told to stop.
    saved_at_the_end = {int(step) for step in re.findall(r"rank 0 stops at step (\d+)", run.log)}
    assert all(step % 20 == 0 or step in saved_at_the_end for step in resumed)
    assert run.begun == {(rank, step) for rank in (0, 1) for step in {0, *resumed}}
    assert "(newest kept file: state.json of " in run.log
    assert_complete(run)


def test_elastic_script_continues_with_the_remaining_workers(start: Start, cluster: LocalCluster) -> None:
    run = start("elastic", workers="1:2")
    run.wait_for(lambda: run.read("files.json"))
    kill_tree(cluster.workers[0].pid)
    run.wait_for(lambda: ", 1 workers" in run.log)
    assert run.finish() == 0, run.log
    sizes = re.findall(r"rank 0 begins at step \d+, (\d) workers", run.log)
    assert sizes[0] == "2"
    assert "1" in sizes
    assert_complete(run)
