"""The settings of the recipe that a command line names; without torch, so that a laptop can check them.

`python -m training.recipes.settings FLAGS` checks them and prints the run's name, storage path and workers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

from ray_on_ecs.command import exit_status
from ray_on_ecs.config import environment_variable, flag, parse
from ray_on_ecs.errors import UsageError
from training.engine.config import TrainingConfig
from training.recipes import RECIPES
from training.recipes.images.config import ImageConfig
from training.recipes.language.config import LanguageConfig

CONFIGS: dict[str, type[ImageConfig] | type[LanguageConfig]] = {"images": ImageConfig, "language": LanguageConfig}
RECIPE = "recipe"


def config_class(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> type[ImageConfig] | type[LanguageConfig]:
    """Return the class of the settings of the recipe that `--recipe` names, or its environment variable.

    Raises:
        UsageError: There is no such recipe.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(flag(RECIPE), default=environment.get(environment_variable(RECIPE)) or RECIPES[0])
    try:
        name = parser.parse_known_args(arguments)[0].recipe
    except argparse.ArgumentError:  # it has no value, which the other parser will say
        name = RECIPES[0]
    if name not in CONFIGS:
        raise UsageError(f"{flag(RECIPE)}: {name!r} is not allowed; it must be one of {', '.join(CONFIGS)}")
    return CONFIGS[name]


def parse_training(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> TrainingConfig:
    """Parse a command line and the environment into the settings of the recipe that they name.

    Raises:
        UsageError: A value can't be read or breaks its rule, or a flag is another recipe's.
    """
    chosen = config_class(arguments, environment)
    known = _flags(chosen)
    given = [each.partition("=")[0] for each in arguments]
    for name, other in CONFIGS.items():
        if foreign := [each for each in given if each in _flags(other) - known]:
            raise UsageError(f"{foreign[0]}: is a flag of {flag(RECIPE)} {name}; give that, or leave the flag out")
    return parse(chosen, arguments, environment)


def _flags(config: type[TrainingConfig]) -> set[str]:
    return {flag(spec.name) for spec in fields(config)}


def main() -> int:
    """Check the flags of a command line; returns the exit status."""

    def check() -> int:
        flags = sys.argv[1:]
        config = parse_training(flags).resolve_defaults()
        typed = parse(type(config), flags, {})
        workers = config.workers[0] if config.workers else 0
        print(json.dumps({"run_name": config.run_name, "storage_path": typed.storage_path, "workers": workers}))
        return 0

    return exit_status(check, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
