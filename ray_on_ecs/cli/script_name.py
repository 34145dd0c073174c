"""SCRIPT as users type it: for a word that the nodes can't start, an error with the command to type instead."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path, PurePath
from typing import NoReturn

from ray_on_ecs.config import RunConfig, python_path
from ray_on_ecs.errors import UsageError
from ray_on_ecs.names import is_inside
from ray_on_ecs.run.program.launchers import LAUNCHER, is_shell_script, leave_out, nested, told, trains_alone

MPI = ("mpirun", "mpiexec", "horovodrun")
# Programs in front of another one, which a run has no need of.
WRAPPER = re.compile(
    r"(?:\S*/)?(?:(?:uv|poetry|pdm|hatch|pipenv|pixi|rye|conda|mamba) run|srun|env|nohup|time|sudo)(?=\s|$)"
)
VARIABLE = re.compile(r"\w+=.*", re.DOTALL)
INTERPRETER = re.compile(r"(?:.*/)?(?:python|pypy)[\d.]*")
# The number of workers among a launcher's flags.
NUMBER = re.compile(r"\s(?:-np?|--nproc(?:[_-]per[_-]node)?|--num[_-](?:gpus|processes))[ =](\d+)(?=\s|$)")
DATA = (".cfg", ".csv", ".ini", ".json", ".md", ".toml", ".txt", ".yaml", ".yml")
# Folders of a project, below which its modules may be.
ROOTS = (".", "src", "lib", "python")
# Scripts that may have a similar name.
PATTERNS = ("*.py", "*/*.py", "*/*/*.py")
CLOSE = 0.7


class ScriptName:
    """SCRIPT of a run, by its settings and the words that were typed before it."""

    def __init__(self, config: RunConfig, flags: Sequence[str]) -> None:
        self._config = config
        self._folder = config.folder
        self._words = list(config.command)
        self._first = self._words[0]
        self._flags = [word for word in flags if word != "--"]

    def check(self) -> None:
        """Raise UsageError unless the nodes can start it, as far as that is known here."""
        path = self._folder / self._first
        if self._config.no_python:
            self._check_program(path)
        elif self._config.module:
            self._check_module()
        elif path.is_file() or (path / "__main__.py").is_file():
            self._check_file(path if path.is_file() else path / "__main__.py")
        else:
            self._refuse_missing(path)

    def check_launcher(self) -> str | None:
        """Return a hint of a launcher in the run; UsageError if each of its workers would train on its own."""
        found = nested(self._config)
        number = self._config.num_workers
        workers = f"each of {number} workers" if isinstance(number, int) else "each worker"
        if found is None and trains_alone(self._config):
            return (
                f"{self._first} has nothing of torch.distributed, so {workers} trains a separate model; "
                "docs/tutorial.md shows what DDP needs, and --num-workers 1 uses one GPU"
            )
        if found is None:
            return None
        what, is_sure = found
        once = self._typed("--per-node", *self._words)
        if not is_sure:
            return f"{what}; if each worker does so, each trains on its own; {once} starts it once on each node"
        flags = _without(self._flags, "--no-python", "-m", "--module")
        program = _program(self._words)
        leave = f"leave it out: {_typed(flags, program)}, or " if program and program != self._words else ""
        leave = "" if told(self._words[: len(self._words) - len(program)]) else leave
        raise UsageError(
            f"SCRIPT: {what}, so {workers} would train on its own; {leave}start it once on each node: {once}"
        )

    def _check_file(self, path: Path) -> None:
        first = self._first
        if not is_inside(path, self._folder):
            if _is_binary(path) or INTERPRETER.fullmatch(first) or LAUNCHER.match(shlex.join(self._words)):
                self._refuse_missing(path)
            self._refuse_outside(path)
        if path.suffix == ".ipynb":
            script = str(PurePath(first).with_suffix(".py"))
            convert = shlex.join(["jupyter", "nbconvert", "--to", "script", first])
            self._refuse(f"{first!r} is a notebook; {convert} makes a script of it", script, *self._words[1:])
        if path.suffix in DATA:
            raise UsageError(f"SCRIPT: {first!r} is not a program; give the script, and its arguments after it")
        if path.is_file() and (is_shell_script(path) or _is_binary(path)):
            self._refuse(f"{first!r} is not a Python file", *self._as_program(path), *self._words[1:])

    def _check_program(self, path: Path) -> None:
        is_path = "/" in self._first and not os.path.isabs(self._first) and "$" not in self._first
        if is_path and not path.exists():
            self._refuse_missing(path)
        if is_path and not is_inside(path, self._folder):
            self._refuse_outside(path)
        fault = "is not executable" if is_path and not os.access(path, os.X_OK) else ""
        if not is_path and path.is_file() and not shutil.which(self._first):
            fault = "is a file of the folder, and not on PATH"
        if fault:
            flags = _without(self._flags, "--no-python")
            self._refuse(f"{self._first!r} {fault}", *self._as_program(path), *self._words[1:], flags=flags)

    def _check_module(self) -> None:
        """Refuse a module that isn't in the folder, and with --local not among the packages here either."""
        first, folder, others = self._first, self._folder, self._words[1:]
        path = python_path(self._config.variables)
        found = [_find(folder / root, first) for root in [".", *path]]
        if True in found and "/" not in first:
            return
        if (folder / first).is_file():
            flags = _without(self._flags, "-m", "--module")
            self._refuse(f"{first!r} is a file, not a module", first, *others, flags=flags)
        if "/" in first:
            self._refuse(f"{first!r} is not a module", first.strip("./").removesuffix(".py").replace("/", "."), *others)
        if self._config.requirements:
            return
        for root in ROOTS[1:] if not path else ():
            if _find(folder / root, first):
                self._refuse(f"{first!r} is a module in {root}/", *self._as_module(root))
        top = first.partition(".")[0]
        is_here = "--local" in self._flags
        if False in found or (is_here and not _is_installed(top)):
            names = [str(name.with_suffix("")).replace("/", ".").removesuffix(".__main__") for name in self._scripts()]
            inner = [name for name in names if name.startswith(f"{first}.")]
            close = inner or get_close_matches(first, names, 1, CLOSE)
            otherwise = "; code below another folder needs --env PYTHONPATH=FOLDER, and a package --requirements FILE"
            self._refuse_similar(f"there is no module {first!r} to run in {folder}", close, otherwise)

    def _refuse_missing(self, path: Path) -> NoReturn:
        """Refuse a word that isn't a file of the folder, by what it is likely to be."""
        first, words = self._first, self._words
        missing = f"there is no file {first!r} in {self._folder}"
        if path.is_dir() and ("/" in first or not (shutil.which(first) or (path / "__init__.py").is_file())):
            names = [os.path.normpath(os.path.join(first, file.name)) for file in sorted(path.glob("[!_]*.py"))]
            self._refuse_similar(f"{first!r} is a folder without __main__.py", names)
        if " " in first.strip():
            self._refuse(f"{missing}; give its words one by one", *leave_out([*first.split(), *words[1:]]))
        pairs = list(takewhile(VARIABLE.fullmatch, words[PurePath(first).name == "env" :]))
        variables = [word for pair in pairs for word in ("--env", pair)]
        if VARIABLE.fullmatch(first):
            self._refuse(f"{first!r} is a variable", *variables, *leave_out(words[len(pairs) :]))
        command = shlex.join(words)
        if found := LAUNCHER.match(command):
            self._refuse_launcher(found[1])
        program = _program(words)
        if found := WRAPPER.match(command):
            if program:
                self._refuse(f"{found[0]!r} is not needed", *variables, *program)
        elif INTERPRETER.fullmatch(first):
            rest = leave_out(["python", *words[1:]])
            if rest[0] != "python":
                self._refuse(f"{first!r} is not needed, since the run has its own Python", *rest)
            self._refuse(f"{first!r} with its flags is a program", "--no-python", *words)
        for root in ROOTS:
            if "." in first and _find(self._folder / root, first):
                self._refuse(f"{first!r} is a module", *self._as_module(root))
        names = self._scripts()
        same = [str(name) for name in names if PurePath(first).name in (name.name, name.stem)]
        same.sort(key=lambda name: name != f"{first}.py")
        close = same or get_close_matches(first, map(str, names), 1, CLOSE)
        if not same and _installs(self._folder, first) and not (self._config.requirements or shutil.which(first)):
            packages = "which this project's package installs; write -e . into a file for --requirements"
            self._refuse(f"{missing}, {packages}", "--requirements", "FILE", "--no-python", *words)
        is_program = shutil.which(first) or _installs(self._folder, first)
        if not same and (is_program or not (close or PurePath(first).suffix or "/" in first)):
            self._refuse(f"{missing}; a program needs --no-python", "--no-python", *words)
        self._refuse_similar(missing, close, "; correct it, or give --working-dir")

    def _refuse_launcher(self, launcher: str) -> NoReturn:
        program = _program(self._words)
        number = NUMBER.search(shlex.join(self._words[: len(self._words) - len(program)]))
        workers = ["--num-workers", number[1]] if number and "--num-workers" not in shlex.join(self._flags) else []
        if launcher in MPI:
            flags = _without(self._flags, "--mpi")
            files = [at for at, word in enumerate(self._words) if (self._folder / word).is_file()]
            program = program or ["--no-python", *(self._words[files[0] :] if files else ["PROGRAM"])]
            self._refuse(f"{launcher} is what --mpi starts", "--mpi", *workers, *program, flags=flags)
        leave = f"; leave it out: {self._typed(*workers, *program)}, or" if program else ";"
        if more := told(self._words[: len(self._words) - len(program)]):
            leave = f", and tells the script {more};"
        once = self._typed("--per-node", "--no-python", *self._words)
        raise UsageError(
            f"SCRIPT: {launcher} starts workers, as the run does{leave} start it once on each node: {once}"
        )

    def _refuse_outside(self, path: Path) -> NoReturn:
        target = path.resolve()
        link = f" leads to {target}, which" if path.is_relative_to(self._folder) and ".." not in self._first else ""
        flags = [*_without(self._flags, "--working-dir"), "--working-dir", str(target.parent)]
        fault = f"{self._first!r}{link} is not in {self._folder}, so the nodes don't have it; copy it there, or"
        name = f"./{target.name}" if self._config.no_python else target.name
        raise UsageError(f"SCRIPT: {fault} type {_typed(flags, [name, *self._words[1:]])}")

    def _refuse_similar(self, fault: str, names: Sequence[str], otherwise: str = "; correct it") -> NoReturn:
        if names:
            raise UsageError(f"SCRIPT: {fault}; did you mean {self._typed(names[0], *self._words[1:])}?")
        raise UsageError(f"SCRIPT: {fault}{otherwise}")

    def _refuse(self, fault: str, *words: str, flags: Sequence[str] | None = None) -> NoReturn:
        raise UsageError(f"SCRIPT: {fault}: {_typed(self._flags if flags is None else flags, words)}")

    def _typed(self, *words: str) -> str:
        return _typed(self._flags, words)

    def _as_module(self, root: str) -> list[str]:
        flags = [] if root == "." else ["--env", f"PYTHONPATH={root}"]
        return [*flags, *([] if self._config.module else ["-m"]), *self._words]

    def _as_program(self, path: Path) -> list[str]:
        """Return the words that start a file of the folder as a program."""
        name = os.path.relpath(path, self._folder)
        if is_shell_script(path) and not os.access(path, os.X_OK):
            return ["--no-python", "bash", name]
        return [name] if path.suffix == ".py" else ["--no-python", f"./{name}"]

    def _scripts(self) -> list[PurePath]:
        """Return the Python files near the top of the folder."""
        files = [file for pattern in PATTERNS for file in sorted(self._folder.glob(pattern))]
        found = [file for file in files if file.name != "__init__.py" and file.is_file()]  # not a link to nothing
        return [file.relative_to(self._folder) for file in found]


def _typed(flags: Sequence[str], words: Sequence[str]) -> str:
    return shlex.join(["ray-on-ecs", "run", *flags, *words])


def _program(words: Sequence[str]) -> list[str]:
    """Return the script or module after a launcher, with its arguments; an empty list if it can't be told."""
    for number, word in enumerate(words):
        if word == "-m" and LAUNCHER.match(shlex.join(words[number : number + 2])):
            continue
        if word in ("-m", "--module") or re.fullmatch(r"\S+\.py", word):
            return list(words[number:])
    return []


def _without(flags: Sequence[str], *names: str) -> list[str]:
    """Return typed flags without these."""
    kept: list[str] = []
    skips = False
    for word in flags:
        name, equals, _ = word.replace("_", "-").partition("=")
        if not skips and name not in names:
            kept.append(word)
        skips = name == "--working-dir" in names and not equals
    return kept


def _find(folder: Path, name: str) -> bool | None:
    """Return whether a folder has a module that can be run; None if another place may have it."""
    top, *parts = name.split(".")
    place = folder.joinpath(top, *parts)
    if place.with_suffix(".py").is_file() or (place / "__main__.py").is_file():
        return True
    is_regular = (folder / top / "__init__.py").is_file() or (folder / f"{top}.py").is_file()
    return False if is_regular else None


def _installs(folder: Path, name: str) -> bool:
    """Return whether the package in a folder has an entry point of this name, such as `name = "package.cli:main"`."""
    entry = re.compile(rf"(?<![\w.-]){re.escape(name)}[\"']?\s*=\s*(?:\{{.*?)?[\"']?[\w.]+:\w")
    files = [folder / file for file in ("pyproject.toml", "setup.cfg", "setup.py")]
    return any(entry.search(file.read_text(errors="replace")) for file in files if file.is_file())


def _is_installed(top: str) -> bool:
    try:
        return find_spec(top) is not None
    except ValueError:
        return True


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
