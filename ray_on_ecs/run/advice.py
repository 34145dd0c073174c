"""Way out of an error of a script, for the line that ends its run: a missing module, and what Ray refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ray_on_ecs.config import python_path

MISSING = re.compile(r"No module named '?([\w.]+)'?(; '[\w.]+' is not a package)?")
# https://docs.ray.io/en/latest/ray-core/api/doc/ray.init.html
OF_CLUSTER = re.compile(r"When connecting to an existing cluster, (\w+(?: and \w+)*) must not be provided")
# How many folders above a module may have to be on the import path.
DEPTH = 2


def advice(text: str, folder: Path, variables: Mapping[str, str]) -> str:
    """Return what mends the error of a line, by the script's folder and the variables of `--env`; or an empty text."""
    if found := OF_CLUSTER.search(text):
        return f"leave {found[1]} out of ray.init(), because a Ray program joins the cluster of its run"
    found = MISSING.search(text)
    return _missing(found[1], bool(found[2]), folder, variables) if found else ""


def _missing(name: str, is_hidden: bool, folder: Path, variables: Mapping[str, str]) -> str:
    top, _, inner = name.partition(".")
    places = _places(top, folder)
    here = os.path.relpath(places[0], folder) if places else ""
    if inner and places:
        fault = f"hides the package {top}; rename it" if is_hidden else f"does not have it; correct the name {name}"
        return f"{top} in {'the folder' if here == '.' else here} of the code {fault}"
    if inner:  # Python has found the package itself
        way_out = "another version of it may have the module: name that in a file for --requirements"
        return f"{top} is installed, and {way_out}"
    given = python_path(variables)
    if places and here not in map(os.path.normpath, given):
        path = os.pathsep.join((here, *given))
        return f"{top} is code in {'the folder itself' if here == '.' else here}: --env PYTHONPATH={path} finds it"
    return "name its package in a file for --requirements"


def _places(top: str, folder: Path) -> list[Path]:
    """Return the folders of the code that have a module or a package of this name, the outermost first."""
    found: list[Path] = []
    for depth in range(DEPTH + 1):
        pattern = "*/" * depth + top
        found += [file.parent for file in sorted(folder.glob(f"{pattern}.py"))]
        found += [place.parent for place in sorted(folder.glob(pattern)) if any(place.glob("*.py"))]
    return found
