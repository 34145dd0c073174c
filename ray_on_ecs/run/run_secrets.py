"""The secrets of a run from its command to its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from ray_on_ecs import secrets
from ray_on_ecs.config import JOB_VARIABLE, RunConfig
from ray_on_ecs.errors import Interrupted, TrainingError, UsageError, one_line
from ray_on_ecs.storage.lock import HeldError
from ray_on_ecs.storage.run_storage import RunStorage


def take(config: RunConfig) -> dict[str, str]:
    """Return the values to store, as `take_from_environment`; `ray-on-ecs run` has already stored those of a job."""
    return {} if JOB_VARIABLE in os.environ else secrets.take_from_environment(config.secret)


def check_repeated(config: RunConfig, storage: RunStorage) -> None:
    """Raise UsageError if the run had a secret that this command lacks: its value would no longer be masked."""
    earlier = secrets.earlier_items(storage.read_settings())
    names = secrets.parse(config.secret).keys()
    lacking = [secret for secret in earlier if secret.partition("=")[0] not in names]
    if lacking:
        flags = " ".join(f"--secret {secret}" for secret in lacking)
        raise UsageError(
            f"--secret: run {storage.run_name!r} was started with {flags}; type it again, or use another --run-name"
        )


@contextmanager
def till_end(
    config: RunConfig, storage: RunStorage, values: Mapping[str, str], is_ours: Callable[[], bool] = lambda: True
) -> Generator[None]:
    """Have the run's secrets stored until the block ends.

    They stay if another command has the run (`is_ours`), or if a job is interrupted, since the head may resubmit it.
    `values` are those that are not stored yet.

    Raises:
        UsageError: A secret is not there.
    """
    if values:
        secrets.store(storage.uri).put(values)
    is_job = JOB_VARIABLE in os.environ
    stays = is_job  # unless an end is known to be final
    try:
        secrets.read(config.secret, storage.uri)  # as the workers do, which may have to be started first
        yield
        stays = False
    except TrainingError as end:
        stays = isinstance(end, HeldError) or (is_job and isinstance(end, Interrupted))
        raise
    finally:
        names = secrets.stored_names(config.secret)
        if names and not stays and is_ours():
            try:
                secrets.store(storage.uri).delete(names)
            except (OSError, TrainingError) as cause:  # the run ends as it does without it
                print(f"ray-on-ecs: {', '.join(names)} could not be deleted ({one_line(cause)})", flush=True)
