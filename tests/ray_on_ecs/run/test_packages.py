"""The packages of a requirements file, from wheels and sources on the disk, without an index."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import packages
from ray_on_ecs.run.inline_metadata import dependencies
from ray_on_ecs.run.packages import Requirements
from ray_on_ecs.storage import layout, node_cache
from ray_on_ecs.storage.run_storage import RunStorage

# The build of a package finds setuptools here, and would fetch it otherwise.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "mylib"
version = "1.0"
[tool.setuptools]
packages = ["mylib"]
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(node_cache, "_held", {})
    monkeypatch.setattr(packages, "NEWS_SECONDS", 1e6)  # a busy machine takes longer
    yield tmp_path / "tmp"
    leave_caches()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder."""
    (tmp_path / "code").mkdir()
    return tmp_path / "code"


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path / "runs"), "mine")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def make_wheel(folder: Path, version: str, needs: str = "") -> Path:
    """Write a wheel of `greeting`."""
    folder.mkdir(exist_ok=True)
    info = f"greeting-{version}.dist-info"
    path = folder / f"greeting-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("greeting.py", f"SAYS = '{version}'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: greeting\nVersion: {version}\n{needs}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def write_library(folder: Path, says: str) -> None:
    write(folder, {"pyproject.toml": PYPROJECT, "mylib/__init__.py": f"SAYS = '{says}'\n"})


def says(folder: Path, storage: RunStorage, name: str, module: str, code: str = "a") -> str:
    """Install a requirements file and return a module's output."""
    requirements = Requirements(folder, name, code, OFFLINE)
    python = requirements.install(requirements.resolve(storage))
    command = [python, "-P", "-c", f"import {module}; print({module}.SAYS)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def leave_caches() -> None:
    """Release them, as a process does at its end."""
    for descriptor in node_cache._held.values():
        os.close(descriptor)
    node_cache._held.clear()


def test_packages_are_installed_once(folder: Path, storage: RunStorage, capsys: pytest.CaptureFixture[str]) -> None:
    make_wheel(folder, "1.0", needs="Requires-Dist: filelock\n")
    # A module of the folder has the name of one that pip imports.
    write(folder, {"requirements.txt": "./greeting-1.0-py3-none-any.whl\n", "queue.py": "raise SystemExit('wrong')\n"})
    assert says(folder, storage, "requirements.txt", "greeting") == "1.0"
    assert storage.read_json(layout.PACKAGES)["versions"] == {"greeting": "1.0"}, "filelock is already installed"
    resolving, installing, installed = capsys.readouterr().out.splitlines()
    assert resolving == "resolving the packages of --requirements"
    assert installing == "installing packages on this node"
    assert re.fullmatch(r"installed them in \d+ s", installed)
    assert says(folder, storage, "requirements.txt", "greeting") == "1.0"
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"req/gpu.txt": "-r base.txt\n-c pins.txt\n", "req/base.txt": "greeting", "req/pins.txt": "greeting<2"},
            "1.0",
        ),
        (
            {"req/gpu.txt": "--requirement=base.txt # all\n", "req/base.txt": "-r ../top.txt", "top.txt": "greeting"},
            "2.0",
        ),
    ],
    ids=["a file and pins", "from another folder"],
)
def test_paths_are_relative_like_in_pip(
    folder: Path, storage: RunStorage, files: dict[str, str], expected: str
) -> None:
    for version in ("1.0", "2.0"):
        make_wheel(folder / "wheels", version)
    write(folder, files)
    variables = {**OFFLINE, "PIP_FIND_LINKS": str(folder / "wheels")}
    assert Requirements(folder, "req/gpu.txt", "a", variables).resolve(storage).versions == {"greeting": expected}


@pytest.mark.ray
def test_edit_of_a_local_package_is_installed(folder: Path, storage: RunStorage) -> None:
    write(folder, {"requirements.txt": "./lib\n"})
    for text in ("one", "two, and not one"):
        write_library(folder / "lib", text)
        assert says(folder, storage, "requirements.txt", "mylib", code=text) == text


@pytest.mark.parametrize("line", [".", "-e .", "./mylib-1.0.tar.gz"])
def test_local_package_belongs_to_one_folder_and_code(
    folder: Path, storage: RunStorage, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    report = {
        "metadata": {"name": "mylib", "version": "1.0"},
        "download_info": {"url": folder.as_uri(), "archive_info" if "tar" in line else "dir_info": {}},
        "is_direct": True,
    }
    resolved = []
    monkeypatch.setattr(Requirements, "_pip", lambda self, *arguments: resolved.append(arguments) or [report])
    write(folder, {"requirements.txt": line})
    keys: set[str] = set()
    monkeypatch.setattr(node_cache, "cached", lambda kind, key, make: keys.add(key) or folder)
    write(folder.parent / "other", {"requirements.txt": line})
    for each, code in ((folder, "a"), (folder, "a"), (folder.parent / "other", "a"), (folder, "b")):
        requirements = Requirements(each, "requirements.txt", code, OFFLINE)
        requirements.install(requirements.resolve(storage))
    assert (len(resolved), len(keys)) == (2, 3)


@pytest.mark.ray
def test_packages_of_an_index_are_shared_by_folders(
    folder: Path, storage: RunStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(folder.parent / "wheels", "1.0")
    lines = f"--find-links {folder.parent / 'wheels'}\ngreeting\n-e ./lib\n"
    installed: list[tuple[str, ...]] = []
    pip = Requirements._pip

    def spy(self: Requirements, python: str, *arguments: str) -> list[dict[str, Any]]:
        done = pip(self, python, *arguments)
        installed.extend((python, each["metadata"]["name"]) for each in done if "--dry-run" not in arguments)
        return done

    monkeypatch.setattr(Requirements, "_pip", spy)
    pythons = []
    for place in (folder, folder.parent / "other"):
        write(place, {"requirements.txt": lines})
        write_library(place / "lib", str(place))
        requirements = Requirements(place, "requirements.txt", str(place), OFFLINE)
        pythons.append(requirements.install(requirements.resolve(storage)))
        code = "import mylib, greeting; print(mylib.SAYS, greeting.SAYS)"
        done = subprocess.run([pythons[-1], "-P", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == f"{place} 1.0\n"
    assert [name for _, name in installed] == ["greeting", "mylib", "mylib"]
    assert len({python for python, _ in installed}) == 3


@pytest.mark.ray
@pytest.mark.parametrize("depth", [0, 100], ids=["a short path", "one too long for a shebang"])
def test_programs_of_an_index_see_the_package_of_the_folder(
    folder: Path, storage: RunStorage, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    if depth:
        (folder.parent / ("d" * depth)).mkdir()
        monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder.parent / ("d" * depth)))
    prints = "import mylib, greeting, sys; print(mylib.SAYS, greeting.SAYS, open(sys.prefix + '/share/said').read())"
    info, data = "greeting-1.0.dist-info", "greeting-1.0.data"
    with zipfile.ZipFile(make_wheel(folder.parent / "wheels", "1.0"), "a") as wheel:
        wheel.writestr("greets.py", f"def main(): {prints}\n")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\nby-entry-point = greets:main\n")
        script = zipfile.ZipInfo(f"{data}/scripts/by-script")
        script.external_attr = 0o100755 << 16  # else pip leaves it as it is
        wheel.writestr(script, f"#!python\n{prints}\n")
        wheel.write("/bin/true", f"{data}/scripts/by-machine-code")
        wheel.writestr(f"{data}/data/share/said", "hello")
    write(folder, {"requirements.txt": f"--find-links {folder.parent / 'wheels'}\ngreeting\n-e ./lib\n"})
    for said in ("one", "two"):
        write_library(folder / "lib", said)
        requirements = Requirements(folder, "requirements.txt", said, OFFLINE)
        programs = Path(requirements.install(requirements.resolve(storage))).parent
        for program in ("by-entry-point", "by-script"):
            done = subprocess.run([programs / program], capture_output=True, text=True, check=True)
            assert done.stdout == f"{said} 1.0 hello\n"
        subprocess.run([programs / "by-machine-code"], check=True)


@pytest.mark.ray
def test_programs_here_see_the_packages_of_the_run(folder: Path, storage: RunStorage) -> None:
    make_wheel(folder, "1.0")
    write(
        folder, {"requirements.txt": "./greeting-1.0-py3-none-any.whl\n", "test_it.py": "def test(): import greeting"}
    )
    requirements = Requirements(folder, "requirements.txt", "a", OFFLINE)
    programs = Path(requirements.install(requirements.resolve(storage))).parent
    command = [programs / "pytest", "-p", "no:cacheprovider", folder / "test_it.py"]  # as torchrun starts a script
    subprocess.run(command, cwd=folder, check=True)


EXEC = "#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n"  # of pip and uv, for a long path or one with a space


@pytest.mark.parametrize(
    ("heading", "is_adopted"),
    [
        ("#!{bin}/python\n", True),
        ("#!{bin}/python3\n", True),
        ("#!{bin}/python3.11 -sE\n", True),
        ("#!{bin}/python3.11 -sE\n# -*- coding: utf-8 -*-\nfrom __future__ import annotations\n", True),
        (EXEC.format(python="{bin}/python"), True),
        (EXEC.format(python='"{bin}/python3"'), True),
        (EXEC.format(python="'{bin}/python'"), True),
        (EXEC.format(python="{bin}/python3 -s"), True),
        ("#!/usr/bin/env python3\n", False),
        ("#!/elsewhere/bin/python3\n", False),
        ("#!/elsewhere{bin}/python3\n", False),
        ("#!{bin}/ruby\n", False),
        ("#!/bin/sh\n: {bin}/python\n", False),
        ("{bin}/python\n", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("name", ["target", "a 'target'", f"{'d' * 200}/{'d' * 200}"], ids=["short", "odd", "long"])
def test_program_of_python_is_adopted(tmp_path: Path, heading: str, is_adopted: bool, name: str) -> None:
    here, target = tmp_path / "h" / "bin", tmp_path / name
    here.mkdir(parents=True)
    venv.create(target, symlinks=True, with_pip=False)
    program = here / "program"
    program.write_text(heading.format(bin=here) + "import sys; print(sys.prefix, *sys.argv[1:])\n")
    program.chmod(0o755)
    packages._adopt(here, here, target / "bin")
    copy = target / "bin" / "program"
    assert copy.exists() == is_adopted
    if is_adopted:
        done = subprocess.run([copy, "a b"], capture_output=True, text=True, check=True)
        assert done.stdout == f"{target} a b\n"


def test_only_files_that_can_run_are_adopted(tmp_path: Path) -> None:
    here, target = tmp_path / "h" / "bin", tmp_path / "target"
    (here / "folder").mkdir(parents=True)
    (target / "bin").mkdir(parents=True)
    (here / "data").write_text(f"#!{here}/python\n")
    (tmp_path / "elsewhere").write_text(f"#!{here}/python\n")
    (tmp_path / "elsewhere").chmod(0o755)
    (here / "link").symlink_to(tmp_path / "elsewhere")
    (here / "nowhere").symlink_to(here / "missing")
    (here / "python").symlink_to(sys.executable)
    packages._adopt(here, here, target / "bin")
    packages._adopt(here / "missing", here, target / "bin")
    assert not list((target / "bin").iterdir())


@pytest.mark.ray
def test_versions_stay_until_the_requirements_change(folder: Path, storage: RunStorage, cache: Path) -> None:
    wheels = folder / "wheels"
    make_wheel(wheels, "1.0")
    write(folder, {"requirements.txt": "--find-links wheels\n-r more.txt\n", "more.txt": "greeting\n"})
    assert says(folder, storage, "requirements.txt", "greeting") == "1.0"
    assert storage.read_json(layout.PACKAGES)["versions"] == {"greeting": "1.0"}
    make_wheel(wheels, "2.0")
    leave_caches()
    node_cache.make_room(2**60)
    assert not list(cache.glob("ray-on-ecs-*/packages/*/"))
    assert says(folder, storage, "requirements.txt", "greeting") == "1.0"
    other = RunStorage.open(str(folder.parent / "runs"), "other")
    assert says(folder, other, "requirements.txt", "greeting") == "2.0"
    write(folder, {"more.txt": "greeting>1\n"})
    assert says(folder, storage, "requirements.txt", "greeting") == "2.0"


@pytest.mark.ray
def test_moving_branch_stays_at_its_commit(folder: Path, storage: RunStorage) -> None:
    repository, commit = make_repository(folder)
    write(folder, {"requirements.txt": f"git+file://{repository}@main#egg=mylib\n"})
    requirements = Requirements(folder, "requirements.txt", "a", OFFLINE)
    resolution = requirements.resolve(storage)
    write_library(repository, "two")
    git(repository, *commit)
    assert requirements.resolve(storage) == resolution
    assert says(folder, storage, "requirements.txt", "mylib") == "one"


@pytest.mark.ray
def test_url_secret_is_stored_by_name(folder: Path, storage: RunStorage) -> None:
    repository, commit = make_repository(folder)
    write(folder, {"requirements.txt": "git+file://${PLACE}@main#egg=mylib\n"})
    requirements = Requirements(folder, "requirements.txt", "a", OFFLINE, {"PLACE": str(repository)})
    resolution = requirements.resolve(storage)
    assert resolution.commits["mylib"].startswith("git+file://${PLACE}@")
    assert str(repository) not in storage.read(layout.PACKAGES).decode()
    write_library(repository, "two")
    git(repository, *commit)
    python = requirements.install(resolution)
    command = [python, "-P", "-c", "import mylib; print(mylib.SAYS)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "one\n"
    write(folder, {"requirements.txt": "-r ${PLACE}/none.txt\n"})
    with pytest.raises(UsageError, match=r"\*\*\*/none\.txt") as caught:
        requirements.resolve(storage)
    assert str(repository) not in str(caught.value)


def make_repository(folder: Path) -> tuple[Path, list[str]]:
    """Make a repository with the library `mylib`; return it, and git's arguments that commit changes."""
    repository = folder.parent / "repository"
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--all", "--message=x"]
    write_library(repository, "one")
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", ".")
    git(repository, *commit)
    return repository, commit


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def test_pip_has_the_variables_of_the_script(folder: Path, storage: RunStorage) -> None:
    wheel = make_wheel(folder.parent / "of-the-company", "1.0")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirement = f"greeting==1.0 --hash=sha256:{digest}"
    write(folder, {"requirements.txt": f"--find-links ${{WHEELS}}\n--no-index\n{requirement}\n"})
    with pytest.raises(UsageError, match=r"No matching distribution found for greeting==1\.0"):
        Requirements(folder, "requirements.txt", "a", {}).resolve(storage)
    variables = {"WHEELS": str(wheel.parent)}
    assert Requirements(folder, "requirements.txt", "a", variables).resolve(storage).versions == {"greeting": "1.0"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-package\n", "pip can't install them .*no-such-package"),
        ("-r nowhere.txt\n", "pip can't install them .*nowhere.txt"),
        (
            "torch\nhumanize @ file:///home/conda/feedstock_root/work\n",
            r"'humanize @ file:///home/conda/feedstock_root/work' is on another machine; give a version, as pip list "
            "--format=freeze writes it$",
        ),
        (None, r"'requirements.txt' is not in .* on this node; it may be that .gitignore"),
    ],
    ids=["an unknown package", "an unknown file", "of conda", "without the file"],
)
def test_requirements_refused_by_pip_are_one_line(
    folder: Path, storage: RunStorage, text: str | None, message: str
) -> None:
    if text is not None:
        write(folder, {"requirements.txt": text})
    with pytest.raises(UsageError, match=f"^--requirements: {message}") as caught:
        Requirements(folder, "requirements.txt", "a", OFFLINE).resolve(storage)
    assert "\n" not in str(caught.value)
    assert not storage.exists(layout.PACKAGES)


def test_long_installation_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the image stays there, which pip says as if it had failed: "Can't uninstall 'transformers'"."""
    told, ended = [], tmp_path / "ended"
    monkeypatch.setattr(packages, "NEWS_SECONDS", 0.01)
    monkeypatch.setattr(
        packages.logger, "info", lambda line: told.append(line) or ("pip starts" not in line and ended.touch())
    )
    lines = [
        "Installing collected packages: transformers",
        "  Attempting uninstall: transformers",
        "    Found existing installation: transformers 5.24.0",
        "    Not uninstalling transformers at /image/site-packages, outside environment /packages",
        "    Can't uninstall 'transformers'. No files were found to uninstall.",
    ]
    text = "\n".join(lines)
    says = f'echo "{text}"; until [ -e {ended} ]; do sleep 0.01; done; echo ERROR: no such version; exit 3'
    status, said = packages._run(["sh", "-c", says], tmp_path, {})
    assert (status, said) == (3, [*lines, "ERROR: no such version"])
    others = {"still installing: pip starts", "still installing: ERROR: no such version"}  # as a busy machine sees them
    assert set(told) - others == {f"still installing: {lines[0]}"}


def write_installed(folder: Path, name: str, version: str, *needs: str) -> None:
    info = folder / "site-packages" / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Requires-Dist: {need}\n" for need in needs]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{''.join(lines)}")


@pytest.mark.parametrize(
    ("needs", "versions", "is_broken"),
    [
        ("base>=2", {"base": "1.0"}, True),
        ("Base >=2", {"base": "1.0"}, True),
        ("base>=2", {"BASE": "2.1"}, False),
        ("base>=2", {"base": "3.0rc1"}, False),
        ("base==2.0", {"base": "2.0+cpu"}, False),
        ("base>=3", {"base": "1.0"}, False),  # broken before
        ("absent>=3", {"absent": "1.0"}, False),
        ("base>=2 ; extra == 'x'", {"base": "1.0"}, False),
        ("base>=2 ; python_version < '3'", {"base": "1.0"}, False),
        ("base>=2", {"base": "1.0", "user": "9.0"}, False),  # the file brings it, too
        ("base (>=2", {"base": "1.0"}, False),
    ],
)
def test_installed_package_that_a_pin_breaks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: str, versions: dict[str, str], is_broken: bool
) -> None:
    write_installed(tmp_path, "user", "5.1", needs, "other")
    write_installed(tmp_path, "base", "2.0")
    (tmp_path / "site-packages" / "~leftover-1.0.dist-info").mkdir()
    monkeypatch.setattr(packages, "_package_folders", lambda: [str(tmp_path / "site-packages")])
    line = "user 5.1, which is installed, needs base>=2, and the file brings 1.0: if the script uses user, add it to "
    assert packages._conflicts(versions) == [f"{line}the file"] * is_broken


def test_conflict_and_reason_are_in_the_log(
    folder: Path, storage: RunStorage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_conflicts", lambda versions: [f"breaks by {versions}"])
    make_wheel(folder, "1.0")
    write(folder, {"requirements.txt": "./greeting-1.0-py3-none-any.whl\n", "lib/setup.py": "raise OSError('CUDA')"})
    Requirements(folder, "requirements.txt", "a", OFFLINE).resolve(storage)
    assert capsys.readouterr().out.splitlines()[1:] == ["breaks by {'greeting': '1.0'}"]
    write(folder, {"requirements.txt": "./lib\n"})
    with pytest.raises(UsageError, match=r"pip can't install them \(lib can't be built: OSError: CUDA\)$"):
        Requirements(folder, "requirements.txt", "a", OFFLINE, {"TOKEN": "build"}).resolve(storage)
    log = capsys.readouterr().out
    assert "pip's last lines:\n" in log
    assert "OSError: CUDA\n" in log
    assert "Getting requirements" not in log or "build wheel" not in log, "secrets are masked"


def test_installed_packages_are_not_installed_again(
    folder: Path, storage: RunStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, {"requirements.txt": "filelock\n"})
    requirements = Requirements(folder, "requirements.txt", "a", OFFLINE)
    assert requirements.install(requirements.resolve(storage)) == sys.executable
    assert capsys.readouterr().out.splitlines()[1:] == ["all of them are installed already"]


# ty reads a block of lines as this file's own.
HEADER = (
    '#!/usr/bin/env python3\n# /// script\n# requires-python = "{python}"\n# dependencies = [\n#   "./lib",\n#\n'
    '#   "greeting{marker}",  # a comment\n# ]\n# ///\nimport greeting\n'
)


def test_packages_of_inline_metadata_are_installed(folder: Path, storage: RunStorage, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", "1.0")
    write_library(folder / "lib", "lib")
    write(folder, {"jobs/train.py": HEADER.format(python=">=3.11", marker=f" @ {wheel.as_uri()}")})
    assert says(folder, storage, "jobs/train.py", "greeting") == "1.0"
    assert says(folder, storage, "jobs/train.py", "mylib") == "lib"


@pytest.mark.parametrize("python", [">=4", "==3.10.*", "3.11 or so"])
def test_inline_metadata_for_another_python_are_refused(python: str, folder: Path) -> None:
    write(folder, {"train.py": HEADER.format(python=python, marker="")})
    with pytest.raises(UsageError, match=f"requires-python of train.py is '{re.escape(python)}', and the run's"):
        Requirements(folder, "train.py", "a", OFFLINE)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# /// script\n# dependencies = ['a', \"b>1\"]\n# ///\n", ["a", "b>1"]),
        ("print()\r\n# /// script\r\n# dependencies = ['a']\r\n#\r\n# ///\r\n", ["a"]),
        ("# /// script\n# dependencies = []\n# ///\n", []),
        ("# /// script\n# requires-python = '>=3.11'\n# ///\n", []),
        ("# /// other\n# dependencies = ['a']\n# ///\n", []),
        ("# /// script\n# dependencies = ['a']\nprint()\n", []),
        ("# /// script\n# dependencies = [\n# ///\n", "can't be used \\(Invalid"),
        ("# /// script\n# dependencies = 'a'\n# ///\n", "must be a list of texts"),
        ("# /// script\n# dependencies = [1]\n# ///\n", "must be a list of texts"),
        (2 * "# /// script\n# dependencies = ['a']\n# ///\n\n", "there are two blocks"),
        ("", []),
    ],
)
def test_inline_metadata_are_read(text: str, found: list[str] | str, folder: Path) -> None:
    (folder / "train.py").write_bytes(text.encode())
    if isinstance(found, list):
        assert dependencies(folder / "train.py") == found
    else:
        with pytest.raises(UsageError, match=found):
            dependencies(folder / "train.py")
