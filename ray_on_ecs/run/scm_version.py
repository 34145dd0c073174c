"""Versions that packages of the user's folder take from git, for their builds on a node, which has no repository.

Most such tools read `PKG-INFO`, with which a source distribution has its version, and the others a variable, which also
reaches other packages that pip builds by them. SETUPTOOLS_SCM_PRETEND_VERSION would reach those of most tools.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ray_on_ecs.names import is_inside

LOCAL = re.compile(r"^\s*(?:(?:-e|--editable)[\s=]*)?[\"']?([^\s#;\[\"']+)", re.MULTILINE)
TOOLS = re.compile(
    r"setuptools[-_]scm|vcs[-_]versioning|hatch[-_]vcs|flit[-_]scm|versioningit|pbr\b|dynamic[-_]versioning"
    r"|setuptools[-_]git[-_]versioning|versioneer|dunamai|source\s*=\s*[\"']scm"
)
VARIABLES = ("POETRY_DYNAMIC_VERSIONING_BYPASS", "UV_DYNAMIC_VERSIONING_BYPASS", "PDM_BUILD_SCM_VERSION")
PROJECTS = ("setup.cfg", "pyproject.toml", "setup.py")
# pbr reads only a PKG-INFO with the project's name.
NAME = re.compile(r"^name\s*[=:]\s*[\"']?([^\s\"']+)", re.MULTILINE)
PKG_INFO = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def use(version: str, folder: Path, requirements: Iterable[str]) -> dict[str, str]:
    """Give projects that requirements name the version of the code's commit, if they take theirs from git.

    Returns variables for pip.
    """
    if not version:
        return {}
    variables: dict[str, str] = {}
    for name in {name for text in requirements for name in LOCAL.findall(text)}:
        project = folder / name.removeprefix("file:")
        texts = [(project / each).read_text(errors="replace") for each in PROJECTS if (project / each).is_file()]
        if not any(map(TOOLS.search, texts)) or not is_inside(project, folder):
            continue
        variables = dict.fromkeys(VARIABLES, version)
        if not (project / "PKG-INFO").exists():
            found = NAME.search("\n".join(texts))
            own = found[1] if found else project.resolve().name
            (project / "PKG-INFO").write_text(PKG_INFO.format(name=own, version=version))
    return variables
