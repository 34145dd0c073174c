"""`python -m ray_on_ecs.run`: start a user's script on every worker, unmodified."""

import sys
from functools import partial

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder: the user's modules must not hide Ray's and ours

from ray_on_ecs.command import run_command
from ray_on_ecs.config import parse
from ray_on_ecs.run.config import ScriptConfig


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (see `--help`)."""
    return run_command(partial(parse, ScriptConfig), sys.argv[1:] if arguments is None else arguments, _launch)


def _launch(config: ScriptConfig) -> None:
    from rich.console import Console

    from ray_on_ecs.run.driver import run

    run(config, Console())


if __name__ == "__main__":
    sys.exit(main())
