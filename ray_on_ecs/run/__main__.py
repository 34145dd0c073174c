"""`python -m ray_on_ecs.run`: start a user's script on every worker, unmodified."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder: the user's modules must not hide Ray's and ours

from ray_on_ecs.command import RAY_SETTINGS, exit_status
from ray_on_ecs.run.command_line import parse


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (see `--help`)."""
    return exit_status(lambda: _run(sys.argv[1:] if arguments is None else arguments), "interrupted before it started")


def _run(arguments: list[str]) -> int:
    config = parse(arguments)
    os.environ.update({**RAY_SETTINGS, **os.environ})  # Ray reads them when it is imported
    # What takes seconds to import is not for --help or a mistyped flag, and Ray Train not for a run that is queued.
    from rich.console import Console

    from ray_on_ecs.run import admission

    console = Console()
    with admission.admit(config, console) as admitted:
        from ray_on_ecs.run.driver import run

        run(admitted, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
