"""`python -m ray_on_ecs.run` as users type it, on a running head: their code is uploaded, and nothing is left."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import read_snapshot
from tests.commands.conftest import REPOSITORY
from tests.commands.head import SECONDS, Head, commands, read_until, scripts
from tests.local_cluster import DIRECT
from tests.waiting import until

EXAMPLE = REPOSITORY / "examples" / "ddp_snapshot.py"
METRICS = ("--metric", "loss=loss {number}", "--metric", r"step=epoch (\d+)")
# Six epochs with a snapshot after each one, like examples/ddp_snapshot.py without torch; the fourth one waits while a
# file exists. A rank that gets SIGTERM leaves another file.
EPOCHS = """
import os, signal, sys, time
from pathlib import Path

def end(number, frame):
    Path("late.pt").touch()
    (marks / f"ended-{rank}").touch()
    sys.exit(1)

rank, marks, snapshot = os.environ["RANK"], Path(os.environ["MARKS"]), Path("snapshot.pt")
signal.signal(signal.SIGTERM, end)
print("W&B on rank", rank, os.environ.get("WANDB_RUN_ID"), os.environ.get("WANDB_RESUME"))
(marks / f"begun-{rank}").touch()
first = int(snapshot.read_text()) if snapshot.exists() else 0
if first:
    print(f"rank {rank}: resuming at epoch {first}")
for epoch in range(first, int(sys.argv[2])):
    while epoch > 2 and (marks / "hold").exists():
        time.sleep(0.1)
    if rank == "0":
        print(f"epoch {epoch}: loss {1 / (epoch + 1):.4f}")
        snapshot.with_suffix(".tmp").write_text(str(epoch + 1))
        snapshot.with_suffix(".tmp").replace(snapshot)
"""
# Shows its arguments and environment, and needs a second of Python at most.
SHOW = """
import json, os, socket, sys
from pathlib import Path
import ray_on_ecs
found = {"rank": os.environ["RANK"], "size": os.environ["WORLD_SIZE"], "arguments": sys.argv[1:], "folder": os.getcwd()}
found["data"] = Path("data.txt").read_text()
found["port"] = os.environ["MASTER_PORT"]
found["addresses"] = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
socket.create_server(("", int(found["addresses"][int(os.environ["RANK"])].rpartition(":")[2]))).close()
Path(os.environ["RUN_DIR"], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
for step in (1, 2):
    ray_on_ecs.progress(step)
    ray_on_ecs.log(loss=1 / step)
"""
# Joins the cluster, and shows Ray's variables.
DRIVER = """
import os
variables = [*os.environ]  # Ray adds to them
import ray
print(f"NCCL_SOCKET_IFNAME {os.environ['NCCL_SOCKET_IFNAME']}")
for name in variables:
    if name.strip("_").startswith("RAY_") and not name.startswith("RAY_ON_ECS_"):
        print("variable", name)
ray.init()
print("a task has answered", ray.get(ray.remote(num_cpus=0)(lambda: 42).remote()))
"""
# The silence that ends it begins with its output.
STUCK = """
import threading

def stuck():
    print("begins", flush=True)
    threading.Event().wait()

stuck()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A user's folder with code."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "epochs.py").write_text(EPOCHS)
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "missing.py").write_text("import no_such_package\n")
    (tmp_path / "stuck.py").write_text(STUCK)
    return tmp_path


@pytest.fixture
def launch(environment: dict[str, str], head: Head, code: Path) -> Iterator[Start]:
    """Start `python -m ray_on_ecs.run` in that folder, on the head of the tests."""
    with commands(DIRECT, {**environment, **head.variables}, code) as start:
        yield start


def is_stored(folder: Path, name: str) -> bool:
    """Return whether the last snapshot has a file of a run as its script has left it."""
    storage = RunStorage.open(str(folder.parent), folder.name)
    snapshot = read_snapshot(storage)
    written_at = Path(storage.path(snapshot.folder, name)).stat().st_mtime_ns if name in snapshot.files else None
    return written_at is not None and snapshot.files[name].written_at == written_at


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


@pytest.mark.smoke
def test_torchrun_script_resumes_after_a_rank_is_killed(launch: Start, head: Head, code: Path) -> None:
    (code / "hold").touch()
    marks = ("--env", f"MARKS={code}")
    process = launch("--num-workers", "2", "--run-name", "mine", *METRICS, *marks, "epochs.py", "--epochs", "6")
    seen = read_until(process, "epoch 2: loss")
    folder = head.storage / "mine"
    until(lambda: is_stored(folder, "snapshot.pt") and (code / "begun-1").exists())
    [rank_1] = [script for script in scripts("epochs.py", head.storage) if script.environ()["RANK"] == "1"]
    assert rank_1.cwd() != str(code)
    rank_1.kill()
    until((code / "ended-0").exists)  # the other rank may save
    (code / "hold").unlink()
    status, out, err = end(process)
    assert status == 0, out + err
    assert "training failed on rank 1: epochs.py was ended by signal 9" in out
    assert "(newest kept file: snapshot.pt of " in out
    assert "rank 0: resuming at epoch 3" in out
    of_wandb = re.findall(r"(?m)^\[rank \d\] W&B on rank (\d) (\S+) (\S+)$", seen + out)
    run_id = json.loads((folder / "run.json").read_text())["id"]
    assert sorted(of_wandb) == 2 * [("0", f"mine-{run_id}", "allow")] + 2 * [("1", "None", "None")]
    kept = read_snapshot(RunStorage.open(str(head.storage), "mine")).files
    assert kept.keys() == {"snapshot.pt"}, "a script that is killed may be in the middle of writing"
    records = read_metrics(folder)
    assert [(record["step"], record["loss"]) for record in records] == [
        (epoch, round(1 / (epoch + 1), 4)) for epoch in range(6)
    ]
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"] == records[-1]
    assert result["command"] == ["epochs.py", "--epochs", "6"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "report.html").read_text()
    assert f"loss {records[-1]['loss']:.4g}" in report
    assert '<img alt="The metrics by step" src="data:image/png;base64,iVBOR' in report
    assert not scripts("epochs.py", head.storage)


def test_ddp_example_trains_on_two_workers(launch: Start, head: Head) -> None:
    flags = ("--num-workers", "2", "--run-name", "ddp", *METRICS)
    status, out, err = end(launch(*flags, "ddp_snapshot.py", "--epochs", "6"))
    assert (status, err) == (0, ""), out
    records = read_metrics(head.storage / "ddp")
    assert [record["step"] for record in records] == list(range(6))
    assert records[-1]["loss"] < records[0]["loss"]
    assert read_snapshot(RunStorage.open(str(head.storage), "ddp")).files.keys() == {"snapshot.pt"}


def test_missing_package_is_one_line_and_not_retried(launch: Start) -> None:
    status, out, err = end(launch("--num-workers", "1", "missing.py"))
    assert status == 2, out + err
    assert err.startswith(
        "ray-on-ecs: training failed on rank 0: missing.py ended with exit status 1: ModuleNotFoundError: No module "
        "named 'no_such_package'; name its package in a file for --requirements; see "
    )
    assert err.count("\n") == 1
    assert "restarting" not in out


def test_script_can_join_the_cluster_as_driver(launch: Start) -> None:
    """The environment of its Ray worker does not interfere."""
    status, out, err = end(launch("--num-workers", "1", "--no-driver", "driver.py"))
    assert status == 0, out + err
    assert "a task has answered 42" in out
    names = re.findall(r"variable (\w+)", out)
    ours = {"RAY_TRAIN_CALLBACKS", "RAY_TUNE_CALLBACKS"}  # which end a Ray program that is started on every worker
    assert set(names) <= {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *ours}
    assert "NCCL_SOCKET_IFNAME =" in out


def test_hanging_script_leaves_its_stacks(launch: Start, head: Head) -> None:
    flags = ("--num-workers", "1", "--run-name", "stuck", "--hang-timeout", "20", "--max-restarts", "0")
    status, out, err = end(launch(*flags, "stuck.py"))
    assert status == 1, out + err
    assert err.startswith("ray-on-ecs: training failed: no progress for 20 s: the script is in stuck, stuck.py:")
    [stacks] = (head.storage / "stuck" / "stalls").glob("*/rank_0.txt")
    assert "in stuck" in stacks.read_text()
    assert json.loads((head.storage / "stuck" / "error.json").read_text())["next"].endswith(" stuck.py")
    assert not scripts("stuck.py", head.storage)


@pytest.fixture
def submit(head: Head, code: Path) -> Iterator[Start]:
    """Start `ray-on-ecs run` in the head's container, in that folder."""
    with commands("ray_on_ecs", head.shell, code) as start:
        yield partial(start, "run")


@pytest.mark.smoke
def test_job_runs_the_code_of_its_submission(submit: Start, head: Head, code: Path) -> None:
    (code / "show.py").write_text(SHOW)
    (code / "data.txt").write_text("of the folder")
    status, out, err = end(submit("--num-workers", "2", "--run-name", "job", "show.py", "--run-name", "own"))
    assert status == 0, out + err
    assert "run job is submitted as job job" in out
    folder = head.storage / "job" / "files" / code.name
    shown = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(each["rank"], each["size"], each["arguments"]) for each in shown] == [
        ("0", "2", ["--run-name", "own"]),
        ("1", "2", ["--run-name", "own"]),
    ]
    assert {each["data"] for each in shown} == {"of the folder"}
    assert shown[0]["addresses"] == shown[1]["addresses"]
    assert len(set(shown[0]["addresses"])) == 2
    assert len({each["port"] for each in shown}) == 1
    assert {each["folder"] for each in shown} == {str(folder)}
    metrics = read_metrics(head.storage / "job")
    assert [(metric["step"], metric["loss"]) for metric in metrics] == [(1, 1.0), (2, 0.5)]
    last = json.loads((head.storage / "job" / "status.json").read_text())
    known = {"state": "finished", "step": 2, "loss": 0.5, "job": "job", "workers": 2}
    assert known.items() <= last.items()
    [log] = (head.storage / "job" / "logs").iterdir()
    assert log.read_text().splitlines()[-1].startswith("results in ")
