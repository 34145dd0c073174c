"""The packages of a script's requirements file, in a virtual environment beside the one that runs this program.

It sees what is installed here and adds what the file asks for, so torch and Ray need not be installed again. Each node
makes it once for a file: its name is a hash of what the file says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from ray_on_ecs.errors import UsageError, one_line
from ray_on_ecs.node_folder import node_folder
from ray_on_ecs.periodic import run_every

LAST_LINES = 3
# How often a node says how far a long installation is.
NEWS_SECONDS = 30.0


def python_with(requirements: str | None, folder: Path) -> str:
    """Return a Python interpreter that has the packages of a requirements file.

    Args:
        requirements: What the file says, or None: this interpreter.
        folder: Where relative paths in it, as of wheels, begin.

    Raises:
        UsageError: pip can't install them; the message has its last line.
    """
    if requirements is None:
        return sys.executable
    target = node_folder("packages", f"{sys.version} {sys.prefix} {requirements}")
    python = target / "bin" / "python"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not (target / "complete").exists():
            print("installing the packages of --requirements on this node", flush=True)
            started_at = time.monotonic()
            shutil.rmtree(target, ignore_errors=True)
            venv.create(target, symlinks=True, with_pip=False)
            _see_packages_of_this_interpreter(target)
            _install(python, requirements, folder)
            (target / "complete").touch()
            print(f"installed them in {time.monotonic() - started_at:.0f} s", flush=True)
    return str(python)


def _see_packages_of_this_interpreter(target: Path) -> None:
    library = sysconfig.get_path("purelib", scheme="venv", vars={"base": str(target), "platbase": str(target)})
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in paths]  # so that their own .pth files count, too
    Path(library, "inherited.pth").write_text("".join(lines))


def _install(python: Path, requirements: str, folder: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=folder if os.access(folder, os.W_OK) else None) as file:
        file.write(requirements)
        file.flush()
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-input", "-r", file.name]
        status, said = _run([*command, "--disable-pip-version-check", "--progress-bar=off"], folder)
    if status:
        errors = [line for line in said if line.startswith("ERROR")] or said
        raise UsageError(f"--requirements: pip can't install them ({one_line(' '.join(errors[-LAST_LINES:]))})")


def _run(command: Sequence[str], folder: Path) -> tuple[int, list[str]]:
    """Run a command that may take minutes; return its exit status and the lines it wrote."""
    said: list[str] = []
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def tell() -> None:
        print(f"still installing: {said[-1] if said else 'pip starts'}", flush=True)

    with process, run_every(NEWS_SECONDS, tell, "pip"):
        for line in process.stdout or ():
            said.append(line.strip())
    return process.returncode, said
