"""The secrets of a run from its command to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from ray_on_ecs import secrets
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import Interrupted, TrainingError, UsageError, one_line
from ray_on_ecs.storage.lock import HeldError
from ray_on_ecs.storage.run_storage import RunStorage

logger = logging.getLogger(__name__)


def check_repeated(config: RunConfig, settings: Mapping[str, Any]) -> None:
    """Raise UsageError if the run's earlier settings have a secret that this command lacks: it would not be masked."""
    earlier = secrets.earlier_items(settings)
    names = secrets.parse(config.secret).keys()
    lacking = [secret for secret in earlier if secret.partition("=")[0] not in names]
    if lacking:
        flags = " ".join(f"--secret {secret}" for secret in lacking)
        raise UsageError(
            f"--secret: run {config.run_name!r} was started with {flags}; type it again, or use another --run-name"
        )


@contextmanager
def till_end(config: RunConfig, storage: RunStorage, is_ours: Callable[[], bool] = lambda: True) -> Generator[None]:
    """Delete the run's secrets, which its command has stored, when the block ends.

    They stay if another command has the run, or if this one is interrupted, since the head may resubmit it.

    Raises:
        UsageError: A secret is not there.
    """
    stays = True  # unless an end is known to be final
    try:
        secrets.read(config.secret, storage.uri)  # as the workers do, which may have to be started first
        yield
        stays = False
    except TrainingError as end:
        stays = isinstance(end, HeldError | Interrupted)
        raise
    finally:
        names = secrets.stored_names(config.secret)
        if names and not stays and is_ours():
            try:
                secrets.store(storage.uri).delete(names)
            except (OSError, TrainingError) as cause:  # the run ends as it does without it
                logger.warning(f"{', '.join(names)} could not be deleted ({one_line(cause)})")
