"""The check of mounts before a script starts, in a child of a program with the name of the node's command."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_on_ecs.run.test_gpu_check import INSTANCE, NODE

WORKER = """
import os, time
from pathlib import Path
from ray_on_ecs import logs
from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE
from ray_on_ecs.run import mount_check

faults, stat = {faults}, os.stat

def failing(place, **options):
    if place in faults:
        raise OSError(faults[place], os.strerror(faults[place]))
    return stat("/", **options)

logs.set_up()
os.stat = failing
mount_check.MOUNT_TABLE = Path({table!r})
os.environ.update({{"X": "x"{instance}}})
print(f"stops: {{mount_check.stop_node_if_mounts_fail()}}", flush=True)
time.sleep({seconds})
"""
TABLE = """overlay / overlay ro 0 0
/dev/nvme0n1p1 /mnt xfs rw 0 0
mountpoint-s3 /mnt/data fuse ro 0 0
10.0.0.1@tcp:/abc /mnt/fsx lustre rw 0 0
mountpoint-s3 /home/data fuse ro 0 0
"""


def run_node(folder: Path, faults: dict[str, int], instance: str = INSTANCE, seconds: int = 0) -> tuple[int, str]:
    """Return the exit status and the output of a node whose worker checks its mounts."""
    node, table = folder / "ray-worker", folder / "mounts"
    node.write_text(NODE)
    table.write_text(TABLE)
    worker = WORKER.format(faults=faults, table=str(table), instance=instance, seconds=seconds)
    done = subprocess.run([sys.executable, str(node), worker], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout


def test_node_with_a_dead_mount_is_asked_to_stop(tmp_path: Path) -> None:
    status, output = run_node(tmp_path, {"/mnt/data": errno.ENOTCONN}, seconds=240)
    assert status == 7
    assert "/mnt/data can't be read any longer (Transport endpoint is not connected); this node stops" in output


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {"/mnt/fsx": errno.EIO},
        {"/mnt/data": errno.EACCES},
        {"/mnt/data": errno.ENOENT},
        {"/mnt/fsx": errno.ESTALE},
        {"/home/data": errno.ENOTCONN},
    ],
)
def test_other_faults_leave_the_node(tmp_path: Path, faults: dict[str, int]) -> None:
    status, output = run_node(tmp_path, faults)
    assert (status, output) == (0, "stops: False\n")


def test_other_machine_is_left_alone(tmp_path: Path) -> None:
    status, output = run_node(tmp_path, {"/mnt/data": errno.ENOTCONN}, instance="")
    assert (status, output) == (0, "stops: False\n")
