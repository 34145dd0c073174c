"""Real processes of a script that fail, hang, are killed, or leave children behind."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from ray_on_ecs import secrets
from ray_on_ecs.run import process as module
from ray_on_ecs.run import supervisor
from ray_on_ecs.run.process import KEPT_CHARACTERS, ProcessOptions, ScriptProcess, wait_for_end
from ray_on_ecs.run.stacks import NO_RIGHTS
from ray_on_ecs.tracking.shown_log import MARK_CHARACTERS, MAX_CHARACTERS
from tests.local_cluster import have_ended
from tests.waiting import LIMIT_SECONDS, until

Start = Callable[..., ScriptProcess]


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def start(tmp_path: Path, lines: list[str]) -> Iterator[Start]:
    """Start a Python script of these lines."""
    started: list[ScriptProcess] = []

    def start(script: str) -> ScriptProcess:
        variables = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        options = ProcessOptions(variables, tmp_path, lines.append)
        process = ScriptProcess([sys.executable, "-u", "-c", script], options)
        started.append(process)
        return process.__enter__()

    yield start
    for each in started:
        each.__exit__(None, None, None)


def test_output_comes_by_line_and_status_last(start: Start, lines: list[str]) -> None:
    process = start("import sys; print('out'); print('error', file=sys.stderr); sys.exit(3)")
    assert process.wait(LIMIT_SECONDS) == 3
    assert sorted(lines) == ["error\n", "out\n"]
    assert sorted(process.last_lines) == ["error\n", "out\n"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["killed", "crashed"])
def test_fatal_signal_is_the_exit_status(start: Start, number: int) -> None:
    process = start(f"import os; os.kill(os.getpid(), {int(number)})")
    assert process.wait(LIMIT_SECONDS) == -number


def no_space(line: str) -> None:
    with open("/dev/full", "w") as file:
        file.write(line)


def wrong_type(line: str) -> None:
    float(None)  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("call", [no_space, wrong_type])
@pytest.mark.parametrize("name", ["on_line", "on_state", "mask"])
def test_error_in_a_reader_does_not_stop_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Callable[[str], None], name: str
) -> None:
    shown: list[str] = []
    options = replace(ProcessOptions(os.environ, tmp_path, shown.append), **{name: call})
    script = "for n in range(3000): print(n, 'x' * 50)\nprint(' 50%|#  | 1/2 [00:01<00:01, 1it/s]')"
    with ScriptProcess([sys.executable, "-c", script], options) as process:
        assert process.wait(LIMIT_SECONDS) == 0  # more than a pipe holds
    assert bool(shown) is (name == "on_state")
    assert len([record for record in caplog.records if "not shown or not recorded" in record.message]) == 1


def test_missing_program_has_the_status_of_a_shell(tmp_path: Path, lines: list[str]) -> None:
    with ScriptProcess(["./nothing"], ProcessOptions(os.environ, tmp_path, lines.append)) as process:
        assert process.wait(LIMIT_SECONDS) == 127
        assert lines == ["./nothing: No such file or directory\n"]


def test_sigterm_reaches_the_script(start: Start, lines: list[str]) -> None:
    process = start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        "print('ready')\n"
        "while True: time.sleep(0.1)"
    )
    until(lambda: "ready\n" in lines)
    process.terminate()
    assert process.wait(LIMIT_SECONDS) == 0
    assert lines == ["ready\n", "saved\n"]


def test_hanging_script_leaves_its_stacks(start: Start, lines: list[str]) -> None:
    process = start("import threading\ndef stuck():\n  print('here')\n  threading.Event().wait()\nstuck()")
    until(lambda: "here\n" in lines)
    stacks = process.stacks()
    assert "in stuck" in stacks
    assert "here" not in stacks
    assert process.poll() == -signal.SIGABRT


def test_script_stopped_by_the_system_is_killed(start: Start, lines: list[str]) -> None:
    process = start(
        "import os, signal, time\nprint(os.getpid())\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)"
    )
    until(lambda: lines)
    script = psutil.Process(int(lines[0]))
    until(lambda: script.status() == psutil.STATUS_STOPPED)
    process.kill()
    until(lambda: have_ended([script]))


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={alone})
print(child.pid, flush=True)
{then}
"""


def has_ended(pid: int) -> bool:
    try:
        return have_ended([psutil.Process(pid)])
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("alone", [False, True], ids=["same group", "another group"])
@pytest.mark.parametrize("then", ["sys.exit(0)", "time.sleep(600)"], ids=["it ends", "it is killed"])
def test_children_end_with_the_script(start: Start, lines: list[str], then: str, alone: bool) -> None:
    process = start(FAMILY.format(then=then, alone=alone))
    until(lambda: lines)
    if "sleep" in then:
        process.kill()
    until(lambda: has_ended(int(lines[0])))


# Reports its start, and writes a file after SIGTERM.
GENTLE = """
import signal, sys, time
from pathlib import Path

def save(number, frame):
    time.sleep(0.5)
    Path("saved").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
# Starts the script, and waits.
WORKER = """
import os, sys, time
from pathlib import Path
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess
folder = Path(sys.argv[2])
options = ProcessOptions(os.environ, folder, lambda line: print(line, flush=True), folder / "lock")
process = ScriptProcess([sys.executable, "-c", sys.argv[1]], options)
time.sleep(600)
"""


@pytest.mark.parametrize("alone", [False, True], ids=["same group", "another group"])
def test_script_ends_with_its_parent(tmp_path: Path, alone: bool) -> None:
    command = [sys.executable, "-c", WORKER, FAMILY.format(then="time.sleep(600)", alone=alone), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        child = psutil.Process(int(worker.stdout.readline()))
        family = [child, *child.parents()[:2]]  # the script, and its supervisor
        assert not psutil.Process(worker.pid).children(), "Ray kills those of a worker that ends"
        worker.kill()
    until(lambda: have_ended(family))


def test_script_of_a_killed_worker_may_save(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, GENTLE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == "ready\n"
        worker.kill()
    assert not wait_for_end(tmp_path / "lock", 0)
    assert wait_for_end(tmp_path / "lock", LIMIT_SECONDS)
    assert (tmp_path / "saved").exists()


# Commands of a shell, which SIGTERM ends at once, with what trains below it.
WRAPPERS = {
    "shell": "{python} -c {script}; echo next",
    "background": "{python} -c {script} & wait",
    "shell in a shell": "bash -c {inner}; echo next",
    "group": "set -m; {python} -c {script} & wait",
    "session": "setsid {python} -c {script}; echo next",
    "time limit": "timeout 600 {python} -c {script}; echo next",
    "pipe": "{python} -c {script} 2>&1 | tee log; echo next",
    "subshell": "(cd .; {python} -c {script}; echo next); echo next",
    "loop": "for i in 1 2; do {python} -c {script}; echo next; done",
    "sh": "sh -c {inner}",
    "function": "train() {{ {python} -c {script}; echo next; }}; train",
}


@pytest.mark.parametrize("form", WRAPPERS)
@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_script_behind_a_shell_may_save(tmp_path: Path, lines: list[str], form: str, end: str) -> None:
    script = shlex.quote(GENTLE)
    inner = shlex.quote(f"{sys.executable} -c {script}; echo next")
    command = WRAPPERS[form].format(python=sys.executable, script=script, inner=inner)
    options = ProcessOptions({**os.environ, "PYTHONUNBUFFERED": "1"}, tmp_path, lines.append)
    with ScriptProcess(["bash", "-c", command], options) as process:
        until(lambda: "ready\n" in lines)
        getattr(process, end)()
        assert process.wait(LIMIT_SECONDS) == (0 if end == "terminate" else -signal.SIGKILL)
    assert (tmp_path / "saved").exists() == (end == "terminate")
    assert "next\n" not in lines


@pytest.mark.parametrize("order", ["{plain} & {gentle}", "{gentle} & {plain}", "{gentle} & (sh -c {inner}; echo next)"])
def test_status_behind_a_shell_is_of_a_program_that_is_killed(tmp_path: Path, lines: list[str], order: str) -> None:
    plain = f"{sys.executable} -c 'import time; print(\"plain\", flush=True); time.sleep(600)'"
    gentle = f"{sys.executable} -uc {shlex.quote(GENTLE)}"
    command = order.format(plain=plain, gentle=gentle, inner=shlex.quote(f"{plain}; echo next"))
    with ScriptProcess(
        ["bash", "-c", f"{command}; echo next"], ProcessOptions(os.environ, tmp_path, lines.append)
    ) as each:
        until(lambda: all(word in "".join(lines) for word in ("plain", "ready")))  # perhaps on one line
        each.terminate()
        assert each.wait(LIMIT_SECONDS) == -signal.SIGTERM, "its files may be torn"
    assert (tmp_path / "saved").exists()
    assert "next\n" not in lines


def test_inner_shell_with_a_trap_passes_the_signal_on_itself(tmp_path: Path, lines: list[str]) -> None:
    counting = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saving'), time.sleep(1), sys.exit(0)))\n"
        "print('ready')\n"
        "time.sleep(600)"
    )
    inner = f"trap 'kill -TERM $child; wait $child' TERM; {sys.executable} -uc {shlex.quote(counting)} & child=$!; wait"
    command = f"bash -c {shlex.quote(inner)}; echo next"
    with ScriptProcess(["bash", "-c", command], ProcessOptions(os.environ, tmp_path, lines.append)) as each:
        until(lambda: "ready\n" in lines)
        each.terminate()
        assert each.wait(LIMIT_SECONDS) is not None
    assert lines == ["ready\n", "saving\n"]


@pytest.mark.parametrize("shell", [[], ["bash", "-c"]], ids=["of a script", "of a shell"])
def test_children_that_ignore_sigterm_are_killed(tmp_path: Path, lines: list[str], shell: list[str]) -> None:
    child = f"{sys.executable} -c {shlex.quote(STUBBORN.format(alone=''))}; echo next"
    script = [sys.executable, "-c", f"import subprocess; subprocess.call({child!r}, shell=True)"]
    with ScriptProcess(
        [*shell, child] if shell else script, ProcessOptions(os.environ, tmp_path, lines.append)
    ) as each:
        until(lambda: lines)
        each.terminate()
        assert each.wait(LIMIT_SECONDS) == -signal.SIGTERM
    until(lambda: has_ended(int(lines[0])))


# Ignores SIGTERM.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{alone}
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell a child of it")
@pytest.mark.parametrize("alone", ["", "os.setsid()", "os.setpgid(0, 0)"], ids=["its group", "its session", "a group"])
@pytest.mark.parametrize("first", ["worker", "supervisor"])
def test_script_ends_with_its_worker_and_supervisor(tmp_path: Path, first: str, alone: str) -> None:
    command = [sys.executable, "-c", WORKER, STUBBORN.format(alone=alone), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        script = psutil.Process(int(worker.stdout.readline()))
        supervisor_process = script.parent()
        assert supervisor_process
        killed = [worker, supervisor_process] if first == "worker" else [supervisor_process, worker]
        worker.send_signal(signal.SIGSTOP)  # it does not see that the supervisor has ended
        for each in killed:
            each.kill()
        until(lambda: have_ended([script]))


@pytest.mark.parametrize("alone", [False, True], ids=["same group", "another group"])
def test_nothing_is_left_of_a_killed_supervisor(start: Start, lines: list[str], alone: bool) -> None:
    process = start(FAMILY.format(then="time.sleep(600)", alone=alone))
    until(lambda: lines)
    [script] = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(LIMIT_SECONDS) == -signal.SIGKILL
    until(lambda: have_ended([script]) and has_ended(int(lines[0])))


@pytest.mark.parametrize("alone", [False, True], ids=["same group", "another group"])
def test_nothing_is_left_of_a_stopped_supervisor(
    start: Start, lines: list[str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STACK_SECONDS", 1.0)
    process = start(FAMILY.format(then="time.sleep(600)", alone=alone))
    until(lambda: lines)
    supervising = psutil.Process(process.pid)
    [script] = supervising.children()
    supervising.suspend()
    process.terminate()
    assert process.wait(0.5) is None
    process.kill()
    until(lambda: have_ended([supervising, script]) and has_ended(int(lines[0])))
    assert process.wait(LIMIT_SECONDS) == -signal.SIGKILL


def test_killed_script_has_no_grace_period(start: Start, lines: list[str], tmp_path: Path) -> None:
    process = start(GENTLE)
    until(lambda: lines)
    process.kill()
    assert process.poll() == -signal.SIGKILL
    assert not (tmp_path / "saved").exists()


def test_end_time_is_known(start: Start) -> None:
    before = time.time()
    process = start("pass")
    until(lambda: process.poll() is not None)
    assert process.ended_at
    assert before < process.ended_at <= time.time()


def test_partial_line_counts_as_activity(start: Start, lines: list[str]) -> None:
    process = start("import time\nprint('.', end='', flush=True)\ntime.sleep(600)")
    begun = process.heard_at
    until(lambda: process.heard_at > begun)
    assert not lines


def test_binary_output_is_passed_on(start: Start, lines: list[str]) -> None:
    process = start("import os; os.write(1, b'\\xff a\\r\\n' + 'ä'.encode() + b'\\nlast')")
    until(lambda: process.poll() is not None)
    assert lines == ["\ufffd a\n", "ä\n", "last"]


def test_program_of_a_node_leaves_the_stacks_of_its_processes(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "rank.py").write_text("import time\ndef stuck():\n    print('here')\n    time.sleep(600)\nstuck()\n")
    options = ProcessOptions({**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}, tmp_path, lines.append)
    with ScriptProcess(["sh", "-c", f"RANK=3 {sys.executable} rank.py & wait"], options) as process:
        until(lambda: lines)
        [found] = process.dump()
        assert process.poll() is None
    assert found.rank == 3
    assert found.fault == NO_RIGHTS or found.threads[0].frames[0].function == "stuck"


def test_process_during_execve_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has its mark only after execve, which a busy machine may delay."""
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, supervisor.MARK: "of this test"})
    read, seen = supervisor._environment, []

    def late(pid: int) -> list[bytes]:
        if pid == child.pid:
            seen.append(pid)
        return supervisor.STARTING if pid == child.pid and len(seen) <= 3 else read(pid)

    monkeypatch.setattr(supervisor, "_environment", late)
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    supervisor._kill_all("of this test")
    assert child.wait(LIMIT_SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("environ", "statm", "expected"),
    [
        ("A=1\0B=2\0", "43 1 1 5 0 82 0", [b"A=1", b"B=2", b""]),
        ("", "43 1 1 5 0 82 0", supervisor.STARTING),
        ("", "0 0 0 0 0 0 0", []),
        (None, None, []),
    ],
    ids=["running", "in the middle of execve", "a zombie or a kernel thread", "ended"],
)
def test_process_marks_are_read_from_proc(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: str | None,
    statm: str | None,
    expected: list[bytes],
) -> None:
    """Files stand for /proc: no process can be held in the middle of execve, and kernels differ on zombies."""
    monkeypatch.setattr(supervisor, "PROC", str(tmp_path))
    (tmp_path / "7").mkdir()
    for name, content in (("environ", environ), ("statm", statm)):
        if content is not None:
            (tmp_path / "7" / name).write_text(content)
    assert supervisor._environment(7) == expected


def test_long_line_is_cut_while_it_is_read(start: Start, lines: list[str]) -> None:
    script = "import os\nfor _ in range(500):\n    os.write(1, b'a' * 200_000)\nos.write(1, b'\\nb\\n' + b'c' * 70_000)"
    process = start(script)
    until(lambda: process.poll() is not None)
    first, second, third = lines
    assert second == "b\n"
    for line, letter, size in ((first, "a", 100_000_000), (third, "c", 70_000)):
        kept, _, mark = line.partition(" ... [")
        assert len(line) <= MAX_CHARACTERS
        assert kept == letter * len(kept)
        assert mark.strip() == f"{size - len(kept):,} more characters are not shown]"


def shown(line: str, secret: str) -> tuple[str, int]:
    """The text that is shown of a line, and the number of characters that its mark names; 0 without one."""
    kept, _, mark = module._shown(*module._appended("", line, 0), secrets.Masker([secret])).partition(" ... [")
    return kept, int(mark.partition(" ")[0].replace(",", "") or 0)


@pytest.mark.parametrize("edge", [MAX_CHARACTERS - MARK_CHARACTERS, KEPT_CHARACTERS], ids=["shown", "kept"])
@pytest.mark.parametrize("encode", [str, lambda text: quote(text, safe=""), lambda text: json.dumps(text)[1:-1]])
@pytest.mark.parametrize("secret", ["S3CRET", "S3CRET" * 600, "\u00df/\\" * 300], ids=["short", "long", "encoded"])
@pytest.mark.parametrize("masks", [False, True], ids=["after text", "after masks"])
def test_secret_where_a_line_is_cut_is_masked(
    secret: str, encode: Callable[[str], str], edge: int, masks: bool
) -> None:
    """A mask is shorter than its secret: with many of them, the end of what is kept is shown."""
    text = encode(secret)
    for part in (1, len(text) // 2, len(text) - 1):
        begin = text * ((edge - part) // len(text)) if masks else ""
        kept, number = shown(begin + "a" * (edge - part - len(begin)) + text + "b" * 300_000, secret)
        assert set(kept) <= set("a*b")
        assert number >= 300_000 - len(kept)


@pytest.mark.parametrize("size", [0, 60_000, MAX_CHARACTERS, MAX_CHARACTERS + 6, KEPT_CHARACTERS, KEPT_CHARACTERS + 6])
@pytest.mark.parametrize("text", ["a", "secret"])
def test_mark_counts_all_that_is_omitted(text: str, size: int) -> None:
    line = (text * size)[:size]
    kept, number = shown(line, "secret")
    masked = len(line[:KEPT_CHARACTERS].replace("secret", "***"))
    assert number == masked - len(kept) + max(size - KEPT_CHARACTERS, 0)
    assert bool(number) == (masked > MAX_CHARACTERS or size > KEPT_CHARACTERS)
