"""`python -m training`: the command line, and the exit status of each kind of failure."""

import os
import sys

from training.config import parse
from training.errors import Interrupted, TrainingError
from training.recipes.images.config import ImageConfig

# Ray reads these when it is imported.
RAY_SETTINGS = {
    # Show the lines of every rank, each once.
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # How often the controller checks on the workers and on whether they have finished.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    # A node's end is announced a minute or two ahead: lose no more than a second of it before noticing.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    # While workers are starting, Ray logs their pending resource requests as errors; turn that off.
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (see `--help`)."""
    try:
        config = parse(ImageConfig, sys.argv[1:] if arguments is None else arguments)
        os.environ.update({**RAY_SETTINGS, **os.environ})
        # These take seconds to import: not for --help or a mistyped flag.
        from rich.console import Console

        from training.launchers.ray_driver import run
        from training.recipes.images.recipe import IMAGES

        run(IMAGES, config, Console())
    except TrainingError as error:
        print(f"training: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("training: interrupted before it trained", file=sys.stderr)
        return Interrupted.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
