"""Ray programs as runs: started once, on the head, with a run's folder, metrics, restarts and ends."""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.records import read_records
from tests.commands.head import SECONDS, Head, commands, programs
from tests.local_cluster import have_ended
from tests.ray_on_ecs.run.test_packages import make_wheel
from tests.waiting import until

# Ray Train as in Ray's documentation, without a storage path and a name; the trainer is TorchTrainer's base, which does
# not import torch.
TRAIN = """
import json, os, sys, tempfile, time
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
import helper

def train():
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "epoch.json")) as file:
            first = json.load(file) + 1
    print(helper.WORD, "from", first, flush=True)
    print(os.getpid(), file=open(os.environ["HOLD"] + f"-{first}", "w"), flush=True)
    for epoch in range(first, 6):
        while epoch == 3 and os.path.exists(os.environ["HOLD"]):
            time.sleep(0.1)
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "epoch.json"), "w") as file:
                json.dump(epoch, file)
            ray.train.report({"epoch": epoch}, checkpoint=ray.train.Checkpoint.from_directory(folder))

DataParallelTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=1)).fit()
open("done.txt", "w").write(os.environ["RUN_NAME"])
"""
# Starts workers without a recognizable call in the source.
HIDDEN = """
import importlib
trainers = importlib.import_module("ray.train.v2.api.data_parallel_trainer")
getattr(trainers, "DataParallel" + "Trainer")(print).fit()
"""
# A task uses a package of the requirements, and finds its programs.
PACKAGED = """
import os, ray, shutil, subprocess, sys
import greeting, inner

@ray.remote(num_cpus=0)
def look():
    import greeting, inner, shadowed
    assert shadowed.WORD == "absolute", "the first entry of PYTHONPATH"
    code = "import greeting, inner; print(greeting.SAYS, inner.WORD)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return greeting.SAYS, inner.WORD, shutil.which("greets") is not None, said.strip()

@ray.remote(num_cpus=0)
def see():
    return sys.path, os.environ["PYTHONPATH"].split(os.pathsep)

print(greeting.SAYS, inner.WORD, *ray.get(look.remote()))
path, given = ray.get(see.options(runtime_env={"env_vars": {"PYTHONPATH": os.environ["OTHER"]}}).remote())
assert given == [os.environ["OTHER"]] and not any(entry.endswith("/src") for entry in path), (path, given)
path, given = ray.get(see.options(runtime_env={"py_modules": ["file://" + os.environ["OTHER"] + ".zip"]}).remote())
assert "py_modules" in given[0] and given[1] == os.environ["OTHER"] and given[2].endswith("/code/src"), given
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def typed(head: Head, tmp_path: Path) -> Iterator[Start]:
    """Start `ray-on-ecs` in the head's container, in a folder with Ray programs."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(TRAIN)
    (code / "hidden.py").write_text(HIDDEN)
    (code / "helper.py").write_text("WORD = 'begins'\n")
    with commands("ray_on_ecs", head.shell, code) as start:
        yield start


@pytest.mark.smoke
def test_killed_program_resumes_without_duplicate_reports(typed: Start, head: Head, tmp_path: Path) -> None:
    hold, run = tmp_path / "hold", head.storage / "program"
    hold.touch()
    process = typed("run", "--run-name", "program", "--env", f"HOLD={hold}", "train.py")
    until(lambda: process.poll() is not None or len(_metrics(run)) == 3)
    worker = psutil.Process(int((tmp_path / "hold-0").read_text()))
    for program in programs(run):
        program.kill()
    # The killed program's worker lives on for a moment, and would continue with epoch 3.
    until(lambda: process.poll() is not None or have_ended([worker]))
    hold.unlink()
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    assert "train.py:22 calls DataParallelTrainer: a Ray program" in err
    assert "begins from 0" in out
    assert "begins from 3" in out
    assert [(metric["step"], metric["epoch"]) for metric in _metrics(run)] == [
        (number + 1, number) for number in range(6)
    ]
    assert (run / "files" / "code" / "done.txt").read_text() == "program"
    assert list(run.glob("ray/ray_train_run-program/checkpoint_*/epoch.json"))
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_stopped_program_is_interrupted(typed: Start, head: Head, tmp_path: Path) -> None:
    hold, run = tmp_path / "hold", head.storage / "stopped"
    hold.touch()
    process = typed("run", "--run-name", "stopped", "--env", f"HOLD={hold}", "train.py")
    until(lambda: process.poll() is not None or len(_metrics(run)) == 3)
    stop = typed("stop", "stopped")
    assert stop.wait(SECONDS) == 0
    process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
    assert not programs(run)


def test_program_started_on_every_worker_is_refused(typed: Start) -> None:
    process = typed("run", "--run-name", "hidden", "--num-workers", "1", "hidden.py")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, out + err
    assert "--driver runs it once, on the head" in out.splitlines()[-1]


def test_tasks_of_a_program_have_its_packages(typed: Start, tmp_path: Path) -> None:
    with zipfile.ZipFile(make_wheel(tmp_path / "code", "1.0"), "a") as wheel:
        wheel.writestr("greeting-1.0.dist-info/entry_points.txt", "[console_scripts]\ngreets = greeting:SAYS\n")
    (tmp_path / "code" / "packaged.py").write_text(PACKAGED)
    (tmp_path / "code" / "requirements.txt").write_text("--no-index\n./greeting-1.0-py3-none-any.whl\n")
    (tmp_path / "code" / "src").mkdir()
    (tmp_path / "code" / "src" / "inner.py").write_text("WORD = 'inner'\n")
    other = tmp_path / "other"
    other.mkdir()
    for folder in (other, tmp_path / "code" / "src"):
        (folder / "shadowed.py").write_text(f"WORD = {'absolute' if folder == other else 'relative'!r}\n")
    shutil.make_archive(str(other), "zip", tmp_path, "other")
    variables = ("--env", f"PYTHONPATH={other}:src", "--env", f"OTHER={other}")
    flags = ("--driver", "--requirements", "requirements.txt", *variables)
    process = typed("run", "--run-name", "packaged", *flags, "packaged.py")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    assert "1.0 inner 1.0 inner True 1.0 inner" in out.splitlines()


def _metrics(run: Path) -> list[dict[str, Any]]:
    return read_records(RunStorage.open(str(run.parent), run.name))
