"""`python -m training`: train an image classifier, or what else --recipe names."""

import sys

from ray_on_ecs.command import run_command
from training.engine.config import TrainingConfig
from training.recipes.settings import parse_training


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (see `--help`)."""
    return run_command(parse_training, sys.argv[1:] if arguments is None else arguments, _train)


def _train(config: TrainingConfig) -> None:
    from rich.console import Console

    from training.ray_driver import run
    from training.recipes.registry import recipe_of

    run(recipe_of(config), config, Console())


if __name__ == "__main__":
    sys.exit(main())
