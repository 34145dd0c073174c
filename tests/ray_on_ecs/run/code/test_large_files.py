"""Large files of the user's folder in a run on this machine: copies, and links to those for which code has no room."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import StorageError, UsageError
from ray_on_ecs.run.code import archive, files
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import publish
from tests.run_folders import Clock, Nodes, in_manifest

LARGE = 2000
TEXT = "x" * LARGE
NAMES = ["large.pt", "sub/deep/large.pt", 'a b\'s "c".pt', "モデル/größe.pt", "new\nline.pt", os.fsdecode(b"\xe9.pt")]

MODES = [(0o600, 0o644), (0o755, 0o755), (0o666, 0o644), (0o700, 0o755), (0o655, 0o644)]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LARGE_BYTES", LARGE - 1)
    monkeypatch.setattr(files, "MAX_BYTES", 10 * LARGE)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return fill(tmp_path / "project", {"train.py": 9, "large.pt": LARGE})


@pytest.fixture
def local(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path / "results"), "mine")


def fill(folder: Path, sizes: dict[str, int]) -> Path:
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x" * size)
    return folder


def store(
    project: Path, storage: RunStorage, say: Callable[[str], None] = print, *, is_here: bool = True, **more: object
) -> Code:
    config = RunConfig(command=("train.py",), working_dir=str(project), **more)  # ty: ignore[invalid-argument-type]
    return archive.store(config, storage, say, is_here=is_here)


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"new")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"new")


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_text("new")
    new.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda path: path.write_text("new"),
    "written in place": write_in_place,
    "truncated": lambda path: os.truncate(path, 1),
    "appended": append,
    "replaced": replace,
    "deleted": lambda path: path.unlink(),
    "another mode": lambda path: path.chmod(0o600),
    "another time": lambda path: os.utime(path, (1, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("through_link", [False, True])
def test_original_and_other_run_stay(
    project: Path, local: RunStorage, tmp_path: Path, change: str, through_link: bool
) -> None:
    (project / "latest").symlink_to(project / "large.pt")
    before = (project / "large.pt").stat()
    code = store(project, local)
    for run in ("one", "two"):
        code.place(tmp_path / run)
    assert os.readlink(tmp_path / "one" / "latest") == "large.pt"
    CHANGES[change](tmp_path / "one" / ("latest" if through_link else "large.pt"))
    assert [(folder / "large.pt").read_text() for folder in (project, tmp_path / "two")] == [TEXT, TEXT]
    after = (project / "large.pt").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("name", "mode", "copied"),
    [*((name, 0o444, 0o644) for name in NAMES), *(("large.pt", *modes) for modes in MODES)],
)
def test_copy_has_name_content_and_executable_bit(
    project: Path, local: RunStorage, tmp_path: Path, name: str, mode: int, copied: int
) -> None:
    fill(project, {name: LARGE})
    os.utime(project / name, (1, 1))
    (project / name).chmod(mode)
    store(project, local).place(tmp_path / "node")
    path = tmp_path / "node" / name
    status = path.stat()
    assert (path.read_text(), path.is_symlink(), stat.S_IMODE(status.st_mode)) == (TEXT, False, copied)
    assert status.st_mtime > (tmp_path / "project").stat().st_mtime - 10


def test_original_that_has_grown_is_copied_as_it_is(project: Path, local: RunStorage, tmp_path: Path) -> None:
    code = store(project, local)
    append(project / "large.pt")
    code.place(tmp_path / "node")
    assert (tmp_path / "node" / "large.pt").read_text() == f"{TEXT}new"


@pytest.mark.parametrize("limit", [LARGE * 10, 10])
def test_missing_original_is_named(
    project: Path, local: RunStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", limit)
    code = store(project, local)
    (project / "large.pt").unlink()
    with pytest.raises(OSError, match=r"large\.pt is not on this node; give s3://bucket/prefix as --storage-path"):
        code.place(tmp_path / "node")


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_unreadable_original_is_named(project: Path, local: RunStorage, tmp_path: Path) -> None:
    code = store(project, local)
    (project / "large.pt").chmod(0)
    with pytest.raises(PermissionError, match=r"large\.pt"):
        code.place(tmp_path / "node")


def test_copies_larger_than_the_disk_are_refused(
    project: Path, local: RunStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = store(project, local)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=LARGE - 1))
    with pytest.raises(StorageError, match=r"^the large files are 2,000 bytes, for which the disk of \S+ has no"):
        code.place(tmp_path / "node")
    assert not (tmp_path / "node" / "large.pt").exists()


LINKED = "is linked, not copied: a script that writes it changes your file"
ALL_LINKED = "are linked, not copied: a script that writes them changes your files"
FOUR = {"a.pt": 6 * LARGE, "b.pt": 5 * LARGE, "c.pt": 4 * LARGE, "d.pt": 3 * LARGE}


@pytest.mark.parametrize(
    ("sizes", "links", "lines"),
    [
        ({}, set(), []),
        ({"a.pt": 10 * LARGE - 9}, set(), []),
        ({"a.pt": 10 * LARGE}, {"a.pt"}, [f"a.pt (20 KiB) {LINKED}"]),
        (FOUR, {"a.pt", "b.pt"}, [f"a.pt (12 KiB), b.pt (9.8 KiB) {ALL_LINKED}"]),
        ({f"{n}\n.pt": 10 * LARGE for n in range(5)}, {f"{n}\n.pt" for n in range(5)}, None),
        ({f"{n}.pt": LARGE - 1 for n in range(11)}, {"0.pt"}, [f"0.pt (2.0 KiB) {LINKED}"]),
    ],
)
@pytest.mark.parametrize("more", [{}, {"exclude": ("none",)}, {"include": ("none",)}])
def test_largest_files_beyond_the_limit_are_linked(
    local: RunStorage, tmp_path: Path, sizes: dict[str, int], links: set[str], lines: list[str] | None, more: dict
) -> None:
    project, said = fill(tmp_path / "project", {"train.py": 9, **sizes}), list[str]()
    code = store(project, local, said.append, **more)
    assert code.links.keys() == links
    assert code.copies.keys() == {name for name, size in sizes.items() if size >= LARGE} - links
    names = r"0\n.pt (20 KiB), 1\n.pt (20 KiB), 2\n.pt (20 KiB) and 2 more"
    assert said == (lines if lines is not None else [f"{names} {ALL_LINKED}"])
    code.place(tmp_path / "node")
    found = {name for name in ("train.py", *sizes) if (tmp_path / "node" / name).is_symlink()}
    assert found == links
    assert all((tmp_path / "node" / name).stat().st_size == size for name, size in sizes.items())


def test_excluded_large_file_is_neither_copied_nor_linked(project: Path, local: RunStorage, tmp_path: Path) -> None:
    fill(project, {"data/huge.pt": 50 * LARGE})
    said: list[str] = []
    code = store(project, local, said.append, exclude=("*.pt",))
    code.place(tmp_path / "node")
    assert (code.copies, code.links) == ({}, {})
    assert sorted(os.listdir(tmp_path / "node")) == ["train.py"]
    assert not [line for line in said if "linked" in line]


def test_data_set_of_many_files_is_refused(project: Path, local: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINKS", 2)
    fill(project, {f"data/{number}.png": LARGE - 1 for number in range(12)})
    with pytest.raises(UsageError, match="and code is at most 20 KiB; the largest are data/"):
        store(project, local)


def test_run_elsewhere_has_all_in_its_archive(project: Path, local: RunStorage, tmp_path: Path) -> None:
    code = store(project, local, is_here=False)
    assert (code.copies, code.links) == ({}, {})
    fill(project, {"huge.pt": 10 * LARGE})
    with pytest.raises(UsageError, match="--working-dir: "):
        store(project, local, is_here=False)


@pytest.mark.parametrize("is_direct", [True, False])
def test_changed_copy_is_kept_and_another_is_not(
    project: Path, local: RunStorage, tmp_path: Path, is_direct: bool
) -> None:
    fill(project, {"data/same.pt": LARGE})
    code, clock = store(project, local), Clock()
    for content in ("first", "second"):  # the second start has the run's content, and not that of the original
        nodes = Nodes(local, tmp_path / "nodes", clock, code=code.place, is_direct=is_direct)
        found = (nodes.folder / "large.pt").read_text()
        assert found == (TEXT if content == "first" else "first")
        (nodes.folder / "large.pt").write_text(content)
        (project / "data" / "same.pt").write_text(content * LARGE)  # by the user
        nodes.end()
        publish(local)
        assert in_manifest(local) == {"large.pt": content}
    assert (project / "large.pt").read_text() == TEXT


def test_copies_of_several_nodes_are_their_own(project: Path, local: RunStorage, tmp_path: Path) -> None:
    nodes = Nodes(local, tmp_path / "nodes", Clock(), 2, code=store(project, local).place)
    one, two = (node.folder / "large.pt" for node in nodes.nodes)
    one.write_text("new")
    nodes.end()
    assert (in_manifest(local), two.read_text(), (project / "large.pt").read_text()) == (
        {"large.pt": "new"},
        TEXT,
        TEXT,
    )


@pytest.mark.parametrize("is_direct", [True, False])
def test_copy_that_a_kill_has_cut_is_placed_again(
    project: Path, local: RunStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    fill(project, {"data/same.pt": LARGE})
    code, clock = store(project, local), Clock()

    def start() -> Nodes:
        return Nodes(local, tmp_path / "nodes", clock, code=code.place, is_direct=is_direct)

    def cut(source: str, target: Path) -> None:
        target.write_bytes(Path(source).read_bytes()[: LARGE // 2])
        raise KeyboardInterrupt

    for own in (TEXT, "new"):  # before the first start, and before the second one
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "copyfile", cut)
            with pytest.raises(KeyboardInterrupt):
                start()
        publish(local)  # at the end of the command
        nodes = start()
        assert (nodes.folder / "large.pt").read_text() == own
        assert (nodes.folder / "data/same.pt").read_text() == TEXT
        (nodes.folder / "large.pt").write_text("new")
        nodes.end()
        assert in_manifest(local) == {"large.pt": "new"}
