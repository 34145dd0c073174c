"""Faults of a script with a Checkpointer on two nodes with an S3: its weights match an undisturbed run."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from tests.aws import BUCKET
from tests.disturbed_run import END_SECONDS
from tests.local_cluster import LocalCluster, command_line, kill, kill_tree
from tests.waiting import until

# A classifier of a table by DDP, 4 epochs of 12 steps; the global batch is the same on any number of ranks. Its second
# half waits until a file is gone, or its node is being reclaimed.
SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from ray_on_ecs import Checkpointer, DistributedSampler, seconds_left

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(1024, 20)
data = TensorDataset(x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).long())
training, validation = TensorDataset(*data[:768]), data[768:]
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
sampler = DistributedSampler(training, seed=0)
loader = DataLoader(training, batch_sampler=sampler.batches(64))
state = {"schedule": schedule, "sampler": sampler}
checkpoint = Checkpointer(model=model, optimizer=optimizer, state=state, keep_best="val_loss", every_steps=6)
checkpoint.resume()
print(f"rank {rank} begins at step {checkpoint.step}, {dist.get_world_size()} workers")
while checkpoint.epoch < 4 and not checkpoint.should_stop:
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        while checkpoint.step >= 24 and os.path.exists(os.environ.get("HOLD", "")) and seconds_left() == float("inf"):
            time.sleep(0.1)
        if checkpoint.after_step(samples=64, loss=loss):
            break
    else:
        with torch.no_grad():
            checkpoint.end_epoch(val_loss=cross_entropy(model(validation[0]), validation[1]))
checkpoint.close(export="model.safetensors")
print(f"rank {rank} {'stops' if checkpoint.should_stop else 'ends'} at step {checkpoint.step}")
dist.destroy_process_group()
"""
NAME = "tabular.py"


@pytest.fixture(scope="module")
def cluster(aws_variables: dict[str, str]) -> Iterator[LocalCluster]:
    drain = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60"}
    with LocalCluster(2, {**aws_variables, **drain, "PYTHONUNBUFFERED": "1"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of the same script under torchrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / NAME).write_text(SCRIPT)
    # On a very busy machine a rank may abort in PyTorch at the end of its process, after its work.
    again = ("--standalone", "--max-restarts=1", "--nproc-per-node=2")
    subprocess.run(
        (sys.executable, "-m", "torch.distributed.run", *again, NAME), cwd=folder, env=cluster.environment, check=True
    )
    return load((folder / "model.safetensors").read_bytes())


class TabularRun:
    """A run of the script, with its output; the same command again appends to it."""

    def __init__(self, cluster: LocalCluster, folder: Path, client: Any, workers: str) -> None:
        self._cluster, self._client, self._prefix = cluster, client, f"tabular/{folder.name}/"
        self._log, self._hold, code = folder / "log", folder / "hold", folder / "code"
        self._hold.touch()
        code.mkdir()
        (code / NAME).write_text(SCRIPT)
        storage = ("--storage-path", f"s3://{BUCKET}/tabular", "--run-name", folder.name, "--max-restarts", "1")
        self._flags = (
            *storage,
            "--num-workers",
            workers,
            "--working-dir",
            str(code),
            "--env",
            f"HOLD={self._hold}",
            NAME,
        )
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.command = self._cluster.start_training(*self._flags, log=log)

    def go_on(self) -> None:
        """Let the script train to its end."""
        self._hold.unlink()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def said(self, verb: str) -> set[tuple[int, int]]:
        """The ranks that begin or stop, with their steps. (Nodes that share a machine repeat some lines.)"""
        return {(int(rank), int(step)) for rank, step in re.findall(rf"rank (\d) {verb} at step (\d+)", self.log)}

    @property
    def checkpoints(self) -> list[str]:
        """The keys of the complete checkpoints, the oldest first."""
        listed = self._client.list_objects_v2(Bucket=BUCKET, Prefix=f"{self._prefix}checkpoints/").get("Contents", [])
        return sorted(each["Key"].rpartition("/")[0] for each in listed if each["Key"].endswith("/checkpoint.json"))

    def read(self, name: str) -> bytes:
        return self._client.get_object(Bucket=BUCKET, Key=self._prefix + name)["Body"].read()

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition; the command must not end before."""
        until(lambda: condition() or self.command.poll() is not None, END_SECONDS, lambda: self.log)
        assert self.command.poll() is None, self.log

    def finish(self, expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
        """Wait for the command's end, replace ended nodes meanwhile, and compare metrics and weights."""

        def has_ended() -> bool:
            self._cluster.replace_ended()
            return self.command.poll() is not None

        until(has_ended, END_SECONDS, lambda: self.log)
        assert self.command.returncode == 0, self.log
        records = [json.loads(line) for line in self.read("metrics.jsonl").splitlines()]
        steps = [record["step"] for record in records]
        assert steps == sorted(set(steps))
        assert [record["step"] for record in records if "val_loss" in record] == [12, 24, 36, 48]
        torch.testing.assert_close(load(self.read("model.safetensors")), expected, rtol=0.0, atol=tolerance)


@pytest.fixture
def run(cluster: LocalCluster, tmp_path: Path, s3_client: Any, request: pytest.FixtureRequest) -> Iterator[TabularRun]:
    cluster.replace_ended()
    run = TabularRun(cluster, tmp_path, s3_client, getattr(request, "param", "2"))
    try:
        run.wait_for(lambda: any("step-000000024" in checkpoint for checkpoint in run.checkpoints))
        yield run
    finally:
        kill_tree(run.command.pid)
        run.command.wait()


def test_reclaimed_node_costs_no_step(run: TabularRun, cluster: LocalCluster, undisturbed: dict[str, Tensor]) -> None:
    cluster.workers[0].send_signal(signal.SIGTERM)
    run.wait_for(lambda: run.said("stops"))
    run.go_on()
    run.finish(undisturbed)
    stopped = run.said("stops")  # SIGTERM would have ended a rank before it said so
    steps = {step for _, step in stopped}
    assert stopped == {(rank, step) for rank in (0, 1) for step in steps}
    assert steps
    assert run.said("begins") == {(0, 0), (1, 0)} | stopped
    assert "nodes are being reclaimed; restarting from checkpoints/step-" in run.log


def test_killed_rank_resumes_with_the_same_weights(
    run: TabularRun, cluster: LocalCluster, undisturbed: dict[str, Tensor]
) -> None:
    for process in cluster.worker_processes(cluster.workers[1], NAME):
        if "supervisor.py" not in command_line(process):
            kill(process.pid)
    run.go_on()
    run.finish(undisturbed)
    resumed = {step for _, step in run.said("begins")} - {0}
    assert len(resumed) == 1
    assert run.said("begins") == {(rank, step) for rank in (0, 1) for step in {0, *resumed}}


@pytest.mark.parametrize("run", ["1:2"], indirect=True)
def test_elastic_run_continues_with_close_weights(
    run: TabularRun, cluster: LocalCluster, undisturbed: dict[str, Tensor]
) -> None:
    kill_tree(cluster.workers[0].pid)
    run.wait_for(lambda: re.search(r"rank 0 begins at step [1-9]\d*, 1 workers", run.log))
    run.go_on()
    run.finish(undisturbed, 1e-5)


def test_elastic_run_grows_when_a_node_joins(
    cluster: LocalCluster, tmp_path: Path, s3_client: Any, undisturbed: dict[str, Tensor]
) -> None:
    cluster.replace_ended()
    kill_tree(cluster.workers[0].pid)
    run = TabularRun(cluster, tmp_path, s3_client, "1:2")
    try:
        run.wait_for(lambda: any("step-000000024" in checkpoint for checkpoint in run.checkpoints))
        assert "rank 0 begins at step 0, 1 workers" in run.log
        cluster.replace_ended()
        run.wait_for(lambda: re.search(r"rank 1 begins at step [1-9]\d*, 2 workers", run.log))
        run.go_on()
        run.finish(undisturbed, 1e-5)
    finally:
        kill_tree(run.command.pid)
        run.command.wait()
    assert "there is room for more workers; restarting with them" in run.log
    assert "training failed" not in run.log
    [(_, stopped)] = run.said("stops")
    assert run.said("begins") == {(0, 0), (0, stopped), (1, stopped)}, "no step is lost"


def test_torn_checkpoint_is_skipped(run: TabularRun, s3_client: Any, undisturbed: dict[str, Tensor]) -> None:
    run.command.send_signal(signal.SIGINT)
    assert run.command.wait(END_SECONDS) == 130, run.log
    older, torn = run.checkpoints[-2:]
    part = {"Bucket": BUCKET, "Key": f"{torn}/__1_0.distcp"}
    s3_client.put_object(**part, Body=s3_client.get_object(**part)["Body"].read()[:-100])
    run.go_on()
    run.start()
    run.finish(undisturbed)
    assert f"{torn} is damaged (__1_0.distcp has " in run.log
    step = int(older.rpartition("/")[2].split("-")[1])
    assert run.said("begins") == {(0, 0), (1, 0), (0, step), (1, step)}
