"""Metrics are not taken from the lines of a traceback, however it is printed, and are from the lines around it."""

import subprocess
import sys

import pytest

from ray_on_ecs.run.metrics import MetricsLog

# Programs whose source lines and exceptions look like metrics.
PROGRAMS = {
    "expression": "step = -1\nloss=1 / (step + 1)",
    "exception": "x = 7\nraise ValueError(f'loss={x}')",
    "assertion": "x = 7\nassert x < 5, f'loss=7'",
    "several lines": "x = dict(\n  loss=1 / 0,\n  more=2,\n)",
    "chained": "try:\n  loss=1 / 0\nexcept ZeroDivisionError as e:\n  raise RuntimeError('loss=7') from e",
    "while handling": "try:\n  loss=1 / 0\nexcept ZeroDivisionError:\n  loss=2 / 0",
    "recursion": "def f(loss=1):\n  f(loss=1)\nf()",
    "group": "raise ExceptionGroup('loss=7', [ValueError('loss=8'), TypeError('loss=9')])",
    "own exception": "class Diverged(Exception): pass\nraise Diverged('loss=7')",
    "syntax": "exec(compile('loss=1 /', 'loss=3.py', 'exec'))",
    "printed": "import traceback\ntry:\n  loss=1 / 0\nexcept Exception:\n  traceback.print_exc()",
    "stack": "import traceback\ndef f(loss): traceback.print_stack()\nf(loss=1 )",
    "logged": "import logging\ntry:\n  loss=1 / 0\nexcept Exception:\n  logging.exception('failed')",
    "warning": "import warnings\nwarnings.warn('x') ; loss=1",
}
PREFIXES = ["", "[rank0]: ", "[default0]:", "(Trainer pid=12, ip=10.0.0.1) ", "\x1b[36m(Trainer pid=12)\x1b[0m "]
RICH = """\
╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /code/train.py:2 in <module>                                                 │
│ ❱ 2     loss=1 / 0                                                           │
╰──────────────────────────────────────────────────────────────────────────────╯
ZeroDivisionError: division by zero
"""


def logs() -> list[MetricsLog]:
    """Return a log without patterns, which guesses, and one with them."""
    return [MetricsLog({}), MetricsLog({"loss": r"loss=(\S+)"})]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of each program."""
    folder = tmp_path_factory.mktemp("programs")
    found = {"rich": RICH}
    for number, (name, program) in enumerate(PROGRAMS.items()):
        file = folder / f"program{number}.py"
        file.write_text(program)
        done = subprocess.run([sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert "loss" in done.stdout
        found[name] = done.stdout
    return found


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", [*PROGRAMS, "rich"])
def test_traceback_has_no_metrics(output: dict[str, str], name: str, prefix: str) -> None:
    for log in logs():
        for line in output[name].splitlines(keepends=True):
            log.read_line(prefix + line)
        assert log.records == []
        assert not log.guess


@pytest.mark.parametrize("line", ["loss=0.5", "  loss=0.5", "step 3: loss=0.5", "[rank0]: loss=0.5"])
@pytest.mark.parametrize("name", [*PROGRAMS, "rich"])
def test_line_after_a_traceback_is_read(output: dict[str, str], name: str, line: str) -> None:
    guesses, reads = logs()
    for log in (guesses, reads):
        for each in [*output[name].splitlines(keepends=True), f"{line}\n"]:
            log.read_line(each)
    assert guesses.guess
    assert guesses.guess["loss"] == 0.5
    assert [record["loss"] for record in reads.records] == [0.5]


@pytest.mark.parametrize(
    "line",
    ["Error: loss=0.5", "no error; loss=0.5", "  loss=0.5", 'File "a", line 3: loss=0.5', "ValueError: loss=0.5"],
)
def test_line_without_a_traceback_is_read(line: str) -> None:
    for log in logs():
        log.read_line(line)
        assert log.records or log.guess


def test_line_of_another_process_within_a_traceback_is_read(output: dict[str, str]) -> None:
    """mpirun's output has the lines of all ranks."""
    log = MetricsLog({"loss": r"loss=(\S+)"})
    lines = output["expression"].splitlines(keepends=True)
    for each in [lines[0], "step 3 loss=0.5\n", *lines[1:]]:
        log.read_line(each)
    assert [record["loss"] for record in log.records] == [0.5]


@pytest.mark.parametrize(
    "line", ['{"msg": "Traceback (most recent call last):\\n  File"}', "see Traceback (most recent call last): above"]
)
def test_mention_of_a_traceback_hides_nothing(line: str) -> None:
    log = MetricsLog({"loss": r"loss=(\S+)"})
    for each in (line, " 10%|# | loss=0.5", "  20%|## | loss=0.4", "done: loss=0.3"):
        log.read_line(f"{each}\n")
    assert [record["loss"] for record in log.records] == [0.5, 0.4, 0.3]


def test_traceback_that_is_cut_off_ends_with_its_start() -> None:
    log = MetricsLog({"loss": r"loss=(\S+)"})
    log.read_line("Traceback (most recent call last):\n")
    log.restart()
    log.read_line("  loss=0.5\n")
    assert [record["loss"] for record in log.records] == [0.5]
