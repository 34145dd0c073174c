"""`python -m training`: train an image classifier."""

import sys

from training.cli import run_command
from training.recipes.images.config import ImageConfig


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (see `--help`)."""
    return run_command(ImageConfig, sys.argv[1:] if arguments is None else arguments, _train)


def _train(config: ImageConfig) -> None:
    from rich.console import Console

    from training.launchers.ray_driver import run
    from training.recipes.images.recipe import IMAGES

    run(IMAGES, config, Console())


if __name__ == "__main__":
    sys.exit(main())
