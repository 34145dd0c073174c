"""Native crashes at the end of a script's output, as faulthandler, C++ and NCCL write them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_on_ecs.run.last_words import LastWords, read
from ray_on_ecs.run.mpi import launcher as mpi

WAITING = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
KERNEL = "import ctypes\ndef kernel(): ctypes.string_at(0)\n"


@pytest.mark.parametrize(
    "script",
    [
        f"{WAITING}{KERNEL}kernel()",
        f"{WAITING * 2}{KERNEL}kernel()",
        f"{WAITING}{KERNEL}print(' 30%|###   | 3/10 [00:00<00:01]', end='', flush=True)\nkernel()",
        f"{KERNEL}import threading, time\nthreading.Thread(target=kernel).start()\ntime.sleep(60)",
    ],
    ids=["beside a thread", "beside threads", "after a bar", "in a thread"],
)
def test_crash_is_named_by_the_thread_that_crashed(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-X", "faulthandler", tmp_path / "train.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for status in (done.returncode, 128 - done.returncode):
        words = read(done.stdout.splitlines(), status)
        assert words.text.startswith("Fatal Python error: Segmentation fault in string_at (File ")
        assert (words.exception, words.is_mistake) == (None, False)


STACKS = """Fatal Python error: {}

Thread 0x00007f51408b96c0 (most recent call first):
  File "threading.py", line 327 in wait
  File "ray_on_ecs/flight_recorder.py", line 60 in run

{}0x00007f514145ab80 (most recent call first):
  File "torch/autograd/graph.py", line 823 in backward
  File "train.py", line 3 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 30)
"""
CUDA = "CUDA error: an illegal memory access was encountered"
NCCL = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600013 milliseconds"
)
FRAMES = "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:635 (most recent call first):\n" + "".join(
    f"frame #{number}: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f in /x/libc10.so)\n" for number in range(20)
)


def terminate(text: str) -> str:
    return f"terminate called after throwing an instance of 'c10::Error'\n  what():  {text}\n{FRAMES}"


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (terminate(CUDA), CUDA),
        (terminate(CUDA) + STACKS.format("Aborted", "Thread "), CUDA),
        (terminate(CUDA) + STACKS.format("Aborted", "Current thread "), CUDA),
        (f"[rank0]:[E1127 12:00:00 ProcessGroupNCCL.cpp:632] {NCCL}\n{FRAMES}{terminate(NCCL)}", NCCL),
        (terminate("first") + terminate(CUDA) + STACKS.format("Aborted", "Thread "), CUDA),
        (f" 5%|# | 5/100{terminate(CUDA)}", CUDA),
        (f"{terminate(CUDA)}train.sh: line 1: 12 Aborted (core dumped) python train.py\n", CUDA),
        ("terminate called without an active exception\n" + STACKS.format("Aborted", "Thread "), "terminate called wi"),
    ],
)
@pytest.mark.parametrize("status", [-signal.SIGABRT, 128 + signal.SIGABRT])
def test_exception_of_cpp_is_named_and_not_a_stack(output: str, text: str, status: int) -> None:
    words = read(output.splitlines(), status)
    assert words.text.startswith(f"C++ exception: {text}")
    assert words.exception is None


@pytest.mark.parametrize("status", [-signal.SIGSEGV, 128 + signal.SIGSEGV])
@pytest.mark.parametrize("thread", ["Thread ", "Current thread "])
def test_crash_of_torch_is_named_by_its_frame(thread: str, status: int) -> None:
    output = STACKS.format("Segmentation fault", thread)
    text = 'Fatal Python error: Segmentation fault in backward (File "torch/autograd/graph.py", line 823)'
    assert read(output.splitlines(), status) == LastWords(text, place="torch/autograd/graph.py:823")
    assert mpi.last_words(f"{output}{NOTICE}".splitlines(keepends=True), abs(status) % 128 + 128).text == text


NOTICE = """--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 3 on node node-1 exited on
signal 11 (Segmentation fault).
--------------------------------------------------------------------------
"""


def test_thread_without_python_has_no_frame() -> None:
    output = STACKS.format("Segmentation fault", "Thread ").replace(
        "\n\nThread", "\n\nCurrent thread 0x01 (most recent call first):\n  <no Python frame>\n\nThread", 1
    )
    assert read(output.splitlines(), -11).text == "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize("crash", [terminate(CUDA), STACKS.format("Segmentation fault", "Current thread ")])
@pytest.mark.parametrize("status", [-signal.SIGKILL, 128 + signal.SIGKILL, 1])
def test_crash_long_before_does_not_explain_the_end(crash: str, status: int) -> None:
    output = crash + "".join(f"step {number}\n" for number in range(60))
    assert read(output.splitlines(), status) == LastWords("step 59")
