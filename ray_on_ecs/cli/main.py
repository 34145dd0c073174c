"""`ray-on-ecs`: one module for each command, imported when it is typed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from ray_on_ecs.errors import DISK_FULL, Interrupted, TrainingError
from ray_on_ecs.signals import SIGNALLED, leave_terminals, open_terminals

ABOUT = """\
Train on your own cluster from your laptop.

By default, commands use the cluster of the Pulumi stack that is selected in this folder, and reach it through its S3
bucket. With --local they use this machine, and with --compose the cluster of docker/compose.yaml.

\b
  ray-on-ecs run --num-workers 2 train.py --lr 1  train with your script
  ray-on-ecs runs                                 list the runs
  ray-on-ecs doctor                               find out what is wrong

Exit status: 0 success, 1 the run or the check failed, 2 a flag, a file or the script has a mistake, 3 the cluster can't
be reached, 4 the run's limit is reached, 130 interrupted. run and logs --follow exit with the status of the run.

Tab completion: eval "$(_RAY_ON_ECS_COMPLETE=bash_source ray-on-ecs)"
"""
# Each command, which is `command` in the module of its name, with its line in the help, which needs no import.
COMMANDS = {
    "run": "Upload the code, train, show the log, fetch the results.",
    "recipe": "List the packaged training scripts, or copy one to edit it.",
    "runs": "List the runs with their state, step, loss and cost.",
    "logs": "Show the log of a run, or follow it.",
    "debug": "Show where each rank of a run is, and which one the others wait for.",
    "stop": "Stop a run; it can be resumed.",
    "fetch": "Copy the results of a run to this machine.",
    "open": "Show the report of a run in the browser.",
    "history": "Show all runs on one page: curves, settings, cost.",
    "rm": "Delete runs with their results and checkpoints, by name or age.",
    "status": "Show the nodes, GPUs, queue and cost per hour.",
    "wake": "Start a head that sleeps.",
    "shell": "Open a shell on the head.",
    "dashboard": "Open Ray's dashboard in the browser.",
    "notebook": "Open Jupyter on the head or on a worker's GPU.",
    "doctor": "Check everything from this machine to the cluster.",
}
# Commands of other programs, and the ones that do the same.
MEANT = {
    **dict.fromkeys(("cancel", "kill", "terminate"), "stop"),
    **dict.fromkeys(("connect", "exec", "ssh"), "shell"),
    **dict.fromkeys(("copy", "download", "get", "pull", "results"), "fetch"),
    **dict.fromkeys(("clean", "delete", "prune", "remove"), "rm"),
    **dict.fromkeys(("jobs", "list", "ls", "ps"), "runs"),
    **dict.fromkeys(("continue", "launch", "restart", "resume", "retry", "start", "submit", "train"), "run"),
    **dict.fromkeys(("report", "show", "view"), "open"),
    **dict.fromkeys(("compare", "costs", "diff"), "history"),
    **dict.fromkeys(("attach", "follow", "tail"), "logs"),
    **dict.fromkeys(("info", "nodes", "stat", "state"), "status"),
    **dict.fromkeys(("jupyter", "lab"), "notebook"),
    **dict.fromkeys(("check", "diagnose"), "doctor"),
}


class Commands(click.Group):
    """A group whose commands are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            # A word that is only similar to another never leads to a deletion.
            similar = get_close_matches(cmd_name, [*COMMANDS, *(word for word in MEANT if MEANT[word] != "rm")], n=1)
            if nearest := [cmd_name] if cmd_name in MEANT else similar:
                ctx.fail(f"No such command '{cmd_name}'. Did you mean {MEANT.get(nearest[0], nearest[0])}?")
            return None
        return import_module(f"ray_on_ecs.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=Commands, help=ABOUT, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.version_option(package_name="ray-on-ecs", message="%(prog)s, version %(version)s", help="Show it.")
def command_line() -> None:
    """Group of the commands; its help is ABOUT."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; return the exit status."""
    _open_streams()
    terminals = open_terminals()

    def exit_at_signal(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            leave_terminals(terminals)
        sys.exit(SIGNALLED + number)

    for number in (signal.SIGTERM, signal.SIGHUP):  # to close what is open, also when the terminal's window is closed
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, exit_at_signal)
    try:
        return command_line.main(arguments, prog_name="ray-on-ecs", standalone_mode=False) or 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as bare:
        click.echo(bare.format_message())
        return 2
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted", Interrupted.exit_status)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        first = next((word for word in arguments or sys.argv[1:] if word in COMMANDS), None)
        if isinstance(error, click.NoSuchOption) and context and context.parent is None and first:
            return _failed(f"{error.option_name}: follows the command, as in ray-on-ecs {first} {error.option_name}", 2)
        path = context.command_path if context else "ray-on-ecs"
        return _failed(f"{error.format_message()} (see {path} --help)", 2)
    except TrainingError as error:
        return _failed(str(error), error.exit_status)
    except OSError as cause:
        if cause.errno in DISK_FULL:  # such as that of the log into which the output goes
            with suppress(OSError):
                return _failed(f"{cause.strerror}: the output or a file can't be written; a submitted run continues", 1)
            return 1
        error = getattr(cause, "error", None)  # of S3
        if not isinstance(error, TrainingError):
            raise
        return _failed(str(error), error.exit_status)


def _open_streams() -> None:
    """Open the null device in place of each standard stream that is closed, whose number the next file would take."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _failed(line: str, status: int) -> int:
    from ray_on_ecs.cli.screen import note  # it imports rich

    note(f"ray-on-ecs: {line}")
    return status


if __name__ == "__main__":
    sys.exit(main())
