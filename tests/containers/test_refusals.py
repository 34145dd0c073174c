"""A worker that can't join says why in one line, and stops within a stated time."""

import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raynode import gpus
from raynode.errors import GpuError, HeadError, StartError
from tests.containers.cluster import HEAD_HOST, S3, Cluster
from tests.containers.engine import Engine

WAIT = "8"
# Beside the wait: the container's own start, and one question that stays unanswered.
GRACE_SECONDS = 30
RAY = version("ray")  # of the lock, like the image's
METADATA = f"import importlib.metadata as m; print(m.distribution('ray').locate_file('ray-{RAY}.dist-info/METADATA'))"


def refused(cluster: Cluster, *options: str, grace: float = GRACE_SECONDS, **given: Any) -> tuple[int, str]:
    """Exit status and last line of a worker that must not join, and ends in time."""
    began = time.monotonic()
    with cluster.one_more("worker", "refused", *options, RAY_HEAD_WAIT_S=WAIT, **given) as name:
        status, log = cluster.engine.wait(name)
    assert time.monotonic() - began < float(WAIT) + grace
    assert "Traceback" not in log
    return status, log.strip().splitlines()[-1]


def test_a_wrong_name(cluster: Cluster) -> None:
    status, line = refused(cluster, RAY_HEAD_HOST="hed.ray.internal")
    assert status == HeadError.exit_status
    assert "hed.ray.internal has no address, after 8 s" in line


def test_no_head_behind_the_name(cluster: Cluster) -> None:
    status, line = refused(cluster, RAY_HEAD_HOST=S3)
    assert status == HeadError.exit_status
    assert f"{S3}:8265 does not answer" in line


def test_a_wrong_token(cluster: Cluster) -> None:
    stranger = replace(cluster, engine=Engine(cluster.engine.command, {"RAY_AUTH_TOKEN": "another"}))
    status, line = refused(stranger)
    assert status == StartError.exit_status
    assert f"the head {HEAD_HOST} refuses the token" in line


def test_no_token(cluster: Cluster) -> None:
    nobody = replace(cluster, engine=Engine(cluster.engine.command, {"RAY_AUTH_TOKEN": ""}))
    status, line = refused(nobody)
    assert status == StartError.exit_status
    assert "RAY_AUTH_TOKEN must be set" in line


def test_another_version_of_ray(cluster: Cluster, tmp_path: Path) -> None:
    path = cluster.engine.python(cluster.head, METADATA)
    metadata = cluster.engine.execute(cluster.head, "cat", path).stdout
    older = tmp_path / "METADATA"
    older.write_text(metadata.replace(f"Version: {RAY}", "Version: 0.0.0"))
    older.chmod(0o644)
    tmp_path.chmod(0o755)
    status, line = refused(cluster, f"--volume={older}:{path}:ro")
    assert status == StartError.exit_status
    assert f"the head {HEAD_HOST} runs Ray {RAY} and this node Ray 0.0.0" in line


def test_fewer_gpus_than_promised(cluster: Cluster) -> None:
    status, line = refused(cluster, grace=gpus.PATIENCE_SECONDS, command=("ray-worker", "--num-cpus=1", "--num-gpus=2"))
    assert status == GpuError.exit_status
    assert "the task was promised 2 GPUs and has 0" in line
    assert len(cluster.nodes()) == 3, "it stopped before it joined"
