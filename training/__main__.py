"""`python -m training`: train a language model."""

import sys
from functools import partial

from ray_on_ecs.command import run_command
from ray_on_ecs.config import parse
from training.engine.config import TrainingConfig
from training.recipes.language.config import LanguageConfig


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (see `--help`)."""
    return run_command(partial(parse, LanguageConfig), sys.argv[1:] if arguments is None else arguments, _train)


def _train(config: TrainingConfig) -> None:
    from rich.console import Console

    from training.ray_driver import run
    from training.recipes.language.recipe import LANGUAGE

    run(LANGUAGE, config, Console())


if __name__ == "__main__":
    sys.exit(main())
