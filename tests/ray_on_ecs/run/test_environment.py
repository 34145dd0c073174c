"""The variables of a script match the variables that torchrun sets here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lazy import Lazy

environment = Lazy("ray_on_ecs.run.environment")
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
# Internal variables of torchrun: files and errors of its agent.
NOT_OURS = {"TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


def worker(**changed: Any) -> Any:
    given: dict[str, Any] = {"rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "node_rank": 1}
    given |= {"nodes": 2, "max_world_size": 6, "run_name": "mine", "attempt": 2, "max_restarts": 3, "threads": 5}
    return environment.WorkerEnvironment(**given | changed)


def test_variables_match_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--rdzv-id=mine", str(script)]
    said = subprocess.run(torchrun, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    theirs = json.loads(said.stdout)
    names = {each for each in theirs if each.isupper() and each.split("_")[0] not in ("LC", "PATH", "KMP")} - NOT_OURS
    alone = worker(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, attempt=0)
    ours = alone.variables([("localhost", 1)])
    assert names - ours.keys() <= {"TORCHELASTIC_ENABLE_FILE_TIMER"}
    same = names & ours.keys() - {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS"}
    same -= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"}
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE"} <= same


def test_ranks_sizes_and_addresses() -> None:
    found = worker().variables([("a", 1), ("a", 2), ("b", 3), ("b", 4)])
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("3", "4", "1", "2")
    assert found["MAX_WORLD_SIZE"] == "6"
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("a", "1")
    assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["OMP_NUM_THREADS"]) == ("2", "5")


@pytest.mark.parametrize("rank", [0, 3])
def test_tensorflow_has_all_workers_and_its_index(rank: int) -> None:
    found = json.loads(worker(rank=rank).variables([("a", 1), ("a", 2), ("b", 3), ("b", 4)])["TF_CONFIG"])
    assert found == {
        "cluster": {"worker": ["a:1", "a:2", "b:3", "b:4"]},
        "task": {"type": "worker", "index": rank},
    }
