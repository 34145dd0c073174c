"""Versions from git for the builds of packages in the user's folder."""

from pathlib import Path

import pytest

from ray_on_ecs.run import scm_version

VERSION = "1.2+3.gabc"
PYPROJECT = '[build-system]\nrequires = ["{}"]\n[project]\nname = "my-lib"\n'


@pytest.mark.parametrize(
    "tool",
    ["setuptools-scm>=8", "setuptools_scm", "hatch-vcs", "flit_scm", "versioningit", "setuptools-git-versioning"],
)
@pytest.mark.parametrize(
    "line", ["-e .", ".", ".[dev]", "--editable=. # mine", "-e ./", "file:.", "-e '.'", " -e . ; x"]
)
def test_project_with_a_version_of_git_has_one(tmp_path: Path, tool: str, line: str) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format(tool))
    variables = scm_version.use(VERSION, tmp_path, [f"torch\n{line}\n"])
    assert (tmp_path / "PKG-INFO").read_text() == f"Metadata-Version: 2.1\nName: my-lib\nVersion: {VERSION}\n"
    assert set(variables.values()) == {VERSION}


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"setup.py": "setup(setup_requires=['pbr'], pbr=True)", "setup.cfg": "[metadata]\nname = of-cfg\n"}, "of-cfg"),
        ({"setup.py": "setup(use_scm_version=True, setup_requires=['setuptools_scm'])"}, "lib"),
        ({"pyproject.toml": "[tool.poetry]\nname = 'of-poetry'\n[tool.poetry-dynamic-versioning]\n"}, "of-poetry"),
        ({"pyproject.toml": "broken [ # hatch-vcs", "setup.cfg": "broken"}, "lib"),
        ({"setup.py": "setup(pbr=True)", "setup.cfg": "[metadata]\nname = %x\n"}, "%x"),
    ],
)
def test_name_is_that_of_the_project(tmp_path: Path, files: dict[str, str], name: str) -> None:
    (tmp_path / "lib").mkdir()
    for file, text in files.items():
        (tmp_path / "lib" / file).write_text(text)
    scm_version.use(VERSION, tmp_path, ["-e lib\n"])
    assert f"\nName: {name}\n" in (tmp_path / "lib" / "PKG-INFO").read_text()


@pytest.mark.parametrize(
    ("requires", "line", "version"),
    [
        ("setuptools", "-e .", VERSION),
        ("hatch-vcs", "# -e .", VERSION),
        ("hatch-vcs", "torch", VERSION),
        ("pbr", ".", ""),
    ],
)
def test_other_projects_are_left_alone(tmp_path: Path, requires: str, line: str, version: str) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format(requires))
    scm_version.use(version, tmp_path, [f"{line}\n"])
    assert not (tmp_path / "PKG-INFO").exists()


def test_project_outside_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    """It is the user's own, with its repository."""
    outside, folder = tmp_path / "lib", tmp_path / "code"
    outside.mkdir()
    folder.mkdir()
    (outside / "pyproject.toml").write_text(PYPROJECT.format("pbr"))
    (folder / "link").symlink_to(outside)
    for line in (f"-e {outside}", f"file:{outside}", "-e ../lib", "./link", "git+https://host/lib"):
        assert scm_version.use(VERSION, folder, [f"{line}\n"]) == {}
    assert not (outside / "PKG-INFO").exists()


def test_version_of_a_source_distribution_stays(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format("hatch-vcs"))
    (tmp_path / "PKG-INFO").write_text("Version: 5\n")
    scm_version.use(VERSION, tmp_path, ["."])
    assert (tmp_path / "PKG-INFO").read_text() == "Version: 5\n"
