"""The lines of a run that are shown, with lines as Ray wrote them."""

import io
import re
import sys
from typing import Any

import pytest
from ray.experimental import tqdm_ray

from ray_on_ecs.tracking.shown_log import MAX_CHARACTERS, OF_PROCESSES, Filter, ForwardedLines, printable

JOB_LOG = """\
run      wait1
*** SIGTERM received at time=1795616332 on cpu 1 ***
PC: @     0x7fcb3fced545  (unknown)  clock_nanosleep
    @     0x7fcb3fc5a050  396995208  (unknown)
    @ ... and at least 7 more frames
[rank 0] epoch 3
[2026-11-25 14:18:52,142 E 5382 5382] logging.cc:474: *** SIGTERM received at time=1795616332 on cpu 1 ***
[2026-11-25 14:18:52,142 E 5382 5382] logging.cc:474: PC: @     0x7fcb3fced545  (unknown)  clock_nanosleep
[2026-11-25 14:18:52,142 E 5382 5382] logging.cc:474:     @     0x7fcb3fc5a050  396995208  (unknown)
[2026-11-25 14:18:52,142 E 5382 5382] logging.cc:474:     @ ... and at least 7 more frames
ray-on-ecs: stopped; the same command with --run-name wait1 resumes the run
"""
CRASH = """\
*** SIGSEGV received at time=1795616332 on cpu 1 ***
PC: @     0x7fcb3fced545  (unknown)  clock_nanosleep
    @     0x7fcb3fc5a050  396995208  (unknown)
"""
PREEMPTION_WATCHER = (
    "[2026-11-25 14:09:45,502 E 20379 20450] core_worker.cc:2465: Actor with class name: 'PreemptionWatcher' and ID: "
    "'418eac3473f2c9774d7cc01f02000000' has constructor arguments in the object store and max_restarts > 0. If the "
    "arguments in the object store go out of scope or are lost, the actor restart will fail. See "
    "https://github.com/ray-project/ray/issues/53727 for more details."
)
STARTED = (
    "WARNING: 8 PYTHON worker processes have been started on node: 3c8d with address: 10.0.0.7. This could be a result "
    "of using a large number of actors, or due to tasks blocked in ray.get() calls (see "
    "https://github.com/ray-project/ray/issues/3644 for some discussion of workarounds)."
)
NO_MEMORY = "[2026-11-25 14:09:45,502 E 9 9] (raylet) node_manager.cc:3193: 1 Workers killed due to memory pressure"


def batch(*lines: str, actor: str = "RayTrainWorker", is_err: bool = False, **changed: Any) -> dict[str, Any]:
    """Lines of a process as Ray publishes them."""
    given = {"ip": "10.0.0.7", "pid": "2801", "job": "02000000", "actor_name": actor, "task_name": None}
    return {**given, "is_err": is_err, "lines": list(lines), "localhost": "10.0.0.7", **changed}


def test_driver_log_is_without_the_stack_of_sigterm() -> None:
    assert list(Filter().shown(JOB_LOG.splitlines())) == [
        "run      wait1",
        "[rank 0] epoch 3",
        "ray-on-ecs: stopped; the same command with --run-name wait1 resumes the run",
    ]


def test_stack_of_a_crash_is_shown() -> None:
    crash = CRASH.splitlines()
    assert list(Filter().shown([*JOB_LOG.splitlines(), *crash]))[-3:] == crash


@pytest.mark.parametrize(
    "harmless",
    [
        batch(PREEMPTION_WATCHER, actor="TrainController", is_err=True),
        batch(STARTED, pid="raylet", actor=""),
        batch("Tip: use `ray status` to view detailed cluster status.", pid="autoscaler", actor=""),
    ],
    ids=["preemption watcher", "worker processes", "autoscaler"],
)
def test_harmless_lines_are_left_out(harmless: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ForwardedLines().print(harmless)
    assert capsys.readouterr() == ("", "")


def test_the_scripts_own_lines_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ForwardedLines().print(batch("[rank 3] epoch 1", STARTED, "PC: @ 0x7f"))
    assert capsys.readouterr() == (f"[rank 3] epoch 1\n{STARTED}\nPC: @ 0x7f\n", "")


def test_other_lines_name_their_actor(capsys: pytest.CaptureFixture[str]) -> None:
    ForwardedLines().print(batch("it broke", actor="TrainController", is_err=True))
    ForwardedLines().print(batch(NO_MEMORY, pid="raylet", actor=""))
    assert capsys.readouterr() == (f"(raylet) {NO_MEMORY}\n", "(TrainController) it broke\n")


def test_lost_raylet_is_reported_without_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    message = (
        "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the user. Last 20 "
        "lines of the Raylet logs:\n    [state-dump] DebugString() time ms: 0\n    [2026-11-28 15:46:29,202 I]\n"
    )
    ForwardedLines().print(batch(message, "it goes on", pid="raylet", actor="", is_err=True))
    reasons = message[: message.index(" Last")]
    assert capsys.readouterr() == ("", f"(raylet) {reasons}\n(raylet) it goes on\n")


def test_long_lines_are_cut_once() -> None:
    [once] = Filter(OF_PROCESSES).shown(["a" * 6_000_000])
    assert len(once) <= MAX_CHARACTERS
    assert re.fullmatch(r"a+ \.\.\. \[5,934,544 more characters are not shown\]", once)
    assert list(Filter().shown([once])) == [once]
    assert list(Filter().shown(["b" * MAX_CHARACTERS])) == ["b" * MAX_CHARACTERS]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "shown"),
    [
        (Terminal(), "", "\x1b[31mred\x1b[0m\n"),
        (Terminal(), "1", "red\n"),
        (io.StringIO(), "", "red\n"),
    ],
    ids=["terminal", "NO_COLOR", "file"],
)
def test_colours_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, no_color: str, shown: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", stream)
    ForwardedLines().print(batch("\x1b[31mred\x1b[0m"))
    assert stream.getvalue() == shown


def test_progress_bars_of_ray_are_left_out() -> None:
    assert OF_PROCESSES.search(tqdm_ray.RAY_TQDM_MAGIC)


HOSTILE = {
    "bell": "\x07",
    "backspace": "\b\b",
    "carriage return": "\r",
    "form feed": "\f",
    "NUL": "\0",
    "delete": "\x7f",
    "a cursor movement": "\x1b[2A",
    "an erased screen": "\x1b[2J\x1b[H",
    "a private mode": "\x1b[?1049h",
    "a report": "\x1b[6n",
    "a C1 sequence": "\x9b31m",
    "a C1 control": "\x85",
    "a title": "\x1b]0;title\x07",
    "the clipboard": "\x1b]52;c;ZWNobw==\x1b\\",
    "a link": "\x1b]8;;file:///etc/passwd\x1b\\",
    "a C1 link": "\x9d8;;file:///etc\x9c",
    "a device string": "\x1bP+q544e\x1b\\",
    "an application string": "\x1b_Gpayload\x1b\\",
    "a privacy message": "\x1b^pm\x1b\\",
    "a reset": "\x1bc",
    "a character set": "\x1b(0",
    "a single shift": "\x1bN",
    "an escape at the end": "\x1b",
    "an open sequence": "\x1b[31",
    "an open string": "\x1b]0;title",
    "text from right to left": "\u202e",
    "an isolate": "\u2066",
    "an Arabic letter mark": "\u061c",
    "a line separator": "\u2028",
    "half of a character": "\ud800",
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("has_colours", [True, False])
def test_lines_do_not_change_the_terminal(kind: str, has_colours: bool) -> None:
    shown = printable(f"a\tb{HOSTILE[kind]}", has_colours=has_colours)
    assert shown.startswith("a\tb")
    assert shown.replace("\t", "").isprintable(), ascii(shown)
    assert "title" not in shown
    assert "payload" not in shown


def test_colours_stay_on_a_terminal() -> None:
    line = "\x1b[1;31mred\x1b[0m \x1b[38;5;12mblue\x1b[m"
    assert printable(line, has_colours=True) == line
    assert printable(line) == "red blue"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[8mhidden", "\x1b[8mhidden\x1b[0m"),
        ("\x1b[0m\x1b[7mreverse \x1b[1m", "\x1b[0m\x1b[7mreverse \x1b[1m\x1b[0m"),
        ("\x1b[30;40mblack\x1b[m", "\x1b[30;40mblack\x1b[m"),
        ("plain", "plain"),
    ],
)
def test_colours_end_with_their_line(line: str, shown: str) -> None:
    assert printable(line, has_colours=True) == shown
