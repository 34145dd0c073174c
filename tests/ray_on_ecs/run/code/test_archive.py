"""The archive of a user's code, in a folder and in a bucket."""

import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import StorageError, UsageError
from ray_on_ecs.run.code import archive, git
from ray_on_ecs.run.code.archive import fetch, pack, put
from ray_on_ecs.run.code.files import list_code
from ray_on_ecs.run.code.git import revision
from ray_on_ecs.storage.run_storage import RunStorage
from tests.aws import BUCKET

CONTENTS = {
    "train.py": b"print(1)\n",
    "pkg/__init__.py": b"",
    "pkg/large.bin": bytes(range(256)) * 4,
    "a b/line\nbreak \"quote'.txt": b"1",
    "gr\udcfc\udce9e": b"2",
    "トレーニング/モデル.pt": b"3",
    "x" * 200: b"4",
}
LINKS = {
    "pkg/top": "..",
    "latest": "pkg/large.bin",
    "pkg/dangling": "nothing-there",
    "models/root": "../pkg",
    "circle": "circle",
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write(tmp_path / "code")


@pytest.fixture(params=["folder", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> RunStorage:
    if request.param == "folder":
        return folder_below(tmp_path / "runs")
    request.getfixturevalue("s3")
    return RunStorage.open(f"s3://{BUCKET}/{tmp_path.name}", archive.FOLDER)


def folder_below(path: Path) -> RunStorage:
    return RunStorage.open(str(path), archive.FOLDER)


def write(folder: Path, reverse: bool = False) -> Path:
    for name, content in sorted(CONTENTS.items(), reverse=reverse):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name, target in LINKS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)
    (folder / "train.py").chmod(0o755)
    return folder


def packed(folder: Path) -> bytes:
    target = io.BytesIO()
    pack(list_code(folder), target)
    return target.getvalue()


def members(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content), encoding="utf-8") as tar:
        return {each.name: file.read() for each in tar if each.isreg() and (file := tar.extractfile(each))}


def store(code: Path, storage: RunStorage) -> str:
    return put(list_code(code), storage)


def stored(storage: RunStorage) -> list[str]:
    return list(storage.listing().files)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("train.py", None),
        ("./train.py", None),
        ("inner.py", None),
        ("linked/tool.py", None),
        ("ignored.py", "'ignored.py' is left out of the upload (.gitignore); --include ignored.py brings it"),
        ("old/a b.py", "'old/a b.py' is left out of the upload (.gitignore); --include 'old/a b.py' brings it"),
        ("excluded.py", "'excluded.py' is left out of the upload (--exclude)"),
        (".venv/x.py", "'.venv/x.py' is left out of the upload"),
        ("out.py", "'out.py' is left out of the upload (a link out of the folder)"),
        ("outer/x.py", "'outer/x.py' is left out of the upload (a link out of the folder)"),
    ],
)
def test_script_that_is_left_out_is_refused(script: str, line: str | None, tmp_path: Path) -> None:
    folder, other = tmp_path / "code", tmp_path / "other"
    for name in ("train.py", "ignored.py", "old/a b.py", "excluded.py", ".venv/x.py", "tools/tool.py", "../other/x.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name, target in {"inner.py": "train.py", "linked": "tools", "out.py": other / "x.py", "outer": other}.items():
        (folder / name).symlink_to(target)
    (folder / ".gitignore").write_text("ignored.py\nold/\n")
    config = RunConfig(command=(script,), working_dir=str(folder), exclude=("excluded.py",))
    storage = RunStorage.open(str(tmp_path / "runs"), "first")
    if line is None:
        archive.store(config, storage, lambda line: None, is_here=False)
    else:
        with pytest.raises(UsageError) as caught:
            archive.store(config, storage, lambda line: None, is_here=False)
        assert str(caught.value) == f"SCRIPT: {line}"
        module = RunConfig(command=("pkg.x",), module=True, working_dir=str(folder))
        archive.store(module, storage, lambda line: None, is_here=False)


def test_stored_code_is_fetched(code: Path, storage: RunStorage, tmp_path: Path) -> None:
    before = time.time()
    target = tmp_path / "node/code"
    fetch(storage, store(code, storage), target)
    paths = {path.relative_to(target).as_posix(): path for path in target.rglob("*")}
    files = {name: path for name, path in paths.items() if path.is_file() and not path.is_symlink()}
    assert {name: path.read_bytes() for name, path in files.items()} == CONTENTS
    assert {name: os.readlink(path) for name, path in paths.items() if path.is_symlink()} == LINKS
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in files.items()}
    assert modes == {name: 0o755 if name == "train.py" else 0o644 for name in CONTENTS}
    assert all(path.stat().st_mtime >= before - 1 for path in files.values())


def test_archive_of_another_size_is_replaced(code: Path, storage: RunStorage, tmp_path: Path) -> None:
    digest = store(code, storage)
    storage.write(f"{digest}.tar.gz", b"half")
    with pytest.raises(StorageError, match=rf"{digest}.tar.gz, is damaged; delete it, and start the run again$"):
        fetch(storage, digest, tmp_path / "node")
    store(code, storage)
    fetch(storage, digest, tmp_path / "node")
    assert (tmp_path / "node/train.py").read_bytes() == CONTENTS["train.py"]


def test_failed_upload_leaves_no_archive(code: Path, storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(source: IO[bytes], target: IO[bytes], size: int) -> None:
        target.write(source.read(4))
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfileobj", cut)
    with pytest.raises(KeyboardInterrupt):
        store(code, storage)
    assert not [name for name in stored(storage) if name.endswith(archive.SUFFIX)]


def test_missing_archive_is_one_line(storage: RunStorage, tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"^the run's code, \S+/\.code/0123\.tar\.gz, is missing; start the run again$"
    ):
        fetch(storage, "0123", tmp_path / "node")


def test_fetch_into_a_filled_folder_is_refused(code: Path, tmp_path: Path) -> None:
    storage = folder_below(tmp_path / "runs")
    digest = store(code, storage)
    with pytest.raises(FileExistsError, match="is not empty"):
        fetch(storage, digest, code)


def test_same_content_has_the_same_bytes(code: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", reverse=True)
    for path in other.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    (other / "pkg/__init__.py").chmod(0o600)
    assert packed(other) == packed(code)


@pytest.mark.parametrize("change", ["content", "name", "link", "mode"])
def test_other_code_has_other_bytes(code: Path, change: str) -> None:
    before = packed(code)
    if change == "content":
        (code / "train.py").write_bytes(b"print(2)\n")
    elif change == "name":
        (code / "train.py").rename(code / "train2.py")
    elif change == "mode":
        (code / "train.py").chmod(0o644)
    else:
        (code / "latest").unlink()
        (code / "latest").symlink_to("pkg")
    assert packed(code) != before


def test_changed_files_are_archived_in_their_current_version(code: Path) -> None:
    listed = list_code(code)
    (code / "train.py").write_bytes(b"shorter")
    (code / "pkg/__init__.py").write_bytes(b"longer")
    (code / ("x" * 200)).unlink()
    target = io.BytesIO()
    pack(listed, target)
    changed = {"train.py": b"shorter", "pkg/__init__.py": b"longer"}
    assert members(target.getvalue()) == {
        name: each for name, each in {**CONTENTS, **changed}.items() if name != "x" * 200
    }


def commit_of(folder: Path) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "train.py"], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 128", "#!/bin/sh\nexec sleep 60"])
def test_no_revision_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None) -> None:
    (tmp_path / "train.py").write_text("1")
    commit_of(tmp_path)
    if script:
        (tmp_path / "git").write_text(script)
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{':/usr/bin:/bin' if script else ''}")
    monkeypatch.setattr(git, "GIT_SECONDS", 0.2)
    assert revision(tmp_path) == {}


def packed_by_another(*entries: tuple[str, bytes | str]) -> bytes:
    """An archive of files, by their contents, and links, by their targets."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return target.getvalue()


NAME, LINK, OVER, TWICE = "has an empty part", "leads out of the folder, to", "over other links", "is there twice"
REFUSED: dict[str, tuple[bytes, str]] = {
    "a name that leads out": (packed_by_another(("../a", b"1")), NAME),
    "an absolute name": (packed_by_another(("/a", b"1")), NAME),
    "a name in a folder that leads out": (packed_by_another(("a/../../b", b"1")), NAME),
    "an empty part": (packed_by_another(("a//b", b"1")), NAME),
    "a name that is too long": (packed_by_another(("a" * 256, b"1")), "a part of more than 255"),
    "a link with a name that leads out": (packed_by_another(("../a", "x")), NAME),
    "a link with an absolute name": (packed_by_another(("/a", "x")), NAME),
    "a link that leads out": (packed_by_another(("a", "..")), LINK),
    "a link below a folder that leads out": (packed_by_another(("d/a", "../../x")), LINK),
    "an absolute link": (packed_by_another(("a", "/etc")), LINK),
    "a link that leads out at last": (packed_by_another(("a", "b/../..")), LINK),
    "links of links": (packed_by_another(("d/e", ".."), ("x", "d/e/../y")), OVER),
    "a link before the one that it passes": (packed_by_another(("x", "d/e/../y"), ("d/e", "..")), OVER),
    "a link in a link": (packed_by_another(("a", "b"), ("a/d", "x")), TWICE),
    "a link below a link": (packed_by_another(("d/e", ".."), ("d/e/e/x", "..")), TWICE),
    "a file below a link": (packed_by_another(("a", "b"), ("a/d", b"1")), TWICE),
    "a file below a file": (packed_by_another(("a", b"1"), ("a/d", b"1")), TWICE),
    "a file twice": (packed_by_another(("a", b"1"), ("a", b"2")), TWICE),
    "a file and a link": (packed_by_another(("a", b"1"), ("a", "b")), TWICE),
    "a truncated archive": (packed_by_another(("a", os.urandom(9000)))[:-4000], "Compressed file ended"),
    "a broken stream": (packed_by_another(("a", b"1" * 900))[:40] + b"x" * 40, ""),
    "no archive": (b"text", "not a gzip file"),
    "nothing": (b"", "empty file"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_archive_of_another_is_refused(tmp_path: Path, kind: str) -> None:
    content, reason = REFUSED[kind]
    storage, digest = folder_below(tmp_path / "runs"), hashlib.sha256(content).hexdigest()
    storage.write(f"{digest}{archive.SUFFIX}", content)
    with pytest.raises(StorageError, match=rf"^the run's code, \S+, is refused: .*{reason}.*; start the run again$"):
        fetch(storage, digest, tmp_path / "node" / "code")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "node"}
    assert not [path for path in (tmp_path / "node").rglob("*") if not path.is_dir()]


def test_archive_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    content = packed_by_another(("a", b"1" * 11))
    storage, digest = folder_below(tmp_path), hashlib.sha256(content).hexdigest()
    storage.write(f"{digest}{archive.SUFFIX}", content)
    with pytest.raises(StorageError, match="its files are 11 bytes, for which the disk has no room"):
        fetch(storage, digest, tmp_path / "code")


@pytest.mark.parametrize(
    ("tag", "since", "expected"),
    [
        ("v1.2.3", 0, "1.2.3"),
        ("1.2", 2, "1.2+2.g"),
        ("mylib-v1.2", 1, "1.2+1.g"),
        ("release/2.0", 0, "2.0"),
        ("v1.0-rc1", 1, "1.0rc1+1.g"),
        ("py3-1.0+cu118", 1, "1.0+1.g"),
        ("2024.05.01", 0, "2024.5.1"),
        ("nightly", 1, "0.0+g"),
        ("a-g1.x", 0, "0.0+g"),
        (None, 0, "0.0+g"),
    ],
)
def test_version_follows_the_newest_tag(tmp_path: Path, tag: str | None, since: int, expected: str) -> None:
    (tmp_path / "train.py").write_text("1")
    assert git.version(tmp_path) == ""
    commit = commit_of(tmp_path)
    if tag:
        subprocess.run(["git", "tag", tag], cwd=tmp_path, check=True)
    more = ["git", "-c", "user.name=t", "-c", "user.email=t@e.org", "commit", "-q", "--allow-empty", "-m", "x"]
    for _ in range(since):
        subprocess.run(more, cwd=tmp_path, check=True)
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    version = git.version(tmp_path)
    stem, mark, short = version.partition("g")
    assert stem + mark == expected
    assert commit.startswith(short)
