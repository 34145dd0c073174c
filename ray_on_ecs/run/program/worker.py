"""The worker processes of a Ray program: each begins with the user's code, packages, network and storage."""

from __future__ import annotations

import json
import logging
import os
import site
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from ray_on_ecs import arguments, logs, secrets
from ray_on_ecs.config import RunConfig, python_path
from ray_on_ecs.errors import one_line
from ray_on_ecs.run import inputs, nccl_interface
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.packages import Requirements, Resolution
from ray_on_ecs.run.program import main as program_main
from ray_on_ecs.storage import layout, node_cache
from ray_on_ecs.storage.run_storage import RunStorage

logger = logging.getLogger(__name__)

# A JSON document in the environment of each worker process: see `needs_of`.
NEEDS_VARIABLE = "RAY_ON_ECS_NEEDS"
# The folder of a process to which the program gave a working_dir. (Ray's context is not ready yet.)
WORKING_DIRS = "working_dir_files"


def needs_of(config: RunConfig, code: Code, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the needs of a worker process, for a JSON document; without the run's folder on the driver's node."""
    return {
        "code": asdict(code),
        "beside": "" if config.module else os.path.dirname(config.command[0]),
        "inputs": dict(sources),
        "requirements": config.requirements_in_folder,
        "variables": config.variables,
        "secrets": config.secret,
    }


def set_up() -> None:
    """Prepare this process; Ray calls it at the start of every worker process of the program.

    Raises:
        Exception: It can't be prepared. Ray ends it, and shows the line that is printed here.
    """
    logs.set_up()
    try:
        _set_up(json.loads(os.environ[NEEDS_VARIABLE]))
    except Exception as cause:
        logger.error(f"ray-on-ecs: a worker of the program can't begin: {one_line(cause)}")
        raise


def _set_up(needs: Mapping[str, Any]) -> None:
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    os.environ.update(nccl_interface.variables(head, os.environ))  # before a process group
    program_main.use_run_folder()
    values = secrets.read_on_node(needs["secrets"], os.environ["RUN_URI"])
    os.environ.update(values)
    secrets.mask_own_output(values.values())  # the dashboard shows it as it is printed here
    os.environ.update(as_given(needs["variables"]))
    folder = _code_folder(needs)
    os.environ["RUN_DIR"] = str(folder)
    if WORKING_DIRS not in Path.cwd().parts:
        os.chdir(folder)
    for name, source in needs["inputs"].items():
        os.environ[f"{arguments.INPUT}{name}"] = inputs.fetch(source)
    if needs["requirements"]:
        _use_packages(folder, needs, values)
    # Relative folders of PYTHONPATH are in the code, and Ray started this process elsewhere.
    if paths := [str(folder / path) for path in python_path(os.environ)]:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    # Last, so that a user's queue.py does not hide Python's from Ray.
    sys.path += dict.fromkeys([str(folder / needs["beside"]), str(folder)])


def as_given(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--env` as the script has them, which Ray expands: `$HOME` in a value is text."""
    return {name: value for name, value in variables.items() if os.environ.get(name) == os.path.expandvars(value)}


def _code_folder(needs: Mapping[str, Any]) -> Path:
    """Return the run's folder on the driver's node, and a copy of the code for this run on another one."""
    folder = Path(needs["folder"])
    if folder.is_dir():
        return folder
    code = Code(**needs["code"])
    key = f"{os.environ['RUN_URI']} {code.archive}"
    return node_cache.cached("code", key, lambda place: code.place(place / code.name)) / code.name


def _use_packages(folder: Path, needs: Mapping[str, Any], values: Mapping[str, str]) -> None:
    """Install the packages that the run has resolved, unless this node has them, and put them first."""
    base, _, name = os.environ["RUN_URI"].rpartition("/")
    resolution = Resolution(**RunStorage.open(base, name).read_json(layout.PACKAGES))
    code = Code(**needs["code"])
    requirements = Requirements(folder, needs["requirements"], code.archive, needs["variables"], values, code.version)
    python = Path(requirements.install(resolution))
    sys.executable = str(python)  # for subprocesses
    os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    before = list(sys.path)
    for packages in python.parent.parent.glob("lib/python*/site-packages"):
        site.addsitedir(str(packages))
    sys.path[:] = [entry for entry in sys.path if entry not in before] + before
