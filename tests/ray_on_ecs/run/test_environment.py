"""The variables of a script match the variables that torchrun sets here."""

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.run.environment import wandb_id
from ray_on_ecs.run.group import WorkerRank
from ray_on_ecs.run.launcher import TorchrunLauncher
from ray_on_ecs.run.mpi.launcher import MpiLauncher
from tests.starts import start_of

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
# Internal variables of torchrun: files and errors of its agent.
NOT_OURS = {"TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


RANK_3 = WorkerRank(3, 4, 1, 2, 1)


def test_variables_match_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--rdzv-id=mine", str(script)]
    result = subprocess.run(torchrun, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    theirs = json.loads(result.stdout)
    names = {name for name in theirs if name.isupper() and name.split("_")[0] not in ("LC", "PATH", "KMP")} - NOT_OURS
    ours = start_of(tmp_path).torchrun_variables()
    assert names - ours.keys() <= {"TORCHELASTIC_ENABLE_FILE_TIMER"}
    same = names & ours.keys() - {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS"}
    same -= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"}
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE"} <= same


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ([], "{0}/autoload"),
        (["PYTHONPATH=src:lib"], "src:lib:{0}/autoload"),
        (["TORCH_DEVICE_BACKEND_AUTOLOAD=0", "PYTHONPATH=src"], "src"),
        (["TORCH_DEVICE_BACKEND_AUTOLOAD=0"], None),
    ],
)
def test_reader_of_collectives_is_last_on_the_path(
    settings: list[str], path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    environment = start_of(tmp_path).environment
    config = replace(environment.config, env=tuple(settings))
    python_path = replace(environment, config=config).variables({}, tmp_path).get("PYTHONPATH")
    assert python_path == (path and path.format(tmp_path))
    assert (tmp_path / "autoload").exists() == str(python_path).endswith("autoload")


def test_script_starts_without_the_reader_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setenv("PYTHONPATH", "lib")
    for write in ("write_bytes", "write_text"):
        with monkeypatch.context() as full:
            full.setattr(Path, write, fail)
            assert start_of(tmp_path).environment.variables({}, tmp_path)["PYTHONPATH"] == "lib"


def test_ranks_sizes_and_addresses(tmp_path: Path) -> None:
    env = start_of(tmp_path, nodes=(0, 0, 1, 1), rank=RANK_3, number=2).torchrun_variables()
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("3", "4", "1", "2")
    assert env["MAX_WORLD_SIZE"] == "6"
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("a", "1")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["OMP_NUM_THREADS"]) == ("2", "5")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "1"


def test_store_of_the_process_groups_is_the_workers(tmp_path: Path) -> None:
    env = start_of(tmp_path, nodes=(0, 0), store=("127.0.0.1", 7)).torchrun_variables()
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "7")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_program_of_a_node_sets_the_ranks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    begun = start_of(tmp_path, nodes=(0, 0, 0, 1), rank=WorkerRank(3, 4, 0, 1, 1))
    assert begun.node_variables() == {
        "NNODES": "2",
        "NODE_RANK": "1",
        "NPROC_PER_NODE": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "MAX_WORLD_SIZE": "6",
        "OMP_NUM_THREADS": "5",
        "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:4"]}, "task": {"type": "worker", "index": 1}}),
    }


def test_program_of_a_node_sees_as_many_gpus_as_it_has_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    begun = start_of(tmp_path, nodes=(0, 0), rank=WorkerRank(0, 2, 0, 2))
    assert begun.node_variables()["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("rank", [0, 3])
def test_tensorflow_has_all_workers_and_its_index(tmp_path: Path, rank: int) -> None:
    begun = start_of(tmp_path, nodes=(0, 0, 1, 1), rank=WorkerRank(rank, 4))
    assert json.loads(begun.torchrun_variables()["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:1", "a:2", "b:3", "b:4"]},
        "task": {"type": "worker", "index": rank},
    }


@pytest.mark.parametrize(
    ("rank", "mpi", "users", "expected"),
    [
        (0, False, {}, {"WANDB_RUN_ID": "mine-0123abcd", "WANDB_RESUME": "allow"}),
        (1, False, {}, {}),
        (0, True, {}, {}),
        (0, False, {"WANDB_RUN_ID": "mine"}, {}),
        (0, False, {"WANDB_RESUME": "never"}, {}),
    ],
    ids=["rank 0", "rank 1", "mpi", "the user's ID", "the user's mode"],
)
def test_only_rank_0_continues_a_wandb_run(
    tmp_path: Path, rank: int, mpi: bool, users: dict[str, str], expected: dict[str, str]
) -> None:
    config: Any = type("Config", (), {"mpi": mpi, "variables": users})
    assert replace(start_of(tmp_path).environment, config=config).wandb_variables(rank) == expected


def test_wandb_id_has_at_most_64_characters() -> None:
    assert wandb_id(128 * "x", "0123abcd") == f"{55 * 'x'}-0123abcd"


@pytest.mark.parametrize("launcher", [TorchrunLauncher(), MpiLauncher()], ids=["torchrun", "mpi"])
def test_ranks_of_the_shell_are_not_the_scripts(launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell of a notebook, or of another launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE", "RUN_NAME", "INPUT_X"):
        monkeypatch.setenv(name, "shell's")
    start = start_of(tmp_path, nodes=(0, 0, 1, 1), rank=RANK_3)
    env = start.environment.variables(launcher.variables(start), tmp_path)
    assert [name for name, value in env.items() if value == "shell's"] == ["INPUT_X"]
    assert env.get("RANK", "3") == "3"
    assert (env["MASTER_ADDR"], env["RUN_NAME"]) == ("a", "mine")
