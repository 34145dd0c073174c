"""The code's fingerprint is the same wherever the code is, and another one with every change to it."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ray_on_ecs.node import head, labels

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that is installed in place of ours."""
    package = tmp_path / "recipes_of_the_tests"
    (package / "run").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it need not be imported')\n")
    (package / "run" / "report.html.j2").write_text("<html>")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(labels, "PACKAGES", (package.name,))
    return package


def test_it_is_a_label_that_ray_takes() -> None:
    assert labels.flags() == [f"--labels=code={labels.fingerprint()}"]
    assert len(labels.fingerprint()) == 12
    assert set(labels.fingerprint()) <= set("0123456789abcdef")


def test_a_copy_elsewhere_has_the_same(tmp_path: Path) -> None:
    for package in labels.PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    program = "from ray_on_ecs.node import labels; print(labels.__file__, labels.fingerprint())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    file, found = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path), "the copy was asked"
    assert found == labels.fingerprint()


@pytest.mark.parametrize("name", ["__init__.py", "run/report.html.j2", "run/new.py"])
def test_a_change_to_any_file_changes_it(installed: Path, name: str) -> None:
    before = labels.fingerprint()
    with (installed / name).open("a") as file:
        file.write("# changed\n")
    assert labels.fingerprint() != before


def test_another_name_of_a_file_changes_it(installed: Path) -> None:
    before = labels.fingerprint()
    (installed / "run" / "report.html.j2").rename(installed / "run" / "page.html.j2")
    assert labels.fingerprint() != before


@pytest.mark.parametrize("name", ["__pycache__/x.cpython-311.pyc", "notes.txt", "run/.report.html.j2.swp"])
def test_what_no_build_packs_does_not_count(installed: Path, name: str) -> None:
    before = labels.fingerprint()
    (installed / name).parent.mkdir(exist_ok=True)
    (installed / name).write_text("of this machine alone")
    assert labels.fingerprint() == before


def test_every_suffix_of_packaged_files_counts() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"].get("package-data", {})
    of_image = [pattern for package in labels.PACKAGES for pattern in packaged.get(package, [])]
    assert all(pattern.endswith(labels.SUFFIXES) for pattern in of_image), "a change to such a file would not be seen"


def test_the_head_says_which_code_it_runs(monkeypatch: pytest.MonkeyPatch, ray_arguments: list[str]) -> None:
    monkeypatch.delenv("RAY_HEAD_STATE", raising=False)
    monkeypatch.setattr("sys.argv", ["ray-head", "--num-cpus=0"])
    assert head.start() == 0
    assert f"--labels=code={labels.fingerprint()}" in ray_arguments
