"""A run as a job of a head: its shown log, its results and its exit status."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_on_ecs.cli.main import main
from tests.commands.head import SECONDS, Head, commands

# Only one rank prints: the lines of several come in any order.
SCRIPT = """
import os, sys
import ray_on_ecs
if os.environ["RANK"] == "1":
    print("\\x1b[31mred\\x1b[0m")
    print("a" * 6_000_000)
    print("to standard error", file=sys.stderr)
else:
    for step in range(1, 5):
        ray_on_ecs.progress(step)
        ray_on_ecs.log(loss=1 / step)
    with open("model.txt", "w") as file:
        file.write("weights")
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with code."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "shown.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def typed(head: Head, code: Path) -> Iterator[Start]:
    """Start `ray-on-ecs` in the head's container."""
    with commands("ray_on_ecs", head.shell, code) as start:
        yield start


@pytest.fixture(scope="module")
def finished(typed: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], Path]:
    """The output and the errors of a command that has run the script, and a copy of the results."""
    copies = tmp_path_factory.mktemp("copies")
    status, out, err = ended(typed("run", "--num-workers=2", "--run-name=shown", f"--fetch={copies}", "shown.py"))
    assert status == 0, out + err
    return out, err, copies / "shown"


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out.splitlines(), err.splitlines()


LOG = (
    r"run      shown",
    r"script   shown\.py",
    r"workers  2 x CPU, 1 CPU thread each",
    r"results  /.*/shown",
    r"\[rank 1\] red",
    r"\[rank 1\] a{60000,} \.\.\. \[5,9\d\d,\d\d\d more characters are not shown\]",
    r"\[rank 1\] to standard error",
    r"finished in \d+ s: step 4, loss 0\.25",
    r"results in /.*/shown: result\.json, report\.html, files/\S+, metrics\.jsonl, curves\.png, tensorboard/\S+",
)


def assert_lines(lines: list[str], *patterns: str) -> None:
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_shown_log_is_complete(
    finished: tuple[list[str], list[str], Path], typed: Start, head: Head, code: Path
) -> None:
    out, err, _ = finished
    assert_lines(out, "run shown is submitted as job shown", *LOG)
    assert_lines(err, f"uploading {code}", ".*")
    assert ended(typed("logs", "shown"))[:2] == (0, out[1:])
    assert ended(typed("logs", "--follow", "--tail", "2", "shown"))[:2] == (0, out[-2:])
    [stored] = (head.storage / "shown" / "logs").iterdir()
    assert stored.read_text().splitlines() == out[1:]


def test_results_are_fetched(finished: tuple[list[str], list[str], Path]) -> None:
    folder = finished[2]
    assert {"result.json", "curves.png", "report.html", "logs"} <= {file.name for file in folder.iterdir()}
    assert (folder / "files" / "model.txt").read_text() == "weights"
    assert "loss" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("finished")
def test_finished_run_is_listed(
    head: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in head.shell.items():
        monkeypatch.setenv(name, value)
    assert main(["runs", "--json"]) == 0
    [run] = [run for run in json.loads(capsys.readouterr().out) if run["name"] == "shown"]
    assert (run["state"], run["step"], run["loss"], run["workers"]) == ("finished", 4, 0.25, 2)


def test_commands_end_with_status_of_the_job(typed: Start) -> None:
    status, out, _ = ended(typed("run", "--num-workers", "1", "--input", "data=nowhere", "shown.py"))
    assert status == 2
    assert_lines(
        out, r"run shown-\S+ is submitted as job shown-\S+", "ray-on-ecs: --input: data=nowhere can't be read.*"
    )
    assert ended(typed("logs", "--follow", out[0].split()[1]))[:2] == (2, out[1:])
