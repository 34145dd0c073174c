import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KINDS = (".css", ".j2", ".js", ".py")
PACKAGES = ("ray_on_ecs", "training")
VERSION = "1.2.3"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Wheel that is built as in docker/Dockerfile."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build in place would leave files there
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package)
    for name in ("LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    [line] = [line for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines() if line.startswith("RUN sed")]
    command = line.removeprefix("RUN ").removesuffix("\\").replace("/src/", f"{source}/")
    subprocess.run(["sh", "-c", command], env={**os.environ, "VERSION": VERSION}, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.endswith(KINDS)}
    written = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.*")
        if path.suffix in KINDS
    }
    assert packed == written, "the image would lack these modules"


def test_wheel_runs_a_script_without_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "wheel")
    code = tmp_path / "code"
    code.mkdir()
    (code / "script.py").write_text("import ray_on_ecs\nprint('by', ray_on_ecs.__version__)\n")
    run = [sys.executable, "-m", "ray_on_ecs", "run", "--local", "--num-workers", "1", "script.py"]
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path / "wheel")}
    log = subprocess.run(run, cwd=code, env=environment, check=True, capture_output=True, text=True).stdout
    assert f"by {VERSION}" in log
