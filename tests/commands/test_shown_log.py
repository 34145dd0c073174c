"""The shown log of a run: as a job, by its driver, and afterwards."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands.head import ON_HEAD, SECONDS, Head, commands

SCRIPT = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("\\x1b[31mred\\x1b[0m")
    print("a" * 6_000_000)
    print("to standard error", file=sys.stderr)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "shown.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def typed(environment: dict[str, str], head: Head, code: Path) -> Iterator[Start]:
    """Start `ray-on-ecs`, on the head of the tests."""
    variables = {**environment, **head.variables, "RAY_API_SERVER_ADDRESS": head.dashboard, **ON_HEAD}
    with commands("ray_on_ecs", variables, code) as start:
        yield start


@pytest.fixture
def driver(environment: dict[str, str], head: Head, code: Path) -> Iterator[Start]:
    """Start the driver on the head of the tests."""
    with commands("ray_on_ecs.run", {**environment, **head.variables}, code) as start:
        yield start


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out.splitlines(), err.splitlines()


def lines_of(run: str) -> list[str]:
    return [
        rf"run      {run}",
        r"script   shown\.py",
        r"workers  2 x CPU, 1 CPU threads each",
        rf"results  /.*/{run}",
        r"\[rank 1\] red",
        r"\[rank 1\] a{60000,} \.\.\. \[5,9\d\d,\d\d\d more characters are not shown\]",
        r"\[rank 1\] to standard error",
        r"finished in \d+ s",
        rf"results in /.*/{run}: result\.json, report\.html",
    ]


def assert_lines(lines: list[str], *patterns: str) -> None:
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_shown_log_is_complete(typed: Start, driver: Start, head: Head, code: Path) -> None:
    run = ("--num-workers", "2", "--run-name", "shown", "shown.py")
    status, out, err = ended(typed("run", *run))
    assert_lines(out, "run shown is submitted as job shown", *lines_of("shown"))
    copies = "ray-on-ecs fetch shown copies it to this machine"
    assert err == [f"uploading {code}", f"ray-on-ecs open shown shows its report, {copies}"]
    assert status == 0
    assert ended(typed("logs", "shown"))[:2] == (0, out[1:])
    assert ended(typed("logs", "--follow", "--tail", "2", "shown"))[:2] == (0, out[-2:])
    [stored] = (head.storage / "shown" / "logs").iterdir()
    assert stored.read_text().splitlines() == out[1:]
    status, out, err = ended(driver("--num-workers", "2", "--run-name", "driver", "shown.py"))
    assert_lines(out, *lines_of("driver"))
    assert (status, err) == (0, [])


def test_commands_end_with_status_of_the_job(typed: Start) -> None:
    status, out, _ = ended(typed("run", "--num-workers", "1", "--input", "data=nowhere", "shown.py"))
    assert status == 2
    assert_lines(
        out, r"run shown-\S+ is submitted as job shown-\S+", "ray-on-ecs: --input: data=nowhere can't be read.*"
    )
    assert ended(typed("logs", "--follow", out[0].split()[1]))[:2] == (2, out[1:])
