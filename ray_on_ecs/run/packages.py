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
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.periodic import run_every
from ray_on_ecs.run import inline_metadata, scm_version
from ray_on_ecs.run.pip_output import reason_of
from ray_on_ecs.secrets import Masker
from ray_on_ecs.storage import layout, node_cache
from ray_on_ecs.storage.run_storage import RunStorage

if TYPE_CHECKING:
    from packaging.requirements import Requirement

logger = logging.getLogger(__name__)

# Of pip's output, in the run's log after a failure.
LAST_LINES = 30
# Interval of the progress lines of a long installation.
NEWS_SECONDS = 30.0
# pip's lines about an installed package that another version hides.
KEPT = re.compile(r"\s+(?:Attempting uninstall|Found existing installation|Not uninstalling|Can't uninstall)")
# Number of the way in which environments are made; those of another number are not used.
FORMAT = 2
# TensorFlow with CUDA has 6 GiB.
ROOM_BYTES = 8 * 2**30
# Lines of a requirements file: `-r other.txt`, and `name @ file:///place` as `pip freeze` writes it in conda.
OTHER_FILE = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[\s=]*[\"']?(.+?)[\"']?\s*(?:\s#.*)?$", re.MULTILINE)
OPTIONS = re.compile(
    r"^\s*(?:-[if]|--(?:extra-)?index-url|--find-links|--(?:trusted-host|no-binary|only-binary|pre|no-index))\b.*",
    re.MULTILINE,
)
LOCAL_PATH = re.compile(r"^\s*([^#\s][^@#\n]*?)\s*@\s*file://(/[^\s;#]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resolution:
    """The packages that pip has chosen for a requirements file, in addition to the installed ones.

    Attributes:
        source: A hash of the file, of the files that it names, and of Python's version.
        versions: The versions of packages from an index or an archive, by name.
        indexed: The names of those from an index.
        commits: The addresses of packages from a repository, `git+https://...@commit`, by name.
        code: The archive of the code if some are from the disk, whose content may change with it; otherwise empty.
    """

    source: str
    versions: dict[str, str]
    indexed: list[str]
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
        version: The version of the code's commit, for packages of the folder that take theirs from git.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        code: str,
        variables: Mapping[str, str],
        secrets: Mapping[str, str] | None = None,
        version: str = "",
    ) -> None:
        self._version = version
        self._folder, self._name, self._code, self._secrets = folder, name, code, secrets or {}
        self._variables = {**variables, **self._secrets}
        self._mask = Masker(self._secrets.values())
        self._source = "--requirements"
        if name.endswith(".py"):
            self._source = f"the inline metadata of {name}"
            inline_metadata.check_python(folder / name)
            self._file = tempfile.NamedTemporaryFile("w", suffix=".txt")  # noqa: SIM115  it lasts as long as this
            self._file.write("\n".join(inline_metadata.dependencies(folder / name)))
            self._file.flush()
            self._name = self._file.name

    def resolve(self, storage: RunStorage) -> Resolution:
        """Resolve the file; return the run's earlier resolution if neither it nor packages on the disk have changed.

        Raises:
            UsageError: pip can't find the packages; the message has its reason.
        """
        source = self._hash_of_files()
        document = storage.read_json(layout.PACKAGES)
        with suppress(TypeError):  # an earlier version has written it, or there is none
            resolution = Resolution(**document)
            if resolution.source == source and resolution.code in ("", self._code):
                return resolution
        logger.info(f"resolving the packages of {self._source}")
        with tempfile.TemporaryDirectory() as sources:  # of packages that would be installed by -e from a repository
            packages = self._pip(sys.executable, "--dry-run", "--src", sources, "-r", self._name)
        for line in _conflicts({each["metadata"]["name"]: each["metadata"]["version"] for each in packages}):
            logger.info(line)
        if not packages:
            logger.info("all of them are installed already")
        resolution = self._resolution(source, packages)
        storage.write_json(layout.PACKAGES, asdict(resolution))
        return resolution

    def install(self, resolution: Resolution) -> str:
        """Return a Python with these packages, which this node installs unless it has; UsageError if pip can't."""
        if not (resolution.versions or resolution.commits or resolution.code):
            return sys.executable
        if not resolution.code:
            return _environment(asdict(resolution), lambda python: self._install(python, resolution))
        # A package of the folder changes with the code, and others may be used in its place (-e): the rest is shared.
        texts = self._texts().values()
        pins = [f"{name}=={resolution.versions[name]}" for name in resolution.indexed]
        lines = [*(line for text in texts for line in OPTIONS.findall(text)), *pins]
        shared = _environment(lines, lambda python: self._install_lines(python, lines, "--no-deps")) if pins else None
        key = [lines, asdict(resolution), str(self._folder)]
        return _environment(key, lambda python: self._install(python, resolution), shared)

    def _resolution(self, source: str, packages: Sequence[Mapping[str, Any]]) -> Resolution:
        versions: dict[str, str] = {}
        indexed: list[str] = []
        is_local = False
        for package in packages:
            download = package["download_info"]
            if "archive_info" in download:
                versions[package["metadata"]["name"]] = package["metadata"]["version"]
                indexed += [] if package["is_direct"] else [package["metadata"]["name"]]
            is_local = is_local or (download["url"].startswith("file:") and "vcs_info" not in download)
        return Resolution(source, versions, indexed, self._commits(packages), self._code if is_local else "")

    def _install(self, python: str, resolution: Resolution) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.writelines(f"{name}=={version}\n" for name, version in resolution.versions.items())
            file.flush()
            commits = self._commits(self._pip(python, "-r", self._name, "-c", file.name))
        # A constraint can't hold a branch at a commit.
        moved = [url for name, url in resolution.commits.items() if commits.get(name) != url]
        if moved:
            self._install_lines(python, moved, "--no-deps", "--force-reinstall")

    def _install_lines(self, python: str, lines: Sequence[str], *options: str) -> None:
        place = (self._folder / self._name).parent  # where relative paths of --find-links begin
        with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=place) as file:  # where pip reads variables
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            self._pip(python, *options, "-r", file.name)

    def _pip(self, python: str, *arguments: str) -> list[dict[str, Any]]:
        """Run `pip install`; return the packages of https://pip.pypa.io/en/stable/reference/installation-report."""
        texts = self._texts().values()
        variables = {**scm_version.use(self._version, self._folder, texts), **self._variables}
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            # -P: a file of the user's folder may have the name of a module of Python's.
            command = [sys.executable, "-P", "-m", "pip", "--python", python, "install", "--no-input", *arguments]
            command += ["--report", str(report), "--disable-pip-version-check", "--progress-bar=off"]
            status, lines = _run(command, self._folder, variables, self._mask)
            if status == 0:
                return json.loads(report.read_text())["install"]
            details: list[str] = []
            if any("(from versions: none)" in line for line in lines):  # say what it has passed over
                _, details = _run([*command, "-vv"], self._folder, variables, self._mask)
        logger.info("\n".join(["pip's last lines:", *lines[-LAST_LINES:]]))
        raise UsageError(f"{self._source}: pip can't install them ({one_line(reason_of(lines, details))})")

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

    def _texts(self) -> dict[str, str]:
        """Return the texts of the file and of the files that it names, by path."""
        return _texts(str(self._folder / self._name), {})

    def _hash_of_files(self) -> str:
        """Return a hash of the file and those that it names.

        Raises:
            UsageError: The file isn't on this node, or names a place of another machine.
        """
        texts = self._texts()
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


def _conflicts(versions: Mapping[str, str]) -> list[str]:
    """Return a line for each installed package that these versions of others break."""
    from packaging.utils import canonicalize_name

    new = {canonicalize_name(name): version for name, version in versions.items()}
    found = [each for each in distributions(path=_package_folders()) if each.metadata["Name"]]
    installed = {canonicalize_name(each.name): each for each in reversed(found)}  # Python takes the first one
    lines = []
    for package in (installed[name] for name in sorted(installed.keys() - new.keys())):
        for needed in _needs(package):
            name = canonicalize_name(needed.name)
            pair = [installed[name].version, new[name]] if name in installed and name in new else []
            if [needed.specifier.contains(version, True) for version in pair] == [True, False]:  # not broken before
                needs = f"{package.name} {package.version}, which is installed, needs {name}{needed.specifier}"
                cure = f"if the script uses {package.name}, add it to the file"
                lines.append(f"{needs}, and the file brings {new[name]}: {cure}")
    return lines


def _needs(package: Distribution) -> Iterator[Requirement]:
    from packaging.requirements import InvalidRequirement, Requirement

    for text in package.requires or ():
        with suppress(InvalidRequirement):
            needed = Requirement(text)
            if not needed.marker or needed.marker.evaluate({"extra": ""}):
                yield needed


def _package_folders() -> list[str]:
    """Return the folders with the packages that this interpreter sees."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]


def _environment(key: object, install: Callable[[str], None], shared: str | None = None) -> str:
    """Return the interpreter of a virtual environment that sees the packages here; make it unless it is there.

    `key` distinguishes it from others; `install` takes its interpreter. It starts as a copy of the environment with the
    interpreter `shared`, because a program finds packages and data files only in the environment that it lies in.
    """

    def make(target: Path) -> None:
        node_cache.make_room(ROOM_BYTES)
        logger.info("installing packages on this node")
        started_at = time.monotonic()
        if shared:
            # The files are links, since pip replaces a file and does not write to it.
            shutil.copytree(Path(shared).parents[1], target, symlinks=True, copy_function=os.link)
            _adopt(Path(shared).parent, Path(shared).parent, target / "bin")
        else:
            venv.create(target, symlinks=True, with_pip=False)
            # site also reads the .pth files in these folders.
            lines = [f"import site; site.addsitedir({path!r})\n" for path in _package_folders()]
            place = dict.fromkeys(("base", "platbase"), str(target))
            Path(sysconfig.get_path("purelib", "venv", place), "inherited.pth").write_text("".join(lines))
            for folder in (Path(sys.executable).parent, Path(site.getuserbase(), "bin")):
                _adopt(folder, Path(sys.executable).parent, target / "bin")
        install(str(target / "bin" / "python"))
        logger.info(f"installed them in {time.monotonic() - started_at:.0f} s")

    text = json.dumps([FORMAT, sys.version, sys.prefix, key])
    return str(node_cache.cached("packages", text, make) / "bin" / "python")


def _adopt(folder: Path, interpreters: Path, target: Path) -> None:
    """Copy Python programs, such as torchrun, from a folder to one with another interpreter, which runs the copies.

    An interpreter in `interpreters` runs the originals. The first lines of a copy are those that pip writes if the path
    of the interpreter is long or has a space.
    """
    old = rb"#!(/bin/sh\n'''exec' )?[\"']?" + re.escape(os.fsencode(interpreters)) + rb"/(python[\d.]*)[\"']?(.*\n)"
    for program in folder.glob("*"):
        if program.is_symlink() or not program.is_file() or not os.access(program, os.R_OK | os.X_OK):
            continue
        with program.open("rb") as file:
            text = file.read(2)
            text += file.read() if text == b"#!" else b""
        if found := re.match(old, text):
            is_pips, name, flags = found.groups()
            python = os.fsencode(shlex.quote(str(target / os.fsdecode(name))))
            rest = flags if is_pips else flags.rstrip() + b" \"$0\" \"$@\"\n' '''\n"
            copy = target / program.name
            copy.unlink(missing_ok=True)
            copy.write_bytes(b"#!/bin/sh\n'''exec' " + python + rest + text[found.end() :])
            copy.chmod(0o755)


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
        news = (line.strip() for line in reversed(lines) if line.strip() and not KEPT.match(line))
        logger.info(f"still installing: {next(news, 'pip starts')}")

    with process, run_every(NEWS_SECONDS, show_progress, "pip"):
        for line in process.stdout or ():
            lines.append(mask(line.rstrip()))
    return process.returncode, lines
