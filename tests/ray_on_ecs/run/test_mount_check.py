"""The check of mounts before a script starts, in a child of a program with the name of the node's command."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_on_ecs.run.test_gpu_check import INSTANCE, NODE

WORKER = """
import os, threading, time
from pathlib import Path
from ray_on_ecs import logs
from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE
from ray_on_ecs.run import mount_check

faults, stat = {faults}, os.stat

def failing(place, **options):
    if faults.get(place) == "hangs":
        threading.Event().wait()
    if place in faults:
        raise OSError(faults[place], os.strerror(faults[place]))
    return stat("/", **options)

logs.set_up()
os.stat = failing
mount_check.MOUNT_TABLE = Path({table!r})
os.environ.update({{"X": "x"{instance}}})
mount_check.STAT_SECONDS = 0.2
print(f"stops: {{mount_check.stop_node_if_mounts_fail(asks={asks})}}", flush=True)
time.sleep({seconds})
"""
TABLE = """overlay / overlay ro 0 0
/dev/nvme0n1p1 /mnt xfs rw 0 0
mountpoint-s3 /mnt/data fuse ro 0 0
10.0.0.1@tcp:/abc /mnt/fsx lustre rw 0 0
127.0.0.1:/ /mnt/efs nfs4 rw 0 0
mountpoint-s3 /home/data fuse ro 0 0
s3fs /mnt/logs fuse.s3fs ro 0 0
/dev/sda1 /mnt/disk fuseblk rw 0 0
caf\udce9 /mnt/caf\udce9 fuse ro 0 0
"""


def run_node(
    folder: Path, faults: dict[str, object], instance: str = INSTANCE, seconds: int = 0, *, asks: bool = True
) -> tuple[int, str]:
    """Return the exit status and the output of a node whose worker checks its mounts."""
    node, table = folder / "ray-worker", folder / "mounts"
    node.write_text(NODE)
    table.write_text(TABLE, errors="surrogateescape")
    worker = WORKER.format(faults=faults, table=str(table), instance=instance, seconds=seconds, asks=asks)
    done = subprocess.run([sys.executable, str(node), worker], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout


@pytest.mark.parametrize("place", ["/mnt/data", "/mnt/logs"])
def test_node_with_a_dead_mount_is_asked_to_stop(tmp_path: Path, place: str) -> None:
    status, output = run_node(tmp_path, {place: errno.ENOTCONN}, seconds=240)
    assert status == 7
    assert f"{place} can't be read any longer (Transport endpoint is not connected); this node stops" in output


def test_mount_that_hangs_hides_no_dead_one(tmp_path: Path) -> None:
    status, output = run_node(tmp_path, {"/mnt/data": "hangs", "/mnt/logs": errno.ENOTCONN}, seconds=240)
    assert status == 7
    assert "/mnt/logs can't be read any longer" in output


def test_one_worker_asks_the_node_to_stop(tmp_path: Path) -> None:
    status, output = run_node(tmp_path, {"/mnt/data": errno.ENOTCONN}, asks=False)
    assert (status, output) == (0, "stops: True\n")


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {"/mnt/data": errno.EIO},
        {"/mnt/data": errno.EACCES},
        {"/mnt/data": errno.ENOENT},
        {"/mnt/data": errno.ETIMEDOUT},
        {"/mnt/data": "hangs"},
        *({place: "hangs"} for place in ("/mnt", "/mnt/fsx", "/mnt/efs", "/mnt/disk", "/home/data")),
        *({place: errno.ENOTCONN} for place in ("/mnt/fsx", "/mnt/efs", "/home/data")),
    ],
)
def test_other_faults_leave_the_node(tmp_path: Path, faults: dict[str, object]) -> None:
    status, output = run_node(tmp_path, faults)
    assert (status, output) == (0, "stops: False\n")


def test_other_machine_is_left_alone(tmp_path: Path) -> None:
    status, output = run_node(tmp_path, {"/mnt/data": errno.ENOTCONN}, instance="")
    assert (status, output) == (0, "stops: False\n")
