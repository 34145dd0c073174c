"""`python -P -m ray_on_ecs.run.program.main [-m] SCRIPT ...`: run a Ray program whose results lie in its run's folder.

Ray 2.60 has no environment variable for the default of `RunConfig(storage_path=...)`, and names a run after the time,
so that a program that is started again would not find its checkpoints. Both defaults are set before the script begins.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import runpy
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

STORAGE_VARIABLE = "RAY_ON_ECS_RAY_STORAGE"


def use_run_folder() -> None:
    """Make the run's folder the storage path of every RunConfig that names none."""

    def patch(constants: Any) -> None:
        constants.DEFAULT_STORAGE_PATH = os.environ[STORAGE_VARIABLE]

    after_import("ray.train.constants", patch)


def use_run_name() -> None:
    """Give every RunConfig of Ray Train without a name one with the run's; the second one ends with `-2`."""
    numbers = itertools.count(1)
    name = os.environ["RUN_NAME"]

    def next_name(include_ms: bool = False) -> str:
        number = next(numbers)
        return name if number == 1 else f"{name}-{number}"

    def patch(config: Any) -> None:
        config.date_str = next_name

    after_import("ray.train.v2.api.config", patch)


def after_import(name: str, patch: Callable[[Any], None]) -> None:
    """Call a function with a module once that is imported.

    Importing it here would take a second, and read the variables that a script may still set for Ray.
    """
    if name in sys.modules:
        patch(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Patch(name, patch))


class _Patch(MetaPathFinder):
    """Finds one module as Python does, and changes it after its import."""

    def __init__(self, name: str, patch: Callable[[Any], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            self._patch(module)

        loader.exec_module = execute_and_patch
        return spec


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
