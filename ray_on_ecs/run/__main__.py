"""`python -P -m ray_on_ecs.run URI`: the driver of a run, the job that `ray-on-ecs run` submits."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ray_on_ecs.command import RAY_SETTINGS, exit_status
from ray_on_ecs.errors import UsageError

for name, value in RAY_SETTINGS.items():  # before Ray is imported
    os.environ.setdefault(name, value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the run of a folder; return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status(lambda: _run(words), "interrupted")


def _run(words: Sequence[str]) -> int:
    if len(words) != 1:
        raise UsageError("python -m ray_on_ecs.run takes the folder of a run; ray-on-ecs run starts one")
    # A second to import is not for a wrong address, and Ray Train not for a run that is queued.
    from ray_on_ecs.run import admission

    with admission.admit(words[0]) as admitted:
        from ray_on_ecs.run.driver import run

        run(admitted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
