"""`python -P -m ray_on_ecs.run.program_main [-m] SCRIPT ...`: run a Ray program whose results lie in its run's folder.

Ray 2.60 has no environment variable for the default of `RunConfig(storage_path=...)`, and names a run after the time,
so that a program that is started again would not find its checkpoints. Both defaults are set before the script begins.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys

STORAGE_VARIABLE = "RAY_ON_ECS_RAY_STORAGE"


def use_run_folder() -> None:
    """Make the run's folder the storage path of every RunConfig that names none."""
    from ray.train import constants

    constants.DEFAULT_STORAGE_PATH = os.environ[STORAGE_VARIABLE]


def use_run_name() -> None:
    """Name every RunConfig of Ray Train that has no name after the run; the second one `NAME-2`."""
    from ray.train.v2.api import config

    numbers = itertools.count(1)
    name = os.environ["RUN_NAME"]

    def next_name(include_ms: bool = False) -> str:
        number = next(numbers)
        return name if number == 1 else f"{name}-{number}"

    config.date_str = next_name  # ty: ignore[invalid-assignment]


def main() -> None:
    """Run the script as `python SCRIPT` would."""
    use_run_folder()
    use_run_name()
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2 if is_module else 1 :]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
