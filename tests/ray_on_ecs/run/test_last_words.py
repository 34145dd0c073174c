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
        # The outputs of Open MPI's processes are mixed.
        (
            'step 1\n Traceback (most recent call last):\n  File "a.py", line 9, in b\nValueError: broken\n-----\n'
            "prterun has exited due to process rank 3.\nterminated by signals sent by prterun.\n-----\n",
            1,
            LastWords("ValueError: broken", "ValueError", "a.py:9"),
        ),
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
        "after a space",
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
    "before",
    [
        "Token: ",
        "Go on? [y/n] ",
        "step 1 ",
        "loss 0.5",
        ".....",
        "epoch 1 -",
        " 50%|###  | 5/10 [00:01<00:01, 4.9it/s]",
        "\x1b[0m",
        "\x1b[?25h",
        "\u8bad\u7ec3 ",
    ],
)
def test_traceback_after_text_without_a_newline(before: str) -> None:
    lines = [f"{before}Traceback (most recent call last):", '  File "a.py", line 9, in b', "lib.Stop: x", "ended"]
    assert read(lines, 1) == LastWords("lib.Stop: x", "lib.Stop", "a.py:9")
    assert read([*lines[:1], *lines[3:]], 1) == LastWords("ended")  # the text alone is not a traceback


GROUPS = [
    "raise ExceptionGroup('several', [KeyError('rate')])",
    "raise ExceptionGroup('several', [OSError('lost'), KeyError('rate')])",
    "raise ExceptionGroup('outer', [ExceptionGroup('inner', [KeyError('rate')])])",
    "try:\n  1 / 0\nexcept Exception as error:\n  raise ExceptionGroup('several', [KeyError('rate')]) from error",
    "try:\n  raise ExceptionGroup('several', [OSError(), KeyError('rate')])\nexcept* OSError:\n  pass",
    "import asyncio\nasync def f():\n  {}['rate']\nasync def main():\n  async with asyncio.TaskGroup() as group:\n"
    "    group.create_task(f())\nasyncio.run(main())",
]


@pytest.mark.parametrize("script", GROUPS)
def test_exception_group_is_the_last_of_its_exceptions(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    ended = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True, check=False)
    words = read(ended.stderr.splitlines(), ended.returncode)
    assert (words.text, words.exception) == ("KeyError: 'rate'", "KeyError")


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
    words = read(["working", *done.stderr.splitlines()], done.returncode)
    assert words == LastWords(text, "ModuleNotFoundError")


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


RUN = "import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[1:]], check=True)"
CRASH = "import ctypes\nctypes.string_at(0)"


@pytest.mark.parametrize(
    ("parent", "child", "text", "exception", "is_mistake"),
    [
        (RUN, "{}['rate']", "KeyError: 'rate'", "KeyError", False),
        (RUN.replace("run(", "check_call(").replace(", check=True", ""), "{}['a']", "KeyError: 'a'", "KeyError", False),
        (RUN, "nothing", "NameError: name 'nothing' is not defined", "NameError", False),
        (RUN, "print(", "SyntaxError: '(' was never closed", "SyntaxError", False),
        (RUN, "from argparse import *\nArgumentParser().parse_args(['-x'])", "child.py: error: unrecog", None, True),
        (RUN, CRASH, "Fatal Python error: Segmentation fault in string_at (File ", None, False),
        (RUN, "raise SystemExit(3)", "subprocess.CalledProcessError: Command ", "subprocess.CalledProcessError", False),
        (RUN, "input()", "EOFError: EOF when reading a line (a run has no standard input)", "EOFError", True),
        (
            "import logging\ntry:\n  import nosuch\nexcept ImportError:\n  logging.exception('optional')\n"
            f"print('working\\n' * 20)\n{RUN}",
            "raise SystemExit(1)",
            "subprocess.CalledProcessError: Command ",
            "subprocess.CalledProcessError",
            False,
        ),
        (
            "import concurrent.futures, ctypes\nif __name__ == '__main__':\n"
            "  concurrent.futures.ProcessPoolExecutor(1).submit(ctypes.string_at, 0).result()",
            "",
            "Fatal Python error: Segmentation fault in string_at",
            None,
            False,
        ),
        (
            "import multiprocessing, operator\nif __name__ == '__main__':\n"
            "  multiprocessing.Pool(1).map(operator.itemgetter('a'), [{}])",
            "",
            "KeyError: 'a'",
            "KeyError",
            False,
        ),
        ("breakpoint()\nprint()", "", "bdb.BdbQuit (a run has no standard input)", "bdb.BdbQuit", True),
        ("input('go? ')", "", "EOFError: EOF when reading a line (a run", "EOFError", True),
        ("import click\nclick.confirm('go')", "", "click.exceptions.Abort (a run", "click.exceptions.Abort", True),
    ],
)
def test_error_of_a_child_process(
    tmp_path: Path, parent: str, child: str, text: str, exception: str | None, is_mistake: bool
) -> None:
    (tmp_path / "train.py").write_text(parent)
    (tmp_path / "child.py").write_text(child)
    done = subprocess.run(
        [sys.executable, "-u", "-X", "faulthandler", "train.py", "-X", "faulthandler", "child.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    words = read(done.stdout.splitlines(), done.returncode)
    assert words.text.startswith(text)
    assert (words.exception, words.is_mistake) == (exception, is_mistake)


ELASTIC = """E1127 12:00:00.000000 1234 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1)
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 1)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 1
============================================================
"""
CHILD = """Traceback (most recent call last):
  File "child.py", line 3, in <module>
KeyError: 'rate'
"""
ELASTIC_ERROR = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
SPAWN = f"""Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 0 terminated with the following error:
{CHILD}
"""
DEEPSPEED = f"""{CHILD}
[2026-11-27 12:00:00,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 123
[2026-11-27 12:00:00,000] [ERROR] [launch.py:325:sigkill_handler] ['python', 'child.py'] exits with return code = 1
"""
HYDRA = f"""Error executing job with overrides: ['trainer=ddp']
{CHILD}
Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""
PYTEST = """=========================== short test summary info ============================
FAILED test_a.py::test_a - KeyError: 'rate'
============================== 1 failed in 0.12s ===============================
"""
LOADER = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "child.py", line 3, in __getitem__
KeyError: 'rate'
"""
RICH = """╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /a/child.py:3 in <module>                                                    │
╰──────────────────────────────────────────────────────────────────────────────╯
KeyError: 'rate'
"""


@pytest.mark.parametrize("output", [CHILD + ELASTIC, SPAWN, DEEPSPEED, HYDRA, LOADER, RICH, PYTEST])
def test_error_below_the_report_of_a_launcher(output: str) -> None:
    words = read(output.splitlines(), 1)
    assert words.text.endswith("KeyError: 'rate'")
    assert words.exception == "KeyError"


def test_launcher_alone_names_the_end_of_its_child() -> None:
    text = f"{ELASTIC_ERROR}: Signal 9 (SIGKILL) received by PID 1"
    assert read(ELASTIC.splitlines(), 1).text == text
    assert read((CHILD + "working\n" * 20 + ELASTIC).splitlines(), 1).text == text


def test_folder_that_python_can_not_run_is_a_mistake() -> None:
    words = read(["/usr/bin/python3: can't find '__main__' module in '/a'"], 1)
    assert words.is_mistake
    assert words.text == "can't find '__main__' module in '/a'"


HYDRA_END = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."


@pytest.mark.parametrize(
    ("output", "text", "is_mistake"),
    [
        (
            f"Could not override 'a'.\nKey 'a' is not in struct\n    full_key: a\n{HYDRA_END}",
            "Key 'a' is not in struct",
            True,
        ),
        (
            f"Cannot find primary config 'b'.\n\nConfig search path:\n\tprovider=hydra\n{HYDRA_END}",
            "Cannot find primary config 'b'.",
            True,
        ),
        (
            "Usage: t.py\n╭─ Error ──────────╮\n│ No such option: --x │\n╰──────────────────╯",
            "No such option: --x",
            False,
        ),
        (
            "ERROR: Could not consume arg: --x\nUsage: t.py\n\nFor more information, run:\n  t.py --help",
            "ERROR: Could not consume arg: --x",
            False,
        ),
        (
            "usage: t.py [-h]\nt.py: error: unrecognized arguments: --x",
            "t.py: error: unrecognized arguments: --x",
            False,
        ),
        (
            "error: of an earlier part: it is tried again\n" + "line\n" * 20 + "--lr is missing",
            "--lr is missing",
            False,
        ),
    ],
)
def test_wrong_flag_of_other_libraries(output: str, text: str, is_mistake: bool) -> None:
    words = read(output.splitlines(), 1 if HYDRA_END in output else 2)
    assert words == LastWords(text, is_mistake=is_mistake)


def test_password_that_is_asked_for_is_a_mistake() -> None:
    frames = [f'  File "{name}", line 1, in f' for name in ("train.py", "/usr/lib/python3.11/getpass.py")]
    header = "Traceback (most recent call last):"
    words = read([f"Token: {header}", *frames, "EOFError"], 1)
    assert (words.text, words.is_mistake) == ("EOFError (a run has no standard input)", True)
    assert not read([header, frames[0], "EOFError"], 1).is_mistake  # such as a process at the end of a pipe


MAIN = "raise RuntimeError('NCCL error')"
NOISY = {
    "__del__": f"class Loader:\n  def __del__(self): self.workers.stop()\nloader = Loader()\n{MAIN}",
    "atexit": f"import atexit\natexit.register(lambda: [].stop)\n{MAIN}",
    "flush": "import sys\nclass Pipe:\n  def write(self, text): pass\n  def flush(self): raise OSError\n"
    f"sys.stdout = Pipe()\n{MAIN}",
    "thread": "import threading, time\ndef read():\n  time.sleep(0.3)\n  {}['a']\n"
    f"threading.Thread(target=read).start()\n{MAIN}",
    "chain of a thread": "import threading, time\ndef read():\n  time.sleep(0.3)\n  try: {}['a']\n"
    f"  except KeyError: [].stop\nthreading.Thread(target=read).start()\n{MAIN}",
    "task": "import asyncio\nasync def read(): {}['a']\nasync def main():\n  task = asyncio.create_task(read())\n"
    "  await asyncio.sleep(0)\n  raise RuntimeError('NCCL error')\nasyncio.run(main())",
    "callback": "import asyncio\nasync def main():\n  asyncio.get_running_loop().call_soon(lambda: {}['a'])\n"
    "  await asyncio.sleep(0.1)\n  raise RuntimeError('NCCL error')\nasyncio.run(main())",
    "warning": f"import warnings\ntry:\n  {MAIN}\nfinally:\n  __import__('atexit').register(warnings.warn, 'leak')",
}


@pytest.mark.parametrize("script", NOISY.values(), ids=NOISY)
def test_noise_after_the_traceback_does_not_explain_the_end(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    ended = subprocess.run([sys.executable, tmp_path / "train.py"], stderr=subprocess.PIPE, text=True, check=False)
    words = read(ended.stderr.splitlines(), ended.returncode)
    assert (words.text, words.exception) == ("RuntimeError: NCCL error", "RuntimeError")


IGNORED = """Exception ignored in: <function Loader.__del__ at 0x7fb205e147c0>
Traceback (most recent call last):
  File "loader.py", line 3, in __del__
AttributeError: 'Loader' object has no attribute 'workers'
"""
IN_THREAD = """Exception in thread Thread-1 (read):
Traceback (most recent call last):
  File "threading.py", line 1045, in _bootstrap_inner
  File "child.py", line 4, in read
KeyError: 'rate'
"""
NOISE = [
    IGNORED,
    IGNORED.replace("ignored in", "ignored in atexit callback"),
    IGNORED.replace("Exception ignored in: ", "Error in atexit._run_exitfuncs:"),
    "Exception ignored in: <_io.TextIOWrapper name='<stdout>'>\nBrokenPipeError: [Errno 32] Broken pipe\n",
    IGNORED
    + "\nDuring handling of the above exception, another exception occurred:\n\n"
    + "".join(IGNORED.splitlines(keepends=True)[1:]),
    "/usr/lib/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects\n"
    "  warnings.warn('resource_tracker: There appear to be %d '\n",
    "<frozen runpy>:128: RuntimeWarning: 'a' found in sys.modules\n",
    "Traceback (most recent call last):\n"
    '  File "/usr/lib/python3.11/multiprocessing/resource_tracker.py", line 239, in main\n'
    "    cache[rtype].remove(name)\nKeyError: '/psm_1'\n",
    "[rank0]:[W1123 02:19:58.1 ProcessGroupNCCL.cpp:1553] Warning: destroy_process_group() was not called\n",
    "wandb:\nwandb: View run exp at: https://wandb.ai/x/y/runs/z\nwandb: Find logs at: wandb/run-2026/logs\n",
]


@pytest.mark.parametrize("noise", NOISE)
def test_noise_after_a_text_does_not_explain_the_end(noise: str) -> None:
    assert read(f"step 3\nthe data set is empty\n{noise}".splitlines(), 1) == LastWords("the data set is empty")
    assert read(f"{CHILD}{noise}{noise}".splitlines(), 1) == LastWords("KeyError: 'rate'", "KeyError", "child.py:3")
    assert read(noise.splitlines(), 1).text  # without another line


def test_error_of_wandb_is_not_noise() -> None:
    error = "wandb: ERROR api_key not configured (no-tty)"
    assert read(["step 3", error], 1) == LastWords(error)


def test_traceback_of_a_thread_alone_explains_the_end() -> None:
    words = LastWords("KeyError: 'rate'", "KeyError", "child.py:4")
    assert read(f"step 3\n{IN_THREAD}the reader has ended\n".splitlines(), 1) == words
    assert read(f"{IN_THREAD}{CHILD.replace('rate', 'a')}".splitlines(), 1).text == "KeyError: 'a'"
    assert read(f"{CHILD.replace('rate', 'a')}{IN_THREAD * 20}".splitlines(), 1).text == "KeyError: 'a'"


OF_SUBPROCESS = "subprocess.CalledProcessError"
STEPS = "".join(f"INFO step {number}\n" for number in range(60))


@pytest.mark.parametrize(
    "handled",
    [CHILD, RICH, IN_THREAD, f"{CHILD}flash attention is off\n", CHILD * 2, CHILD.replace("KeyError", OF_SUBPROCESS)],
)
@pytest.mark.parametrize("status", [1, 3, 75])
def test_handled_traceback_does_not_explain_a_later_end(handled: str, status: int) -> None:
    assert read(f"{handled}{STEPS}no data\n".splitlines(), status) == LastWords("no data")
    assert read(f"{handled}{STEPS}Error: no data\n".splitlines(), status) == LastWords("Error: no data")
    later = CHILD.replace("rate", "size")
    assert read(f"{handled}{STEPS}{later}".splitlines(), status).text == "KeyError: 'size'"
    near = LastWords("KeyError: 'size'", "KeyError", "child.py:3")
    assert read(f"{later}\nthe run has failed\n".splitlines(), status) == near


LONG = [
    "RuntimeError: Error(s) in loading state_dict for Linear:\n" + "\tsize mismatch for bias\n" * 40,
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:3690\n" + "frame #1: clone + 0x43 (0x7f in libc.so)\n" * 40,
    "RuntimeError: NCCL error\n"
    + "W1130 17:18:55.2 29 /x/torch/distributed/elastic/api.py:1028] Sending SIGTERM\n" * 40,
    # pydantic's fields, a compiler's lines, and steps of other ranks
    "pydantic_core.ValidationError: 15 validation errors for Config\n" + "lr\n  Field required [type=missing]\n" * 15,
    "RuntimeError: Error building extension 'fused'\n" + "fused.cu(12): error: x is undefined\n" * 20,
    "KeyError: 'rate'\n" + "step 7\n" * 15,
    "KeyError: 'rate'\n" + "\n".join(f"[{rank}]:\n  rank : {rank}\n  exitcode  : 1 (pid: 1)" for rank in range(8)),
]


@pytest.mark.parametrize("message", LONG)
def test_long_message_is_of_its_exception(message: str) -> None:
    words = read(CHILD.replace("KeyError: 'rate'\n", message).splitlines(), 1)
    assert words.exception == message.partition(":")[0]


LOADER_DIED = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly
"""
OF_LOADER = "RuntimeError: DataLoader worker (pid 12) is killed by signal: "
DIRECT = "\nThe above exception was the direct cause of the following exception:\n\n"
SHARED = "Bus error. It is possible that dataloader's workers are out of shared memory."


@pytest.mark.parametrize(
    "cause",
    [
        *(f"{OF_LOADER}Killed. ", f"{OF_LOADER}{SHARED}", f"{OF_LOADER}Segmentation fault. "),
        "RuntimeError: DataLoader worker (pid 12) exited unexpectedly with exit code 1. Details are lost.",
    ],
)
def test_lost_worker_of_a_data_loader_is_named_by_its_cause(cause: str) -> None:
    before = CHILD.replace("KeyError: 'rate'", cause)
    for noise in ("", IGNORED, IN_THREAD):
        words = read(f"{before}{DIRECT}{LOADER_DIED}{noise}".splitlines(), 1)
        assert words == LastWords(cause.rstrip(), "RuntimeError", "child.py:3")
    for other in (LOADER_DIED, CHILD + DIRECT + LOADER_DIED):
        assert read(other.splitlines(), 1).text.endswith("(pid(s) 12) exited unexpectedly")


REPORT = ELASTIC.replace("exitcode  : -9 (pid: 1)", "exitcode  : 1 (pid: 1)").replace(
    "traceback : Signal 9 (SIGKILL) received by PID 1", "traceback : To enable traceback see: https://pytorch.org/x"
)
OF_TORCHRUN = (
    "W1130 17:15:30.780000 31013 torch/distributed/run.py:793] Setting OMP_NUM_THREADS to be 1\n"
    "[2026-11-30 17:15:30,780] torch.distributed.run: [WARNING] Setting OMP_NUM_THREADS to be 1\n"
    "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 12)\n"
)
RECORDED = ELASTIC.replace(
    "  traceback : Signal 9 (SIGKILL) received by PID 1\n",
    "  traceback : " + "".join(f"  {line}\n" for line in CHILD.splitlines()).lstrip() + "  \n",
)


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "[default0]:", "[rank0]:[rank0]: ", "[default0]:[rank0]: "])
def test_error_below_torchrun(prefix: str) -> None:
    def said(text: str) -> str:
        return "".join(f"{prefix}{line}\n" for line in text.splitlines())

    words = read(f"{OF_TORCHRUN}{said(CHILD)}{REPORT}".splitlines(), 1)
    assert words == LastWords("KeyError: 'rate'", "KeyError", "child.py:3")
    words = read(f"{OF_TORCHRUN}{said('no data')}{OF_TORCHRUN}{REPORT}".splitlines(), 1)
    assert words == LastWords("no data")
    crash = "terminate called after throwing an instance of 'E'\n  what():  no space\nFatal Python error: Aborted\n"
    words = read(f"{OF_TORCHRUN}{said(CHILD)}{said(crash)}{REPORT}".splitlines(), 1)
    assert words == LastWords("C++ exception: no space")
    usage = said("usage: a.py\na.py: error: unrecognized arguments: --x")
    words = read(f"{OF_TORCHRUN}{usage}{REPORT.replace('exitcode  : 1', 'exitcode  : 2')}".splitlines(), 1)
    assert words == LastWords("a.py: error: unrecognized arguments: --x", is_mistake=True)


def test_report_of_torchrun_may_have_the_traceback() -> None:
    words = LastWords("KeyError: 'rate'", "KeyError", "child.py:3")
    assert read(RECORDED.splitlines(), 1) == words
    assert read(f"{CHILD}{RECORDED}".splitlines(), 1) == words
    assert read(f"{OF_TORCHRUN}{REPORT}".splitlines(), 1).text == f"{ELASTIC_ERROR}: 1 (pid: 1)"


WRAPPED = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a \n"
    "total capacity of 79.15 GiB of which 12.25 MiB is free. \n"
    "documentation for Memory Management  \n"
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)\n"
)


@pytest.mark.parametrize("noise", ["", *NOISE])
def test_message_that_rich_wraps_is_whole(noise: str) -> None:
    output = RICH.replace("KeyError: 'rate'\n", WRAPPED) + noise
    text = " ".join(line.strip() for line in WRAPPED.splitlines())
    assert read(output.splitlines(), 1) == LastWords(text, "OutOfMemoryError")
    lost = "FileNotFoundError: [Errno 2] No such file or directory: \n'/mnt/a.tar'\n"
    chain = output + DIRECT + RICH.replace("KeyError: 'rate'\n", lost)
    assert read(chain.splitlines(), 1) == LastWords(" ".join(lost.split()), "FileNotFoundError")


ABSL_END = "Pass --helpshort or --helpfull to see help on flags."
TYRO = """╭─ {0} ──────────────────────────╮
│ {1} │
│ ─────────────────────────────────────────────── │
│ For full helptext, run train.py --help          │
╰─────────────────────────────────────────────────╯"""


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (f"FATAL Flags parsing error: Unknown flag 'a'\n{ABSL_END}", "FATAL Flags parsing error: Unknown flag 'a'"),
        (
            f"FATAL Flags parsing error:\n  flag --lr=None: Flag --lr must have a value.\n{ABSL_END}",
            "FATAL Flags parsing error: flag --lr=None: Flag --lr must have a value.",
        ),
        (TYRO.format("Unrecognized options", "Unrecognized options: --foo"), "Unrecognized options: --foo"),
        (TYRO.format("Parsing error", "Invalid value for --lr"), "Invalid value for --lr"),
        (TYRO.format("Error", "Required options:").replace("run", "see"), "Required options: "),
        ("usage: a.py [-h]\n\n" + TYRO.format("Required options", "Missing: --lr"), "Missing: --lr"),
    ],
)
@pytest.mark.parametrize("status", [1, 2])
def test_wrong_flag_of_absl_and_tyro_is_a_mistake(output: str, text: str, status: int) -> None:
    words = read(f"starting\n{output}\n{NOISE[0]}".splitlines(), status)
    assert words.text.startswith(text)
    assert (words.exception, words.is_mistake) == (None, True)


def test_line_between_two_rules_is_not_an_exception() -> None:
    assert read(["----- 3 -----", "loss: 3"], 1) == LastWords("loss: 3")


def test_cause_that_is_cut_off_is_not_looked_for() -> None:
    cause = CHILD.replace("KeyError: 'rate'", OF_LOADER)
    lines = f"{cause}{DIRECT}{LOADER_DIED}".splitlines()
    for first in range(1, lines.index(LOADER_DIED.splitlines()[0], 1)):
        assert read(lines[first:], 1).text == LOADER_DIED.splitlines()[-1]


@pytest.mark.parametrize("output", ["╭───╮\n╰───╯", "╭─ x ─╮\n╰─────╯\nFor full helptext, run x", "╭", "-" * 2**16])
@pytest.mark.parametrize("group", ["", "  + Exception Group Traceback (most recent call last):\n"])
def test_any_output_has_last_words(output: str, group: str) -> None:
    for lines in (output.splitlines(), output.splitlines()[::-1]):
        assert isinstance(read([*group.splitlines(), *lines], 1), LastWords)


def test_error_of_another_process_is_not_the_scripts() -> None:
    process = CHILD.replace("KeyError: 'rate'", "FileNotFoundError: [Errno 2] No such file or directory")
    assert read(f"{CHILD}Process SpawnProcess-2:\n{process}".splitlines(), 1).text == "KeyError: 'rate'"
    assert read(f"Process SpawnProcess-2:\n{CHILD}".splitlines(), 1).text == "KeyError: 'rate'"
