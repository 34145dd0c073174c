"""`python -m ray_on_ecs.run` as users type it, on a running head: their code is uploaded, and nothing is left."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from ray_on_ecs.tracking.snapshot import read_snapshot
from ray_on_ecs.tracking.storage import RunStorage
from tests.commands.conftest import REPOSITORY
from tests.commands.head import ON_HEAD, SECONDS, Head, commands, read_until
from tests.local_cluster import have_ended
from tests.waiting import until

EXAMPLE = REPOSITORY / "examples" / "ddp_snapshot.py"
METRICS = ("--metric", "loss=loss {number}", "--metric", r"step=epoch (\d+)")
# Waits in its third epoch while a file exists.
HELD = """
import os, time
from pathlib import Path
import ddp_snapshot

class Held(ddp_snapshot.DistributedSampler):
    def set_epoch(self, epoch):
        while epoch > 2 and Path(os.environ["HOLD"]).exists():
            time.sleep(0.1)
        super().set_epoch(epoch)

ddp_snapshot.DistributedSampler = Held
print("W&B on rank", os.environ["RANK"], os.environ.get("WANDB_RUN_ID"), os.environ.get("WANDB_RESUME"), flush=True)
ddp_snapshot.main()
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
# Shows which files are links.
LINKS = """
import os
print("links", sorted(name for name in os.listdir("data") if os.path.islink(f"data/{name}")))
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A user's folder with code."""
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "missing.py").write_text("import no_such_package\n")
    (tmp_path / "stuck.py").write_text("import threading\ndef stuck():\n  threading.Event().wait()\nstuck()\n")
    return tmp_path


@pytest.fixture
def launch(environment: dict[str, str], head: Head, code: Path) -> Iterator[Start]:
    """Start `python -m ray_on_ecs.run` in that folder, on the head of the tests."""
    with commands("ray_on_ecs.run", {**environment, **head.variables}, code) as start:
        yield start


def is_stored(folder: Path, name: str) -> bool:
    """Return whether the last snapshot has a file of a run as its script has left it."""
    storage = RunStorage.open(str(folder.parent), folder.name)
    snapshot = read_snapshot(storage)
    written_at = Path(storage.path(snapshot.folder, name)).stat().st_mtime_ns if name in snapshot.files else None
    return written_at is not None and snapshot.files[name].written_at == written_at


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def test_torchrun_script_resumes_after_a_rank_is_killed(launch: Start, head: Head, code: Path) -> None:
    (code / "hold").touch()
    hold = ("--env", f"HOLD={code / 'hold'}")
    process = launch("--num-workers", "2", "--run-name", "mine", *METRICS, *hold, "held.py", "--epochs", "6")
    seen = read_until(process, "epoch 2: loss")
    folder = head.storage / "mine"
    until(lambda: is_stored(folder, "snapshot.pt"))
    rank_1 = until(lambda: [each for each in scripts("held.py") if each.environ().get("RANK") == "1"])
    assert rank_1[0].cwd() != str(code)
    rank_1[0].kill()
    (code / "hold").unlink()
    status, out, err = end(process)
    assert status == 0, out + err
    assert "training failed on rank 1: held.py was ended by signal 9" in out
    assert "restarting from snapshot.pt of " in out
    assert "rank 1: resuming at epoch 3" in out
    of_wandb = re.findall(r"(?m)^\[rank \d\] W&B on rank (\d) (\S+) (\S+)$", seen + out)
    run_id = json.loads((folder / "config.json").read_text())["id"]
    assert sorted(of_wandb) == 2 * [("0", f"mine-{run_id}", "allow")] + 2 * [("1", "None", "None")]
    assert read_snapshot(RunStorage.open(str(head.storage), "mine")).files.keys() == {"snapshot.pt"}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records] == list(range(6))
    assert records[-1]["loss"] < records[0]["loss"]
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"] == records[-1]
    assert result["command"] == ["held.py", "--epochs", "6"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "report.html").read_text()
    assert f"loss {records[-1]['loss']:.4g}" in report
    assert '<img alt="The metrics by step" src="data:image/png;base64,iVBOR' in report
    assert not scripts("held.py")
    status, _, err = end(launch("--num-workers", "2", "--run-name", "mine", "held.py"))
    assert (status, err.count("\n")) == (2, 1)
    assert "run 'mine' is finished" in err


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
    status, out, err = end(launch("--num-workers", "1", "driver.py"))
    assert status == 0, out + err
    assert "a task has answered 42" in out
    names = re.findall(r"variable (\w+)", out)
    ours = {"RAY_TRAIN_CALLBACKS", "RAY_TUNE_CALLBACKS"}  # which end a Ray program that is started on every worker
    assert set(names) <= {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *ours}
    assert "NCCL_SOCKET_IFNAME =" in out


def test_hanging_script_leaves_its_stacks(launch: Start, head: Head) -> None:
    flags = ("--num-workers", "1", "--run-name", "stuck", "--hang-timeout", "5", "--max-restarts", "0")
    status, out, err = end(launch(*flags, "stuck.py"))
    assert status == 1, out + err
    assert err.startswith("ray-on-ecs: training failed: no progress for 5 s; see ")
    [stacks] = (head.storage / "stuck" / "stalls").glob("*/rank_0.txt")
    assert "in stuck" in stacks.read_text()
    assert json.loads((head.storage / "stuck" / "error.json").read_text())["next"].endswith(" stuck.py")
    assert not scripts("stuck.py")


@pytest.fixture
def submit(environment: dict[str, str], head: Head, code: Path) -> Iterator[Start]:
    """Start `ray-on-ecs run` in that folder."""
    variables = {**environment, **head.variables, "RAY_API_SERVER_ADDRESS": head.dashboard, **ON_HEAD}
    with commands("ray_on_ecs", variables, code) as start:
        yield partial(start, "run")


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
    assert {each["port"] for each in shown} == {shown[0]["addresses"][0].rpartition(":")[2]}
    assert {each["folder"] for each in shown} == {str(folder)}
    metrics = [json.loads(line) for line in (head.storage / "job" / "metrics.jsonl").read_text().splitlines()]
    assert [(each["step"], each["loss"]) for each in metrics] == [(1, 1.0), (2, 0.5)]
    last = json.loads((head.storage / "job" / "status.json").read_text())
    known = {"state": "finished", "step": 2, "loss": 0.5, "job": "job", "workers": 2}
    assert known.items() <= last.items()
    [log] = (head.storage / "job" / "logs").iterdir()
    assert log.read_text().splitlines()[-1].startswith("results in ")


@pytest.fixture
def large(code: Path) -> Path:
    """The folder with code, with files of 2 GiB, one of which is ignored."""
    (code / "data").mkdir()
    (code / ".gitignore").write_text("*.bin\n")
    (code / "links.py").write_text(LINKS)
    for name, size in {"large.tar": 2**31, "ignored.bin": 2**31, "small.txt": 10}.items():
        with (code / "data" / name).open("wb") as file:
            file.truncate(size)
    return code


def test_large_files_are_linked_on_this_machine(launch: Start, large: Path) -> None:
    status, out, err = end(launch("--num-workers", "1", "links.py"))
    assert status == 0, out + err
    assert "links ['large.tar']" in out
    assert "left out: data/ignored.bin (2.0 GiB, .gitignore)" in out


def test_too_much_code_is_one_line(submit: Start, large: Path) -> None:
    status, out, err = end(submit("--num-workers", "1", "links.py"))
    assert (status, out) == (2, ""), err
    line = f"ray-on-ecs: --working-dir: {large} has 2.0 GiB, and code is at most 1.0 GiB; the largest are data/ "
    assert err.splitlines()[-1].startswith(line)


def test_ctrl_c_ends_all_processes(launch: Start, head: Head) -> None:
    process = launch("--num-workers", "1", "--run-name", "interrupted", "stuck.py")
    until(lambda: scripts("stuck.py"))
    process.send_signal(signal.SIGINT)
    status, _, err = end(process)
    assert status == 130, err
    again = "the same command with --run-name interrupted starts from the beginning"
    assert err == f"ray-on-ecs: interrupted; nothing is stored yet, so {again}\n"
    until(lambda: not scripts("stuck.py"))
    folder = head.storage / "interrupted"
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"
    report = (folder / "report.html").read_text()
    assert "--run-name interrupted" in report
    assert "stuck.py" in report


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere.py"], "SCRIPT: there is no file 'nowhere.py' in "),
        (["--working-dir", "nowhere", "x.py"], "--working-dir: 'nowhere' is not a folder"),
        (["--requirements", "nowhere.txt", "held.py"], "--requirements: 'nowhere.txt' can't be read"),
        (["--input", "data=nowhere", "held.py"], "--input: data=nowhere can't be read"),
    ],
    ids=["script", "working dir", "requirements", "input"],
)
def test_wrong_path_is_one_line_before_the_start(launch: Start, head: Head, given: list[str], message: str) -> None:
    before = set(head.storage.iterdir())
    status, out, err = end(launch(*given))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ray-on-ecs: {message}")
    assert set(head.storage.iterdir()) == before


def scripts(name: str) -> list[psutil.Process]:
    """Return the processes that run a script."""
    running = psutil.process_iter(["cmdline"])
    return [each for each in running if (each.info["cmdline"] or [])[1:3] == ["-u", name] and not have_ended([each])]
