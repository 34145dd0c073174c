"""The worker processes of a Ray program: each begins with the user's code, packages, network and storage."""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_on_ecs import node_cache
from ray_on_ecs.run import nccl_interface, program_main
from ray_on_ecs.run.code import Code
from ray_on_ecs.run.config import ScriptConfig

# A JSON document in the environment of each worker process: see `code_of`.
CODE_VARIABLE = "RAY_ON_ECS_CODE"


def code_of(config: ScriptConfig, folder: str) -> dict[str, Any]:
    """Return what a worker process needs to find the user's code and packages.

    Args:
        config: The run's settings.
        folder: The run's folder on the driver's node.
    """
    code = Code.of(config)
    return {
        "name": code.name,
        "archive": code.archive,
        "links": {name: str(path) for name, path in code.links.items()},
        "folder": folder,
        "requirements": config.requirements_in_folder,
        "variables": config.variables,
    }


def set_up() -> None:
    """Prepare this process; Ray calls it at the start of every worker process of the program."""
    nccl_interface.use_route_to_head()
    program_main.use_run_folder()
    known = json.loads(os.environ[CODE_VARIABLE])
    folder = _code_folder(known)
    os.chdir(folder)
    if known["requirements"]:
        _use_packages(folder, known)
    # Last, so that a user's queue.py does not hide Python's from Ray.
    sys.path.append(str(folder))


def _code_folder(known: Mapping[str, Any]) -> Path:
    """Return the run's folder on the driver's node, and a copy of the code on another one."""
    if (folder := Path(known["folder"])).is_dir():
        return folder
    code = Code(known["name"], known["archive"], {name: Path(path) for name, path in known["links"].items()})
    return node_cache.cached("code", known["archive"], lambda place: code.place(place / code.name)) / code.name


def _use_packages(folder: Path, known: Mapping[str, Any]) -> None:
    """Install the packages that the run has resolved, unless this node has them, and put them first."""
    from ray_on_ecs.run.packages import Requirements, Resolution
    from ray_on_ecs.tracking import layout
    from ray_on_ecs.tracking.storage import RunStorage

    base, _, name = os.environ["RUN_URI"].rpartition("/")
    resolution = Resolution(**RunStorage.open(base, name).read_json(layout.PACKAGES))
    python = Path(Requirements(folder, known["requirements"], known["variables"]).install(resolution))
    before = list(sys.path)
    for each in python.parent.parent.glob("lib/python*/site-packages"):
        site.addsitedir(str(each))
    sys.path[:] = [each for each in sys.path if each not in before] + before
