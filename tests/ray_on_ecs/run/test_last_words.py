"""The end of a script's output, as Python, torch and faulthandler write it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_on_ecs.run.last_words import LastWords, read

TORCH = """[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 3, in <module>
[rank0]:     main()
[rank0]: ValueError: this is broken
[rank0]:[W1123 02:19:58 ProcessGroupNCCL.cpp:1553] Warning: destroy_process_group() was not called
"""

RAY = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, TrainController()
Traceback (most recent call last):
  File "pyarrow/error.pxi", line 92, in pyarrow.lib.check_status
OSError: ACCESS_DENIED during PutObject
(RayTrainWorker pid=7) INFO: ended
"""

# Ray Train's report of a lost worker process or node.
LOST = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
ray.train.WorkerGroupError: Training failed due to worker errors:
[Rank 0 Error Snippet]:
A worker health check failed.
Worker info: Worker(
  actor=Actor(RayTrainWorker, 55ac),
)
The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
The actor is dead because its worker process has died. Some common causes include: the OOM killer
"""
LOST_TEXT = (
    "ray.train.WorkerGroupError: The actor is dead because its worker process has died. "
    "Some common causes include: the OOM killer"
)
LOADING = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
RuntimeError: Error(s) in loading state_dict for Linear:
\tsize mismatch for bias: torch.Size([2])
"""
LOADING_TEXT = "RuntimeError: Error(s) in loading state_dict for Linear: size mismatch for bias: torch.Size([2])"


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        (RAY, 1, LastWords("OSError: ACCESS_DENIED during PutObject", "OSError", "pyarrow/error.pxi:92")),
        (
            'Traceback (most recent call last):\n  File "a.py", line 9, in b\nray.exceptions.RayError: lost\n',
            1,
            LastWords("ray.exceptions.RayError: lost", "ray.exceptions.RayError", "a.py:9"),
        ),
        (LOST, 1, LastWords(LOST_TEXT, "ray.train.WorkerGroupError", "train.py:9")),
        (LOADING, 1, LastWords(LOADING_TEXT, "RuntimeError", "train.py:9")),
        (TORCH, 1, LastWords("ValueError: this is broken", "ValueError", "train.py:3")),
        (
            TORCH,
            -signal.SIGKILL,
            LastWords("[W1123 02:19:58 ProcessGroupNCCL.cpp:1553] Warning: destroy_process_group() was not called"),
        ),
        (
            "Traceback (most recent call last):\nrank 2, sum 6\n  File\nkeras.errors.Stop: x\n",
            1,
            LastWords("keras.errors.Stop: x", "keras.errors.Stop"),
        ),
        ("working\n\n", 1, LastWords("working")),
        ("Traceback (most recent call last):\n  File", 1, LastWords("File")),
        ("", 1, LastWords()),
    ],
    ids=[
        "Ray's of another process",
        "Ray's own",
        "a lost worker",
        "a colon",
        "exception",
        "signal",
        "mixed",
        "neither",
        "cut",
        "nothing",
    ],
)
def test_last_output_gives_the_reason(output: str, status: int, expected: LastWords) -> None:
    assert read(output.splitlines(keepends=True), status) == expected


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("nosuch", "nosuch"),
        ("nosuch.train", "'nosuch'"),
        ("nosuch.train.py", "'nosuch'"),
        ("json.nosuch", "json.nosuch"),
        ("json.nosuch.deeper", "'json.nosuch'"),
        ("email", "email.__main__; 'email' is a package and cannot be directly executed"),
    ],
)
def test_module_that_python_can_not_run_is_missing(module: str, missing: str) -> None:
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
    text = f"ModuleNotFoundError: No module named {missing}"
    found = read(["working", *done.stderr.splitlines()], done.returncode)
    assert found == LastWords(text, "ModuleNotFoundError")


@pytest.mark.parametrize(
    ("script", "text", "exception", "line"),
    [
        ("import x_y", "ModuleNotFoundError: No module named 'x_y'", "ModuleNotFoundError", 1),
        ("def f():\n  raise KeyError('a')\nf()", "KeyError: 'a'", "KeyError", 2),
        ("print(\n", "SyntaxError: '(' was never closed", "SyntaxError", 1),
        ("try:\n  1 / 0\nexcept Exception as e:\n  raise OSError(5, 'x') from e", "OSError: [Errno 5] x", "OSError", 4),
        (
            "import ctypes\ndef crash():\n  ctypes.string_at(0)\ncrash()",
            "Fatal Python error: Segmentation fault in string_at (File ",
            None,
            None,
        ),
    ],
    ids=["import", "exception", "syntax", "cause", "crash"],
)
def test_last_output_of_this_python(tmp_path: Path, script: str, text: str, exception: str | None, line: int) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, "-X", "faulthandler", file], capture_output=True, text=True)
    words = read(done.stderr.splitlines(), done.returncode)
    assert words.text.startswith(text)
    assert words.exception == exception
    if line:
        assert words.place == f"{file}:{line}"
    assert "Extension modules" not in words.text
