"""A recipe that is copied, renamed and run outside of the project, with an installed wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ray_on_ecs.cli.recipe import RECIPES
from tests.local_cluster import BUSY_MACHINE

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("LICENSE", "pyproject.toml", "ray_on_ecs", "training")
# Two starts of the copy in one process, so that it imports PyTorch once: with a wrong option, and for a step.
TWICE = """
import runpy, sys
copy, wrong, *flags = sys.argv[1:]
sys.argv = [copy, wrong]
try:
    runpy.run_path(copy, run_name="__main__")
except SystemExit as end:
    print(end.code, flush=True)
sys.argv = [copy, *flags]
runpy.run_path(copy, run_name="__main__")
"""
WRONG = {"network_bench": "--times=0"}
FLAGS = {
    "image_classifier": ("--data=digits", "--samples=32", "--batch-size=16", "--epochs=1"),
    "language_model": ("--data=words.txt", "--max-steps=1", "--context=64", "--global-batch-size=1"),
    "network_bench": ("--max-mib=1", "--times=1"),
    "preprocess": ("./out", "--name=first", "--records=16", "--size=32", "--blurs=1", "--batch-size=8", "--epochs=1"),
    "ray_train_ddp": ("./out", "--name=first", "--data=digits", "--num-workers=1", "--batch-size=512", "--epochs=1"),
}
LEFT = {
    "image_classifier": "best.safetensors",
    "language_model": "model/config.json",
    "network_bench": "network.png",
    "preprocess": "out/first/checkpoint_manager_snapshot.json",
    "ray_train_ddp": "out/first/best.safetensors",
}
WITH_RAY = ("preprocess", "ray_train_ddp")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the wheel, which is built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    (source := folder / "source").mkdir()
    for name in SOURCES:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = ["wheel", str(source), "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}"]
    subprocess.run([*pip, *wheel], check=True)
    [built] = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", f"--target={folder / 'packages'}", str(built)], check=True)
    return folder / "packages"


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.ray if each in WITH_RAY else ()) for each in RECIPES]
)
def test_renamed_copy_trains_and_names_itself(name: str, installed: Path, tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RANK", "WORLD_SIZE"))}
    own = {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command, environment = [sys.executable, "-P", *arguments], {**kept, **BUSY_MACHINE, **own}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    assert run("-c", "import ray_on_ecs; print(ray_on_ecs.__file__)").stdout.startswith(str(installed))
    assert name in run("-m", "ray_on_ecs", "recipe", "list").stdout
    run("-m", "ray_on_ecs", "recipe", "copy", name, "mine.py")
    (tmp_path / "words.txt").write_text("It trains on its own words. " * 99)
    done = run("-c", TWICE, "mine.py", WRONG.get(name, "--epochs=0"), *FLAGS[name])
    assert done.stdout.startswith("2\n"), done.stdout
    [line] = [line for line in done.stderr.splitlines() if "error: " in line]
    assert line.startswith("mine.py: error: argument --"), done.stderr
    assert (tmp_path / LEFT[name]).stat().st_size
