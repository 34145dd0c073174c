"""The folder for temporary files: other users can't have put anything there."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_on_ecs import private_folder
from ray_on_ecs.errors import UsageError
from ray_on_ecs.private_folder import machine, node_folder, place, temporary
from ray_on_ecs.run.files import outside

SOURCES = Path(private_folder.__file__).parent
NAME = f"ray-on-ecs-{os.getuid()}"


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_folder_is_created_for_this_user_alone(parent: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert temporary() == parent / NAME
    finally:
        os.umask(before)
    assert (parent / NAME).stat().st_mode & 0o777 == 0o700
    assert temporary() == parent / NAME
    assert node_folder("inputs", "a").parent == parent / NAME / "inputs"


def with_mode(mode: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)

    return make


OTHERS: dict[str, Callable[[Path], object]] = {
    "a file": Path.touch,
    "a pipe": os.mkfifo,
    "a link to a folder": lambda path: path.symlink_to(path.parent),
    "a link to an own private folder": lambda path: path.symlink_to(tempfile.mkdtemp(dir=path.parent)),
    "a link that leads nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    **{f"mode {mode:o}": with_mode(mode) for mode in (0o777, 0o1777, 0o755, 0o770, 0o710, 0o701, 0o740, 0o704, 0o720)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_folder_that_others_can_change_is_refused(parent: Path, kind: str) -> None:
    OTHERS[kind](parent / NAME)
    with pytest.raises(UsageError, match=f"TMPDIR: {re.escape(str(parent / NAME))} .*another folder"):
        node_folder("packages", "a")


def test_folder_of_another_user_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (parent / "ray-on-ecs-12345").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UsageError, match="is not a folder that only you can open; delete it"):
        temporary()


def test_missing_parent_is_one_line(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(parent / "gone"))
    with pytest.raises(UsageError, match=r"TMPDIR: .*/gone/ray-on-ecs-\d+ can't be created \(No such file"):
        temporary()


def test_folder_at_home_is_closed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(parent))
    with_mode(0o755)(parent / ".ray-on-ecs")
    assert private_folder.at_home().stat().st_mode & 0o777 == 0o700


def test_no_other_module_names_the_folder_for_temporary_files() -> None:
    known = {Path(private_folder.__file__), Path(outside.__file__)}  # the latter looks at what scripts write there
    for file in {*SOURCES.rglob("*.py")} - known:
        assert not re.search(r"gettempdir|mktemp|['\"](/tmp|/var/tmp|/dev/shm)", file.read_text()), file


def test_jobs_and_locks_are_known_in_another_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host name changes with the network."""
    before = machine(), place()
    monkeypatch.setattr(private_folder.socket, "gethostname", lambda: "another")
    assert (machine(), place()) == before if Path("/etc/machine-id").exists() else place() == before[1]


@pytest.mark.parametrize(("platform", "name"), [("linux", "lab"), ("darwin", "darwin")])
def test_container_without_an_identity_has_its_host_name(
    monkeypatch: pytest.MonkeyPatch, platform: str, name: str
) -> None:
    monkeypatch.setattr(private_folder, "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(private_folder.socket, "gethostname", lambda: "lab")
    monkeypatch.setattr(private_folder, "Path", lambda path: Path(os.devnull))
    assert machine() == name
