"""`ray-on-ecs shell` on a stack: a session of the document that enters the head's container."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_on_ecs.cli.account import Laptop

# Prints a line for each key that reaches the shell, and ends after the last one.
SHELL = """#!/bin/sh
[ "$1" = --version ] && echo 1.2.707.0 && exit
trap 'echo key INT' INT
trap 'echo key QUIT' QUIT
trap 'echo key TSTP; exit 7' TSTP
echo ready
while :; do read line || :; done
"""
# As a shell does, runs the command in the foreground of the terminal and notices if Ctrl-Z stops it.
IN_TERMINAL = """
import os, signal, subprocess, sys
os.login_tty(0)
command = subprocess.Popen([sys.executable, "-m", "ray_on_ecs", *sys.argv[1:]], process_group=0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.tcsetpgrp(0, command.pid)
status = os.waitpid(command.pid, os.WUNTRACED)[1]
sys.exit("stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
"""


def test_shell_enters_the_running_head_container(stack: Laptop, capfd: pytest.CaptureFixture[str]) -> None:
    assert stack.run("shell").returncode == 0
    document, head = stack.outputs["shell_document"], stack.outputs["head_instance_id"]
    assert capfd.readouterr().out.splitlines()[-1] == f"a shell by {document} on {head}"
    asked = dict(stack.front.asked)
    assert json.loads(asked["StartSession"]) == {"Target": head, "DocumentName": document}
    assert "TerminateSession" not in asked


def test_exit_status_is_from_the_plugin(stack: Laptop) -> None:
    assert stack.run("shell", AWS_STAND_IN_STATUS="3").returncode == 3
    assert "TerminateSession" in dict(stack.front.asked)


def test_keys_that_send_signals_reach_the_shell(stack: Laptop, tmp_path: Path) -> None:
    plugin = tmp_path / "session-manager-plugin"
    plugin.write_text(SHELL)
    plugin.chmod(0o755)
    variables = {**stack.variables, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    end, terminal = os.openpty()
    arguments = [sys.executable, "-c", IN_TERMINAL, "shell", *stack.outputs_flag()]
    with subprocess.Popen(arguments, env=variables, stdin=terminal) as command:
        os.close(terminal)
        output = ""
        for says, key in (("ready", b"\x03"), ("key INT", b"\x1c"), ("key QUIT", b"\x1a"), ("key TSTP", b"")):
            while says not in output:
                output += os.read(end, 1024).decode()  # fails once the terminal's processes have ended
            os.write(end, key)
    os.close(end)
    assert command.returncode == 7, output
