"""Sessions of Session Manager: start, refusals, the plugin's versions and faults, and their end in AWS."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_on_ecs.cluster import session
from ray_on_ecs.cluster.stack import Stack, find
from ray_on_ecs.errors import HeadUnavailable, ResourceError, UsageError
from tests.front import SESSION
from tests.ray_on_ecs.cli.account import Laptop

URL = "https://docs.aws.amazon.com/systems-manager/"
# Prints its process ID and the local port.
HOLD = """
import os, signal, sys, time
from ray_on_ecs.cli import main as m
from ray_on_ecs.cluster import session
from ray_on_ecs.cluster.stack import find
# The tests may have been started with ignored signals: by nohup, or in a shell's background.
signal.signal(signal.SIGHUP, signal.SIG_DFL); signal.signal(signal.SIGINT, signal.default_int_handler)
session.OPEN_SECONDS = session.CLOSE_SECONDS = 600
def hold(ctx):
    with session.forwarded_port(find(None, sys.argv[1]), "h", 1) as port:
        print(port, flush=True); time.sleep(600)
m.command_line.invoke = hold; m.main(["runs"])
"""


@pytest.fixture
def up(stack: Laptop, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The stack, as its laptop's commands see it."""
    for name, value in stack.variables.items():
        monkeypatch.setenv(name, value)
    return find(None, stack.outputs_flag()[1])


@pytest.fixture
def put_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up: Stack) -> Callable[[str], Path]:
    """Returns a function that replaces the plugin by a script."""

    def put(text: str) -> Path:
        plugin = tmp_path / "bin" / "session-manager-plugin"
        plugin.parent.mkdir()
        plugin.write_text(text)
        plugin.chmod(0o755)
        monkeypatch.setenv("PATH", f"{plugin.parent}:/usr/bin:/bin")
        return plugin

    return put


def started(stack: Laptop) -> list[str]:
    """The sessions' beginnings and ends in AWS so far."""
    return [name for name, _ in stack.front.asked if name in ("StartSession", "TerminateSession")]


def test_plugin_forwards_a_port_and_closes_the_session(stack: Laptop, up: Stack) -> None:
    with session.forwarded_port(up, "head.ray.internal", 8265) as port:
        socket.create_connection(("127.0.0.1", port)).close()
    assert json.loads(dict(stack.front.asked)["StartSession"]) == {
        "Target": stack.outputs["head_instance_id"],
        "DocumentName": stack.outputs["forward_document"],
        "Parameters": {"host": ["head.ray.internal"], "portNumber": ["8265"], "localPortNumber": ["0"]},
    }
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert started(stack) == ["StartSession"]


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        ("1.2.497.0", "argument"),
        ("1.2.54.0", "argument"),
        ("unknown", "argument"),
        ("1.2.536.0", "variable"),
        ("1.10.0.0", "variable"),
        ("2.0", "variable"),
    ],
)
def test_token_is_passed_as_the_version_takes_it(
    up: Stack, monkeypatch: pytest.MonkeyPatch, version: str, takes: str
) -> None:
    monkeypatch.setenv("AWS_STAND_IN_VERSION", version)
    monkeypatch.setenv("AWS_STAND_IN_TAKES", takes)
    with session.forwarded_port(up, "head.ray.internal", 8265) as port:
        assert port


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        ("TargetNotConnected", HeadUnavailable, "is not connected to Session Manager"),
        ("AccessDeniedException", ResourceError, "did not open a session .*AccessDeniedException"),
        ("InvalidDocument", ResourceError, "did not open a session .*InvalidDocument"),
        ("ExpiredTokenException", UsageError, "credentials are missing or expired"),
        ("UnrecognizedClientException", UsageError, "credentials are missing or expired"),
        ("RequestTimeTooSkewed", UsageError, "clock is wrong"),
    ],
)
def test_refused_session_has_its_reason(stack: Laptop, up: Stack, code: str, kind: type[Exception], says: str) -> None:
    stack.front.codes["StartSession"] = code
    with pytest.raises(kind, match=says) as raised, session.forwarded_port(up, "head.ray.internal", 8265):
        pass
    assert isinstance(raised.value, HeadUnavailable) == (code == "TargetNotConnected")
    assert "TerminateSession" not in started(stack)


def test_answer_of_another_program_starts_no_plugin(stack: Laptop, up: Stack) -> None:
    stack.front.answers["StartSession"] = {"SessionId": "x"}
    with pytest.raises(ResourceError, match="not an answer of AWS's"), session.forwarded_port(up, "h", 1):
        pass


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "^command not found: session-manager-plugin; install it: "),
        ("#!/bin/sh\necho no libc >&2; exit 127\n", r"--version fails \(no libc\); install it again: "),
        ("#!/bin/sh\nkill -KILL $$\n", "--version fails .*SIGKILL.*; install it again: "),
        ("\x7fELF of another machine", "--version fails .*Exec format error.*; install it again: "),
        ("#!/bin/sh\nexec sleep 600\n", "--version fails .*timed out.*; install it again: "),
        ("#!/nowhere/python\n", "^command not found: session-manager-plugin; install it: "),
    ],
)
def test_broken_plugin_is_one_line_and_starts_nothing(
    stack: Laptop,
    up: Stack,
    put_plugin: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    says: str,
) -> None:
    plugin = put_plugin(text or "")
    if text is None:
        plugin.unlink()
    if text and "sleep" in text:
        monkeypatch.setattr(session, "PLUGIN_SECONDS", 0.1)
    for opened in (session.forwarded_port(up, "h", 1), session.started(up, up.shell_document)):
        with pytest.raises(UsageError, match=says) as raised, opened:
            pass
        assert URL in str(raised.value)
    assert started(stack) == []


def test_plugin_that_is_not_executable(put_plugin: Callable[[str], Path]) -> None:
    put_plugin("#!/bin/sh\n").chmod(0o644)
    with pytest.raises(UsageError, match=r"--version fails .*Permission denied"):
        session.plugin_version()


def test_plugin_that_fails_to_start_leaves_no_session(
    stack: Laptop, up: Stack, put_plugin: Callable[[str], Path]
) -> None:
    put_plugin('#!/bin/sh\nrm "$0"\n')  # after its version it is gone
    with pytest.raises(FileNotFoundError), session.started(up, up.shell_document):
        pass
    assert started(stack) == ["StartSession", "TerminateSession"]
    assert json.loads(stack.front.asked[-1][1]) == {"SessionId": SESSION["SessionId"]}


def test_killed_plugin_leaves_no_session(stack: Laptop, up: Stack) -> None:
    with session.started(up, up.forward_document, {"localPortNumber": ["0"]}) as plugin:
        plugin.kill()
        plugin.wait()
    assert started(stack) == ["StartSession", "TerminateSession"]


def test_session_that_can_not_be_ended_is_not_an_error(stack: Laptop, up: Stack) -> None:
    stack.front.refused = {"TerminateSession"}
    with session.started(up, up.shell_document) as plugin:
        plugin.kill()
        plugin.wait()
    assert started(stack) == ["StartSession", "TerminateSession"]


def test_plugin_without_a_connection_is_one_line(up: Stack, put_plugin: Callable[[str], Path]) -> None:
    put_plugin('#!/bin/sh\n[ "$1" = --version ] || echo; echo "Cannot perform start session: EOF"\n')
    with pytest.raises(ResourceError, match=r"did not open a session \(Cannot .*: EOF\); ray-on-ecs doctor"):
        session.forwarded_port(up, "h", 1).__enter__()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_session_ends_with_the_command(stack: Laptop, number: signal.Signals) -> None:
    """A closed window sends SIGHUP, and `kill` SIGTERM."""
    command = [sys.executable, "-c", HOLD, stack.outputs_flag()[1]]
    with subprocess.Popen(command, env=stack.variables, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout
        port = int(held.stdout.readline())
        socket.create_connection(("127.0.0.1", port)).close()
        held.send_signal(number)
        held.wait()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert started(stack) == ["StartSession"]
