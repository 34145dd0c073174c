"""The packages of a script's requirements file, in a virtual environment on top of the one that runs this program.

It sees the packages that are installed here and adds those of the file, so torch and Ray need not be installed again.
pip reads the file in its place, as when its user types `pip install -r FILE` in the folder with the code. One worker
resolves it for all nodes of a run, and the versions are stored with the run. Each node installs them once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.periodic import run_every
from ray_on_ecs.run import inline_metadata
from ray_on_ecs.secrets import Masker
from ray_on_ecs.storage import layout, node_cache
from ray_on_ecs.storage.run_storage import RunStorage

logger = logging.getLogger(__name__)

LAST_LINES = 3
# Interval of the progress lines of a long installation.
NEWS_SECONDS = 30.0
# TensorFlow with CUDA has 6 GiB.
ROOM_BYTES = 8 * 2**30
# Lines of a requirements file: `-r other.txt`, and `name @ file:///place` as `pip freeze` writes it in conda.
OTHER_FILE = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[\s=]*[\"']?(.+?)[\"']?\s*(?:\s#.*)?$", re.MULTILINE)
LOCAL_PATH = re.compile(r"^\s*([^#\s][^@#\n]*?)\s*@\s*file://(/[^\s;#]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resolution:
    """The packages that pip has chosen for a requirements file, in addition to the installed ones.

    Attributes:
        source: A hash of the file, of the files that it names, and of Python's version.
        versions: The versions of packages from an index or an archive, by name.
        commits: The addresses of packages from a repository, `git+https://...@commit`, by name.
        code: The archive of the code if some are from the disk, whose content may change with it; otherwise empty.
    """

    source: str
    versions: dict[str, str]
    commits: dict[str, str]
    code: str


class Requirements:
    """A requirements file on this node.

    Args:
        folder: The folder with the code, where relative paths of packages begin, as pip has it.
        name: The file's path in it, or that of a script with inline metadata.
        code: The archive of the code.
        variables: Environment variables for pip, such as `PIP_INDEX_URL`.
        secrets: More variables, whose values are never shown.
    """

    def __init__(
        self, folder: Path, name: str, code: str, variables: Mapping[str, str], secrets: Mapping[str, str] | None = None
    ) -> None:
        self._folder, self._name, self._code, self._secrets = folder, name, code, secrets or {}
        self._variables = {**variables, **self._secrets}
        self._mask = Masker(self._secrets.values())
        if name.endswith(".py"):
            inline_metadata.check_python(folder / name)
            self._file = tempfile.NamedTemporaryFile("w", suffix=".txt")  # noqa: SIM115  it lasts as long as this
            self._file.write("\n".join(inline_metadata.dependencies(folder / name)))
            self._file.flush()
            self._name = self._file.name

    def resolve(self, storage: RunStorage) -> Resolution:
        """Resolve the file; return the run's earlier resolution if neither it nor packages on the disk have changed.

        Raises:
            UsageError: pip can't find the packages; the message has its last line.
        """
        source = self._hash_of_files()
        document = storage.read_json(layout.PACKAGES)
        with suppress(TypeError):  # an earlier version has written it, or there is none
            resolution = Resolution(**document)
            if resolution.source == source and resolution.code in ("", self._code):
                return resolution
        logger.info("resolving the packages of --requirements")
        with tempfile.TemporaryDirectory() as sources:  # of packages that would be installed by -e from a repository
            packages = self._pip(sys.executable, "--dry-run", "--src", sources, "-r", self._name)
        resolution = self._resolution(source, packages)
        storage.write_json(layout.PACKAGES, asdict(resolution))
        return resolution

    def install(self, resolution: Resolution) -> str:
        """Return a Python interpreter with these packages, which this node installs unless it has.

        Raises:
            UsageError: pip can't install them; the message has its last line.
        """

        def make(target: Path) -> None:
            node_cache.make_room(ROOM_BYTES)
            logger.info("installing the packages of --requirements on this node")
            started_at = time.monotonic()
            venv.create(target, symlinks=True, with_pip=False)
            _see_packages_of_this_interpreter(target)
            self._install(str(target / "bin" / "python"), resolution)
            logger.info(f"installed them in {time.monotonic() - started_at:.0f} s")

        folder = str(self._folder) if resolution.code else None  # others may be used in their place (-e)
        key = json.dumps([sys.version, sys.prefix, asdict(resolution), folder])
        return str(node_cache.cached("packages", key, make) / "bin" / "python")

    def _resolution(self, source: str, packages: Sequence[Mapping[str, Any]]) -> Resolution:
        versions: dict[str, str] = {}
        is_local = False
        for package in packages:
            download = package["download_info"]
            if "archive_info" in download:
                versions[package["metadata"]["name"]] = package["metadata"]["version"]
            is_local = is_local or (download["url"].startswith("file:") and "vcs_info" not in download)
        return Resolution(source, versions, self._commits(packages), self._code if is_local else "")

    def _install(self, python: str, resolution: Resolution) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.writelines(f"{name}=={version}\n" for name, version in resolution.versions.items())
            file.flush()
            commits = self._commits(self._pip(python, "-r", self._name, "-c", file.name))
        # A constraint can't hold a branch at a commit.
        moved = [url for name, url in resolution.commits.items() if commits.get(name) != url]
        if moved:
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:  # where pip reads variables
                file.writelines(f"{url}\n" for url in moved)
                file.flush()
                self._pip(python, "--no-deps", "--force-reinstall", "-r", file.name)

    def _pip(self, python: str, *arguments: str) -> list[dict[str, Any]]:
        """Run `pip install`; return the packages of https://pip.pypa.io/en/stable/reference/installation-report."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            # -P: a file of the user's folder may have the name of a module of Python's.
            command = [sys.executable, "-P", "-m", "pip", "--python", python, "install", "--no-input", *arguments]
            command += ["--report", str(report), "--disable-pip-version-check", "--progress-bar=off"]
            status, lines = _run(command, self._folder, self._variables, self._mask)
            if status == 0:
                return json.loads(report.read_text())["install"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise UsageError(f"--requirements: pip can't install them ({one_line(' '.join(errors[-LAST_LINES:]))})")

    def _commits(self, packages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the addresses of packages from a repository, with secrets as `${NAME}` for pip."""
        commits: dict[str, str] = {}
        for package in packages:
            download = package["download_info"]
            repository = download.get("vcs_info")
            if not repository:
                continue
            folder = f"#subdirectory={download['subdirectory']}" if "subdirectory" in download else ""
            url = f"{repository['vcs']}+{download['url']}@{repository['commit_id']}{folder}"
            for name, value in self._secrets.items():
                url = url.replace(value, f"${{{name}}}")
            commits[package["metadata"]["name"]] = url
        return commits

    def _hash_of_files(self) -> str:
        """Return a hash of the file and of the files that it names.

        Raises:
            UsageError: It isn't on this node, or names a place of another machine.
        """
        texts = _texts(str(self._folder / self._name), {})
        if not texts:
            raise UsageError(
                f"--requirements: {self._name!r} is not in {self._folder} on this node; it may be that .gitignore or "
                ".rayignore keeps it from being uploaded"
            )
        for text in texts.values():
            for name, path in LOCAL_PATH.findall(text):
                if "$" not in path and not os.path.exists(unquote(path)):
                    raise UsageError(
                        f"--requirements: '{name} @ file://{path}' is on another machine; give a version, as pip list "
                        "--format=freeze writes it"
                    )
        return hashlib.sha256(json.dumps([sys.version, *texts.values()]).encode()).hexdigest()


def _texts(path: str, texts: dict[str, str]) -> dict[str, str]:
    """Add the texts of a requirements file and of the files that it names, relative to it; return all by path."""
    if path not in texts and os.path.isfile(path):
        text = Path(path).read_text(errors="replace")
        texts[path] = text
        for other in OTHER_FILE.findall(text):
            _texts(os.path.normpath(Path(path).parent / other), texts)
    return texts


def _see_packages_of_this_interpreter(target: Path) -> None:
    library = sysconfig.get_path("purelib", scheme="venv", vars={"base": str(target), "platbase": str(target)})
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in paths]  # so that their own .pth files count, too
    Path(library, "inherited.pth").write_text("".join(lines))


def _run(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], mask: Callable[[str], str] = str
) -> tuple[int, list[str]]:
    """Run a command that may take minutes; return its exit status and the lines it wrote, without secrets."""
    lines: list[str] = []
    environment = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def show_progress() -> None:
        logger.info(f"still installing: {lines[-1] if lines else 'pip starts'}")

    with process, run_every(NEWS_SECONDS, show_progress, "pip"):
        for line in process.stdout or ():
            lines.append(mask(line.strip()))
    return process.returncode, lines
