"""Examples on a head and two workers with an S3 continue after a rank is killed in the middle.

(tests/commands/test_launch.py tests ddp_snapshot.py.)

Each node installs the example's packages, so this needs an index of packages.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.aws import BUCKET
from tests.disturbed_run import END_SECONDS
from tests.local_cluster import REPOSITORY, LocalCluster, kill_tree
from tests.waiting import until

WORKERS = 2
EXAMPLES = REPOSITORY / "examples"
PAUSE_SECONDS = 30.0
STORAGE = f"s3://{BUCKET}/examples"


class Example(NamedTuple):
    """A file of examples/, or of the folder in its flags.

    Attributes:
        flags: The flags of `python -m ray_on_ecs.run`, after which the script's name comes.
        arguments: The script's flags.
        reached: Output of rank 0 in the middle, when a rank is killed.
        resumed: Output of a start from a checkpoint.
        last: Output at its end.
        kept: A file of the run.
        stored: A file that must exist before the rank is killed.
    """

    flags: Sequence[str]
    arguments: Sequence[str]
    reached: str
    resumed: str
    last: str
    kept: str
    stored: str = ""


def needs(name: str) -> tuple[str, str]:
    return "--requirements", str(EXAMPLES / f"{name}.txt")


SCRIPTS = {
    "accelerate_loop.py": Example(
        needs("accelerate"), ("--epochs=40",), "epoch 5:", "resuming at epoch", "epoch 39:", "files/newest"
    ),
    "ddp_checkpointer.py": Example(
        (),
        ("--epochs=40",),
        "epoch 5:",
        "resuming at epoch",
        "epoch 39:",
        "model.safetensors",
        stored="checkpoints/*/checkpoint.json",
    ),
    "lightning_fit.py": Example(
        needs("lightning"), ("--epochs=40",), "epoch 5:", "resuming at epoch", "epoch 39:", "files/last.ckpt"
    ),
    "mpi_pi.py": Example(
        ("--mpi", *needs("mpi")), ("--rounds=500",), "round 5:", "resuming at round", "round 499:", "files/sums.json"
    ),
    "tensorflow_workers.py": Example(
        needs("tensorflow"), ("--epochs=40",), "epoch 5:", "resuming at epoch", "epoch 39:", "files/rank-0/checkpoint"
    ),
    "image_classifier.py": Example(
        ("--working-dir", str(REPOSITORY / "training")),
        ("--data=digits", "--samples=256", "--epochs=8"),
        "epoch 3/",
        "resuming after step",
        "epoch 8/",
        "model.safetensors",
        stored="checkpoints/*/checkpoint.json",
    ),
}


@pytest.fixture(scope="module")
def cluster(price_variables: dict[str, str]) -> Iterator[LocalCluster]:
    with LocalCluster(WORKERS, {**price_variables, "PYTHONUNBUFFERED": "1"}) as cluster:
        yield cluster


class Bucket:
    """The files below the storage path."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def has(self, name: str) -> bool:
        """Return whether there is a file whose name begins and ends as this one does, with anything for its `*`."""
        first, _, last = name.partition("*")
        listed = self._client.list_objects_v2(Bucket=BUCKET, Prefix=f"examples/{first}").get("Contents", [])
        return any(each["Key"].endswith(last) for each in listed)

    def read(self, name: str) -> bytes:
        return self._client.get_object(Bucket=BUCKET, Key=f"examples/{name}")["Body"].read()


@pytest.fixture
def bucket(s3_client: Any) -> Bucket:
    return Bucket(s3_client)


def processes_of(cluster: LocalCluster, script: str) -> list[psutil.Process]:
    """Return the script's own processes on all nodes, by rank."""
    found: dict[str, psutil.Process] = {}
    for node in cluster.workers:
        for process in cluster.worker_processes(node, script):
            with suppress(psutil.Error):
                rank = process.environ().get("PMIX_RANK") or process.environ().get("RANK")
                if rank is not None and "supervisor.py" not in " ".join(process.cmdline()):
                    found.setdefault(rank, process)
    return [found[rank] for rank in sorted(found)]


def pause_until(condition: Callable[[], bool], processes: Sequence[psutil.Process]) -> None:
    """Stop processes until their files are stored; repeat this if they were in the middle of a write."""
    while True:
        for process in processes:
            process.suspend()
        with suppress(TimeoutError):
            until(condition, PAUSE_SECONDS)
            return
        for each in processes:
            each.resume()
        time.sleep(0.3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_resumes_after_a_rank_is_killed(
    cluster: LocalCluster, tmp_path: Path, bucket: Bucket, script: str
) -> None:
    example, name, log = SCRIPTS[script], script.replace(".", "-"), tmp_path / "log"
    run = ("--storage-path", STORAGE, "--run-name", name, "--num-workers", str(WORKERS), "--max-restarts", "1")
    folder = ("--device", "cpu", "--working-dir", str(EXAMPLES))  # the nodes lack the GPUs of the stack
    with log.open("wb") as output:
        command = cluster.start_training(*run, *folder, *example.flags, script, *example.arguments, log=output)

    def is_in_the_middle() -> bool:
        return example.reached in log.read_text() and (not example.stored or bucket.has(f"{name}/{example.stored}"))

    try:
        until(lambda: is_in_the_middle() or command.poll() is not None, END_SECONDS, log.read_text)
        assert command.poll() is None, log.read_text()
        ranks = processes_of(cluster, script)
        assert len(ranks) == WORKERS, ranks
        if example.kept.startswith("files/"):
            pause_until(lambda: bucket.has(f"{name}/files.json"), ranks)
        ranks[1].kill()
        ranks[0].resume()
        until(lambda: command.poll() is not None, END_SECONDS, log.read_text)
    finally:
        kill_tree(command.pid)
        command.wait()
    said = log.read_text()
    assert command.returncode == 0, said
    assert "; restarting" in said
    assert example.resumed in said, said
    assert example.last in said, said
    result = json.loads(bucket.read(f"{name}/result.json"))
    assert result["hardware"]["workers"] == WORKERS
    assert 1 < result["cost"]["usd"] <= WORKERS * result["times"]["total_seconds"]
    assert bucket.read(f"{name}/{example.kept}")
    assert not processes_of(cluster, script)
