"""Runs on two nodes with two workers each: process groups, and programs that start the processes of their node."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.head import SECONDS
from tests.local_cluster import LocalCluster

pytestmark = pytest.mark.ray
# Makes groups one after the other; the ranks of the second node use the store once the others have ended.
GROUPS = """
import os, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
for number in range(3):
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    print("group", number, "sum", value.item(), flush=True)
    dist.destroy_process_group()
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if os.environ["GROUP_RANK"] == "0":
    store.set("pid" + os.environ["RANK"], str(os.getpid()))
else:
    pids = [int(store.get("pid" + rank)) for rank in "01"]
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    print("the store has", store.add("late", 1))
"""
# One process of a nested torchrun.
RANK = """
import os
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
# In one piece: both processes of a node write to one pipe.
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()} sum {value.item()}\\n".encode())
open(f"rank{dist.get_rank()}", "w").write("done")
dist.destroy_process_group()
"""
TORCHRUN = (
    "exec torchrun --nnodes $NNODES --node-rank $NODE_RANK --nproc-per-node $NPROC_PER_NODE "
    "--master-addr $MASTER_ADDR --master-port $MASTER_PORT rank.py"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(0) as cluster:
        for _ in range(2):
            cluster.add_worker(cpus=2)
        yield cluster


def train(cluster: LocalCluster, folder: Path, *words: str) -> str:
    """Train with four workers; return the log."""
    code, log = folder / "code", folder / "log"
    code.mkdir()
    (code / "groups.py").write_text(GROUPS)
    (code / "rank.py").write_text(RANK)
    flags = ("--storage-path", str(folder), "--run-name", "mine", "--num-workers", "4", "--working-dir", str(code))
    with log.open("wb") as file:
        status = cluster.start_training(*flags, "--max-restarts", "0", *words, log=file).wait(SECONDS)
    assert status == 0, log.read_text()
    return log.read_text()


def test_store_is_served_until_all_nodes_have_ended(cluster: LocalCluster, tmp_path: Path) -> None:
    output = train(cluster, tmp_path, "groups.py")
    for number in range(3):  # each node's Ray forwards the lines of all nodes of the machine
        assert set(re.findall(rf"\[rank (\d)\] group {number} sum 4.0", output)) == set("0123")
    assert set(re.findall("the store has (.)", output)) == {"1", "2"}


def test_network_between_nodes_is_measured(cluster: LocalCluster, tmp_path: Path) -> None:
    output = train(cluster, tmp_path, "--network-check", "on", "groups.py")
    assert re.search(r"network: Gloo uses sockets \(\S+\); all-reduce of 256 MiB on 2 nodes: [\d.]+ Gbit/s", output)
    receipt = json.loads((tmp_path / "mine" / "run.json").read_text())["network"]
    assert (receipt["nodes"], receipt["ranks"], receipt["failure"]) == (2, 2, None)


def test_torchrun_starts_the_processes_of_its_node(cluster: LocalCluster, tmp_path: Path) -> None:
    output = train(cluster, tmp_path, "--per-node", "--no-python", "bash", "-c", TORCHRUN)
    of_node = {int(rank): int(node) for node, rank in re.findall(r"\[node (\d)\] rank (\d) of 4 sum 4.0", output)}
    assert of_node == {0: 0, 1: 0, 2: 1, 3: 1}
    files = {file.name for file in (tmp_path / "mine" / "files").rglob("rank?")}
    assert files == {"rank0", "rank1", "rank2", "rank3"}
