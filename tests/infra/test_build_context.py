"""Build context: the files that .dockerignore allows, and a tag that follows from their content alone."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.config.rules import TAG
from infra.definitions import build_context
from infra.errors import Refusal

ROOT = Path(__file__).parents[2]
FILES = {
    ".dockerignore": (ROOT / ".dockerignore").read_text(),
    "LICENSE": "Apache",
    "pyproject.toml": "[project]\n",
    "docker/Dockerfile": "ARG PYTHON_IMAGE=python@sha256:1\nARG PACKAGES=\nFROM ${PYTHON_IMAGE}\n",
    "docker/requirements.lock": "torch==2\n",
    "ray_on_ecs/__init__.py": "",
    "ray_on_ecs/run/driver.py": "import os\n",
    "training/image_classifier.py": "print(1)\n",
    "training/größe.txt": "ä\n",
}
Change = Callable[[Path], object]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return written(tmp_path / "here")


def written(root: Path) -> Path:
    """A checkout of a small project."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def tag(root: Path) -> str:
    return build_context.read(root).tag


def write(name: str, text: str) -> Change:
    def change(root: Path) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())

    return change


def replace(name: str, old: str, new: str) -> Change:
    return lambda root: (root / name).write_bytes((root / name).read_bytes().replace(old.encode(), new.encode()))


def mode(name: str, bits: int) -> Change:
    return lambda root: (root / name).chmod(bits)


def move(name: str, to: str) -> Change:
    return lambda root: (root / name).rename(root / to)


def link(name: str, target: str) -> Change:
    return lambda root: (root / name).symlink_to(target)


def owner(root: Path) -> None:
    if os.getuid() == 0:
        os.chown(root / "LICENSE", 1234, 1234)


def other_order(root: Path) -> None:
    """The files once more, created in the reverse order."""
    shutil.move(root / "ray_on_ecs", root / "before")
    for path in sorted((root / "before").rglob("*"), reverse=True):
        if path.is_file():
            target = root / "ray_on_ecs" / path.relative_to(root / "before")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.rmtree(root / "before")


SAME: dict[str, Change] = {
    "another time": lambda root: os.utime(root / "LICENSE", (0, 0)),
    "another owner": owner,
    "created in another order": other_order,
    "group may write": mode("LICENSE", 0o664),
    "nobody else may read": mode("ray_on_ecs/run/driver.py", 0o600),
    "bytecode": write("ray_on_ecs/__pycache__/driver.cpython-311.pyc", "x"),
    "bytecode beside its source": write("ray_on_ecs/run/driver.pyc", "x"),
    "an editor's swap file": write("ray_on_ecs/run/.driver.py.swp", "x"),
    "an editor's copy": write("training/image_classifier.py~", "x"),
    "a folder of macOS": write("training/.DS_Store", "x"),
    "caches of tools": write("ray_on_ecs/.ruff_cache/x", "x"),
    "an empty folder": lambda root: (root / "ray_on_ecs" / "new").mkdir(),
    "a file outside": write("README.md", "x"),
    "infrastructure": write("infra/image.py", "x"),
    "a virtual environment": write(".venv/lib/ray_on_ecs/x.py", "x"),
    "results": write("results/first/log", "x"),
    "a secret of compose": write("docker/.env", "TOKEN=x"),
    "a folder with a like name": write("ray_on_ecs.egg-info/PKG-INFO", "x"),
    "git": write(".git/HEAD", "x"),
    "a socket": lambda root: subprocess.run(["mkfifo", root / "ray_on_ecs" / "pipe"], check=True),
}
OTHER: dict[str, Change] = {
    "one byte": replace("ray_on_ecs/run/driver.py", "os", "io"),
    "a line end": replace("ray_on_ecs/run/driver.py", "\n", "\r\n"),
    "a renamed file": move("ray_on_ecs/run/driver.py", "ray_on_ecs/run/Driver.py"),
    "an empty file elsewhere": move("ray_on_ecs/__init__.py", "ray_on_ecs/run/__init__.py"),
    "a new empty file": write("training/__init__.py", ""),
    "a file less": lambda root: (root / "training/größe.txt").unlink(),
    "an executable file": mode("training/image_classifier.py", 0o755),
    "a link to a file": link("ray_on_ecs/copy.py", "__init__.py"),
    "a link to a folder": link("training/run", "../ray_on_ecs/run"),
    "a link to nothing": link("training/missing", "nothing"),
    "another base image": replace("docker/Dockerfile", "sha256:1", "sha256:2"),
    "another package of Debian": replace("docker/Dockerfile", "PACKAGES=", "PACKAGES=ffmpeg"),
    "another version in the lock": replace("docker/requirements.lock", "2", "3"),
    "the license": replace("LICENSE", "A", "B"),
    "another folder of the user": lambda root: (
        write("mine/x.py", "")(root),
        replace(".dockerignore", "!training\n", "!training\n!mine\n")(root),
    ),
    "a name beyond ASCII": move("training/größe.txt", "training/große.txt"),
    "content that moves to the name": lambda root: (
        move("ray_on_ecs/run/driver.py", "ray_on_ecs/run/driver.pyimport os")(root),
        write("ray_on_ecs/run/driver.pyimport os", "\n")(root),
    ),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_the_image_does_not_hold_keeps_the_tag(project: Path, change: Change) -> None:
    before = tag(project)
    change(project)
    assert tag(project) == before


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_other_content_has_another_tag(project: Path, change: Change) -> None:
    before = tag(project)
    change(project)
    assert tag(project) != before
    build_context.read(project).zip()


def test_a_link_is_not_the_file_behind_it(project: Path) -> None:
    write("ray_on_ecs/copy.py", "__init__.py")(project)
    before = tag(project)
    (project / "ray_on_ecs/copy.py").unlink()
    link("ray_on_ecs/copy.py", "__init__.py")(project)
    assert tag(project) != before


def test_every_checkout_has_the_same_tag_and_zip(project: Path, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", project]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["worktree", "add", "-q", tmp_path / "tree"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    others = [written(tmp_path / "a longer" / "place"), tmp_path / "tree"]
    for other in others:
        assert tag(other) == tag(project)
        assert build_context.read(other).zip() == build_context.read(project).zip()


def test_the_tag_is_one_of_an_image(project: Path) -> None:
    assert re.fullmatch(TAG, f":{tag(project)}")


def test_the_zip_restores_files_modes_and_links(project: Path, tmp_path: Path) -> None:
    mode("training/image_classifier.py", 0o700)(project)
    link("training/latest", "image_classifier.py")(project)
    context = build_context.read(project)
    with zipfile.ZipFile(io.BytesIO(context.zip())) as archive:
        assert {each.filename: each.external_attr >> 16 for each in archive.infolist()} == {
            **dict.fromkeys([*FILES], 0o100644),
            "training/image_classifier.py": 0o100755,
            "training/latest": 0o120777,
        }
        assert archive.read("training/latest") == b"image_classifier.py"
    if unzip := shutil.which("unzip"):
        (tmp_path / "context.zip").write_bytes(context.zip())
        subprocess.run([unzip, "-q", tmp_path / "context.zip", "-d", tmp_path / "context"], check=True)
        assert tag(tmp_path / "context") == context.tag


def test_an_unreadable_file_is_one_line(project: Path) -> None:
    (project / "docker/Dockerfile").unlink()
    with pytest.raises(Refusal, match=r"^image: 'docker/Dockerfile' of the build context can't be read \(.*\); check"):
        tag(project)


def test_dockerfile_copies_only_what_the_context_has() -> None:
    paths = {file.path for file in build_context.read(ROOT).files}
    dockerfile = (ROOT / "docker/Dockerfile").read_text().replace("\\\n", "")
    copies = [line.split()[1:-1] for line in re.findall(r"^COPY (?!--from).*$", dockerfile, re.MULTILINE)]
    sources = [word for words in copies for word in words if not word.startswith("--")]
    assert sources
    for source in sources:
        assert any(path == source or path.startswith(f"{source}/") for path in paths), f"{source} is not sent"
    assert not [path for path in paths if re.search(r"(^|/)(\.env|__pycache__|\.venv)", path)]


@pytest.mark.parametrize(
    ("rules", "path", "is_sent"),
    [
        ("*\n!a", "a/b/c", True),
        ("*\n!a/b", "a/c", False),
        ("*\n!a/b", "a/b/c", True),
        ("*\n!/a/", "a/b", True),
        ("*\n!a\na/b", "a/b/c", False),
        ("*\n!a\na/*.log", "a/x.log", False),
        ("*\n!a\na/*.log", "a/b/x.log", True),
        ("*\n!a\n**/*.log", "a/b/x.log", False),
        ("*\n!**/*.py", "a/b/x.py", True),
        ("*\n!a/?.py", "a/xy.py", False),
        ("*\n!a/[xy].py", "a/x.py", True),
        ("# !a\n\n*", "a/x", False),
        ("b", "a/b", True),
        ("a/**/c", "a/c", False),
        ("a/**/c", "a/b/b/c", False),
        (r"a/\*", "a/b", True),
        ("a.c", "abc", True),
        ("*\n! a", "a/b", True),
    ],
)
def test_rules_of_dockerignore(tmp_path: Path, rules: str, path: str, is_sent: bool) -> None:
    write(".dockerignore", rules)(tmp_path)
    write("docker/Dockerfile", "")(tmp_path)
    write(path, "")(tmp_path)
    assert (path in {file.path for file in build_context.read(tmp_path).files}) == is_sent
