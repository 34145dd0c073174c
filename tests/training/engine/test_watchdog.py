"""A hung process ends itself: processes of their own, as the watchdog's last resort is to exit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECONDS = 180

# A process that trains, and then does what the test says. ctypes.PyDLL keeps the interpreter's lock while it calls.
PROCESS = """
import ctypes, sys, threading, time
from pathlib import Path
from training.engine.watchdog import Watchdog

def hang_in_python():
    threading.Event().wait()

def hang_in_c():
    ctypes.PyDLL(None).pause()

def work_slowly():
    for _ in range(10):
        time.sleep(0.6)
        watchdog.heartbeat()

def load():
    with watchdog.patience(100):
        time.sleep(6)

def fail():
    raise ValueError("broken")

with Watchdog(float(sys.argv[3]), Path(sys.argv[1]), {"rank": 3}) as watchdog:
    watchdog.heartbeat()
    globals()[sys.argv[2]]()
"""


def ended(file: Path, way: str, timeout: float = 4.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROCESS, str(file), way, str(timeout)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize("way", ["hang_in_python", "hang_in_c"])
def test_a_process_that_hangs_leaves_its_stacks_and_exits(way: str, tmp_path: Path) -> None:
    file = tmp_path / "runs" / "rank.txt"
    assert ended(file, way, timeout=1.0).returncode == 1
    about, _, stacks = file.read_text().partition("\n")
    assert json.loads(about) == {"rank": 3}, "whoever collects the file knows whose it is"
    assert f"in {way}" in stacks, "the line that hangs"


@pytest.mark.parametrize("way", ["work_slowly", "load"])
def test_a_process_that_works_is_left_alone(way: str, tmp_path: Path) -> None:
    file = tmp_path / "rank.txt"
    done = ended(file, way)
    assert done.returncode == 0, done.stderr
    assert not file.exists(), "there is nothing to tell"


def test_an_error_is_reported_as_such(tmp_path: Path) -> None:
    done = ended(tmp_path / "rank.txt", "fail")
    assert "ValueError: broken" in done.stderr
    assert json.loads((tmp_path / "rank.txt").read_text()) == {"rank": 3}, "whose log to look at"
