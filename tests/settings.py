"""Settings of a run by its flags, without files and clusters."""

from collections.abc import Mapping, Sequence

from ray_on_ecs.cli.run import command
from ray_on_ecs.cli.run_flags import given_settings
from ray_on_ecs.config import RunConfig, defaults_in


def parse(words: Sequence[str], environment: Mapping[str, str] = {}) -> RunConfig:
    """The settings of `ray-on-ecs run` with these words."""
    with command.make_context("run", list(words)) as context:
        given = defaults_in(environment) | given_settings(context.params)
        return RunConfig(**given, command=context.params["command"])
