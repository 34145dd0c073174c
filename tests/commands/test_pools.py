"""Runs on a Ray with nodes of two pools: each in its own, side by side, and in another where EC2 refuses the first."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from tests.commands.head import SECONDS
from tests.local_cluster import REPOSITORY, LocalCluster, kill_tree
from tests.refusals import no_capacity
from tests.waiting import until

pytestmark = pytest.mark.ray
# Waits until the run of the other pool trains, too; prints the folder of its node.
MEETS = """
import os, pathlib, sys, time
here, other = map(pathlib.Path, sys.argv[1:])
here.touch()
while not other.exists():
    time.sleep(0.05)
print("on", pathlib.Path(os.environ["RAY_ON_ECS_TEST_NODE"]).name, flush=True)
"""
# Waits in its first start; prints the folder of the node of its second one.
RETURNS = """
import os, pathlib, sys, time
mark, node = pathlib.Path(sys.argv[1]), pathlib.Path(os.environ["RAY_ON_ECS_TEST_NODE"]).name
if not mark.exists():
    mark.write_text(node)
    time.sleep(600)
print("on", node, flush=True)
"""
# Uses a node of each pool.
PROGRAM = """
import ray

ray.init()

@ray.remote(num_gpus=1, num_cpus=0)
def where():
    return ray.get_runtime_context().get_node_labels().get("ray.io/node-group", "none")

selectors = [{"ray.io/node-group": "h100"}, {"ray.io/node-group": "!h100"}]
print("on", ray.get([where.options(label_selector=selector).remote() for selector in selectors]), flush=True)
"""


def group(pool: str, gpu: str) -> dict[str, Any]:
    known = {"zones": ["us-east-1a"], "types": ["p5.48xlarge"], "units": 1, "spot": False, "min": 0, "max": 1}
    return {"pool": pool, "gpu": gpu, **known, "default_nodes": 1, "idle_minutes": 60, "group": pool, "provider": pool}


POOLS = {"workers": group("default", "A10G"), "h100-workers": group("h100", "H100"), "a-workers": group("a", "A100")}
STACK = {
    "info": {"cluster": "ray", "groups": POOLS, "prices": {"p5.48xlarge": 40.0}, "head_usd": 0.2, "network_gbits": {}},
    "refused": {"a": no_capacity("p4d.24xlarge", "b")},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    stack = tmp_path_factory.mktemp("stack") / "stack.json"
    stack.write_text(json.dumps(STACK))
    with LocalCluster(
        0,
        {CLUSTER_INFO_VARIABLE: "/ray/cluster-info", "RAY_ON_ECS_TEST_STACK": str(stack), "CUDA_VISIBLE_DEVICES": "0"},
    ) as cluster:
        cluster.add_worker("--num-gpus=1")  # node-1
        cluster.add_worker("--num-gpus=1", "--labels=ray.io/node-group=h100")  # node-2
        yield cluster


class Runs:
    """Commands in a folder."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        (folder / "code").mkdir()

    def start(self, name: str, script: str, *words: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        (self._folder / "code" / f"{name}.py").write_text(script)
        where = ("--storage-path", str(self._folder), "--working-dir", str(self._folder / "code"))
        command = (*where, "--run-name", name, *flags, f"{name}.py", *words)
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(REPOSITORY / "tests" / "pool_run.py"), *command],
                env=self._cluster.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def train(self, name: str, script: str, *words: str, flags: tuple[str, ...] = (), status: int = 0) -> None:
        """Start a run, and wait until it ends with this status."""
        self.wait(self.start(name, script, *words, flags=flags), name, status)

    def wait(self, run: subprocess.Popen[bytes], name: str, status: int = 0) -> None:
        """Wait until a run ends with this status; end one that hangs, as the next runs would wait for it."""
        try:
            assert run.wait(SECONDS) == status, self.log(name)
        except subprocess.TimeoutExpired:
            kill_tree(run.pid)
            pytest.fail(f"the run has not ended in {SECONDS} s: {self.log(name)}")

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def nodes(self, name: str) -> set[str]:
        """The nodes in the script's lines; each node's Ray forwards those of all nodes of the machine."""
        return set(re.findall(r"\bon (node-\d)", self.log(name)))

    def pool(self, name: str) -> Any:
        found = [json.loads((self._folder / name / file).read_text())["pool"] for file in ("run.json", "result.json")]
        assert found[0] == found[1]
        return found[0]


@pytest.fixture
def runs(cluster: LocalCluster, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path)


def test_runs_of_two_pools_train_side_by_side(runs: Runs, tmp_path: Path) -> None:
    marks = (str(tmp_path / "a"), str(tmp_path / "b"))
    both = [
        runs.start("first", MEETS, *marks, flags=("--gpu", "A10G")),
        runs.start("second", MEETS, *marks[::-1], flags=("--pool", "h100")),
    ]
    for run, name in zip(both, ("first", "second"), strict=True):
        runs.wait(run, name)
    assert [runs.nodes(name) for name in ("first", "second")] == [{"node-1"}, {"node-2"}]
    assert runs.pool("second") == {
        "name": "h100",
        "zone": "us-east-1a",
        "instance_types": ["p5.48xlarge"],
        "gpu": "H100",
        "reason": "--pool h100",
    }
    assert "queued behind" not in runs.log("first") + runs.log("second")
    assert "\n1 x p5.48xlarge stays idle for some 60 minutes (40.00 USD)" in runs.log("second")


def test_run_trains_in_the_next_pool_if_ec2_refuses(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "met").touch()
    runs.train("third", MEETS, *[str(tmp_path / "met")] * 2, flags=("--gpu", "A100,H100"))
    assert runs.nodes("third") == {"node-2"}
    assert runs.pool("third")["reason"] == "EC2 has no p5.48xlarge in us-east-1a at the moment"
    assert re.search(r"pool a \(1 x p5\.48xlarge in us-east-1a.*\): first of --gpu A100,H100\n", runs.log("third"))
    assert "EC2 has capacity in us-east-1b: add to workerPools.a.zones" not in runs.log("third")


def test_run_on_cpus_trains_in_the_default_pool(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "met").touch()
    flags = ("--device", "cpu", "--num-workers", "1")
    runs.train("cpus", MEETS, *[str(tmp_path / "met")] * 2, flags=flags)
    assert (runs.nodes("cpus"), runs.pool("cpus")["name"]) == ({"node-1"}, "default")


@pytest.mark.parametrize("flags", [(), ("--then-stop",)], ids=["idle", "then stop"])
def test_failed_run_says_what_stays(runs: Runs, flags: tuple[str, ...]) -> None:
    script = "import sys, time\ntime.sleep(5)\nsys.exit(3)\n"
    runs.train("failed", script, flags=("--pool", "h100", "--max-restarts", "0", *flags), status=1)
    stays = "1 x p5.48xlarge is being stopped (--then-stop)"
    if not flags:
        stays = "1 x p5.48xlarge stays idle for some 60 minutes (40.00 USD) unless another run takes it"
    _, _, last = runs.log("failed").partition(f"\n{stays}")
    _, _, last = last.partition("\nthe head costs 0.20 USD an hour (146 a month)")
    assert "exit status 3" in last


def test_program_uses_both_pools(runs: Runs) -> None:
    runs.train("program", PROGRAM, flags=("--driver",))
    assert "on ['h100', 'none']" in runs.log("program")


@pytest.mark.fault
def test_run_that_lost_its_node_goes_to_the_next_pool(cluster: LocalCluster, runs: Runs, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    run = runs.start("lost", RETURNS, str(mark), flags=("--gpu", "A10G,H100", "--max-restarts", "1"))
    until(lambda: mark.exists() and bool(mark.read_text()), why=lambda: runs.log("lost"))
    assert mark.read_text() == "node-1"
    stack = Path(cluster.environment["RAY_ON_ECS_TEST_STACK"])
    stack.write_text(json.dumps({**STACK, "refused": {"default": no_capacity("g5.xlarge")}}))
    kill_tree(cluster.workers[0].pid)
    runs.wait(run, "lost")
    assert runs.nodes("lost") == {"node-2"}
    assert runs.pool("lost")["reason"] == "EC2 has no p5.48xlarge in us-east-1a at the moment"
    assert (runs.pool("lost")["name"], runs.log("lost").count("pool h100 (")) == ("h100", 1)
