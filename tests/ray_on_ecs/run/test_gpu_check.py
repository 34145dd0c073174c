"""The check of GPUs before a script restarts, in a child of a program with the name of the node's command."""

import subprocess
import sys
from pathlib import Path

import pytest

# A node: it starts a worker's process, and ends with a distinct status after SIGTERM.
NODE = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
sys.exit(subprocess.call([sys.executable, "-c", sys.argv[1]]))
"""
WORKER = """
import os, time
from ray_on_ecs import logs
from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE
from ray_on_ecs.node import gpus
from ray_on_ecs.errors import GpuError, StartError
from ray_on_ecs.run.gpu_check import stop_node_if_gpus_fail

def check(expected):
    print(f"checks {{expected}} GPUs", flush=True)
    {check}

logs.set_up()
gpus.check = check
os.environ.update({{"CUDA_VISIBLE_DEVICES": "0,1"{instance}}})
print(f"stops: {{stop_node_if_gpus_fail()}}", flush=True)
time.sleep({seconds})
"""
INSTANCE = ', INSTANCE_FILE_VARIABLE: "instance.json"'
FAULT = "raise GpuError('GPU 1 does not compute')"


def run_node(folder: Path, check: str, instance: str = INSTANCE, seconds: int = 0) -> tuple[int, str]:
    """Return the exit status and the output of a node whose worker checks its GPUs."""
    node = folder / "ray-worker"
    node.write_text(NODE)
    worker = WORKER.format(check=check, instance=instance, seconds=seconds)
    done = subprocess.run([sys.executable, str(node), worker], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout


def test_node_with_a_gpu_fault_is_asked_to_stop(tmp_path: Path) -> None:
    status, output = run_node(tmp_path, FAULT, seconds=240)
    assert status == 7
    assert "checks 2 GPUs" in output
    assert "GPU 1 does not compute; this node stops" in output


@pytest.mark.parametrize(
    "check",
    [
        "pass",
        "raise StartError('no kernel image')",
        "raise OSError('no memory')",
        "raise GpuError('GPU 0 does not compute: CUDA out of memory')",
    ],
)
def test_node_without_a_gpu_fault_runs_on(tmp_path: Path, check: str) -> None:
    assert run_node(tmp_path, check) == (0, "checks 2 GPUs\nstops: False\n")


def test_gpus_of_other_machines_are_not_checked(tmp_path: Path) -> None:
    assert run_node(tmp_path, FAULT, instance="") == (0, "stops: False\n")
