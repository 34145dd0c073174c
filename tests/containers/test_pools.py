"""Two pools: a run trains on the nodes of its pool, and waits only behind runs of that pool."""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.containers.cluster import CODE, INSTANCE, L4_INSTANCE, Cluster
from tests.waiting import until

GO = "/tmp/go"
# Trains until the file GO is on its node; prints the node's address.
SCRIPT = f"""
import pathlib, socket, time

print("trains on", socket.gethostbyname(socket.gethostname()), flush=True)
while not pathlib.Path("{GO}").exists():
    time.sleep(0.1)
"""


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[dict[str, str]]:
    """A node with a GPU of each pool; their containers by pool."""
    (cluster.code / "pools.py").write_text(SCRIPT)
    with cluster.one_more("gpu-worker", "default") as default, cluster.one_more("l4-worker", "l4") as l4:
        made = {"default": default, "l4": l4}

        def why() -> str:
            return "".join(map(cluster.engine.logs, made.values()))

        until(lambda: sum("GPU" in node["resources_total"] for node in cluster.nodes()) == 2, why=why)
        yield made
        cluster.stop_jobs()


class Runs:
    """Runs by the command on the head, and its output."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder

    def start(self, name: str, *flags: str) -> subprocess.Popen[str]:
        command = ("ray-on-ecs", "run", "--device=auto", f"--run-name={name}", f"--working-dir={CODE}", *flags)
        head, output = self._cluster.head, self._folder / name
        return self._cluster.engine.start("exec", head, *command, "pools.py", output=output)

    def log(self, name: str) -> str:
        return (self._folder / name).read_text()

    def wait_for(self, name: str, pattern: str) -> str:
        """Wait for a match in the output, and return its group."""
        return until(lambda: re.search(pattern, self.log(name)), why=partial(self.log, name))[1]

    def pool(self, name: str) -> Any:
        return json.loads(self._cluster.read(f"runs/{name}/run.json"))["pool"]


def test_unknown_pool_is_refused_with_the_list(cluster: Cluster) -> None:
    command = ("ray-on-ecs", "run", "--pool=h100", "image_classifier.py")
    done = cluster.engine.execute(cluster.head, *command, check=False)
    listed = "default (4 x g5.xlarge: A10G), cpu (1 x g5.xlarge: 1 CPU) and l4 (1 x g6.xlarge: L4)"
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"ray-on-ecs: --pool: 'h100' is not a pool of this stack; it has {listed}\n"


def test_runs_of_two_pools_do_not_wait_for_each_other(cluster: Cluster, nodes: dict[str, str], tmp_path: Path) -> None:
    engine, runs = cluster.engine, Runs(cluster, tmp_path)
    addresses = {pool: engine.address(name, cluster.network) for pool, name in nodes.items()}
    labels = {node["node_ip"]: node["labels"] for node in cluster.nodes()}
    assert "ray.io/node-group" not in labels[addresses["default"]]
    assert labels[addresses["l4"]]["ray.io/node-group"] == "l4"

    started = [runs.start("l4-first", "--pool=l4")]
    assert runs.wait_for("l4-first", r"trains on (\S+)") == addresses["l4"]
    started.append(runs.start("l4-second", "--pool=l4"))
    assert runs.wait_for("l4-second", r"queued behind (\S+) .* in pool l4\n") == "l4-first"
    started.append(runs.start("any"))
    assert runs.wait_for("any", r"trains on (\S+)") == addresses["default"]
    assert "trains on" not in runs.log("l4-second")

    def ask(*words: str) -> str:
        return engine.execute(cluster.head, "ray-on-ecs", *words).stdout

    for pool, instance in {"default": INSTANCE, "l4": L4_INSTANCE}.items():
        kind, zone = instance["instance_type"], instance["zone"]
        used = rf"^ +{pool} .* in {zone}: .* x {kind} on demand, 1 of 1 GPUs in use$"
        until(lambda used=used: re.search(used, ask("status"), re.MULTILINE), why=partial(ask, "status"))
        name = "any" if pool == "default" else "l4-first"
        row = rf"^{name} +training .*{pool}: {kind} in {zone} "  # owners are shown if they differ
        until(lambda row=row: re.search(row, ask("runs"), re.MULTILINE), why=partial(ask, "runs"))

    for name in nodes.values():
        engine.execute(name, "touch", GO)
    assert [run.wait(480) for run in started] == [0, 0, 0], "".join(map(runs.log, ("l4-first", "l4-second", "any")))
    assert runs.wait_for("l4-second", r"trains on (\S+)") == addresses["l4"]
    l4 = {"name": "l4", "zone": "us-east-1b", "instance_types": ["g6.xlarge"], "gpu": "L4", "reason": "--pool l4"}
    assert [runs.pool("l4-first"), runs.pool("l4-second")] == [l4, l4]
    assert (runs.pool("any")["name"], runs.pool("any")["gpu"]) == ("default", "A10G")
