"""Large files outside of a run's folder: which are named at the end, and which are not."""

import os
from pathlib import Path

import psutil
import pytest

from ray_on_ecs.run.files import outside
from ray_on_ecs.run.files.outside import MIN_BYTES, OutsideFiles
from ray_on_ecs.run.files.scan import open_for_writing

LARGE = bytes(MIN_BYTES)
UNLESS = ", unless another program wrote it"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a script, with folders that existed before."""
    monkeypatch.setattr(outside, "TEMPORARY", str(tmp_path / "tmp"))
    monkeypatch.setattr(outside, "SYSTEM", ("/proc/",))  # tests may run below /dev/shm
    for folder in ("home/.cache/old", "home/old", "tmp/old", "data/out", "run"):
        (tmp_path / folder).mkdir(parents=True)
    return {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}


def find(tmp_path: Path, places: dict[str, str], *names: str, seen: bool = False, size: int = MIN_BYTES) -> list[str]:
    """Return what is named after these files were written, perhaps seen while they were open."""
    files = OutsideFiles([tmp_path / "run"], places)
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(bytes(size))
            if seen:
                open_for_writing(tmp_path / "run", [psutil.Process()], files.see)
    files.seen = {path for path in files.seen if path.startswith(str(tmp_path))}  # not where pytest writes
    return files.find()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tmp/my-torchtune/full/model.pt", "{}/tmp/my-torchtune/full/model.pt (1 MiB)"),
        ("home/.cache/my-nanochat/base/model.pt", "~/.cache/my-nanochat/base/model.pt (1 MiB)"),
        ("home/results/model.pt", "~/results/model.pt (1 MiB)"),
        ("home/model.pt", "~/model.pt (1 MiB)"),
        ("tmp/model.pt", "{}/tmp/model.pt (1 MiB)"),
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_new_files_are_named(tmp_path: Path, places: dict[str, str], name: str, shown: str, seen: bool) -> None:
    """If they were not seen with the script, another run may have written them: the line named its checkpoints."""
    text = shown.format(tmp_path)
    assert find(tmp_path, places, name, seen=seen) == [text if seen else text.replace("MiB", f"MiB{UNLESS}")]


def test_several_files_are_named_by_their_folder(tmp_path: Path, places: dict[str, str]) -> None:
    names = ("tmp/mine/run/a.pt", "tmp/mine/run/b/c.pt")
    assert find(tmp_path, places, *names) == [f"{tmp_path}/tmp/mine/run (2 MiB{UNLESS})"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tmp/old/a/model.pt", "{}/tmp/old/a/model.pt (1 MiB)"),
        ("home/old/model.pt", "~/old/model.pt (1 MiB)"),
        ("home/.cache/old/model.pt", "~/.cache/old/model.pt (1 MiB)"),
        ("data/out/model.pt", "{}/data/out/model.pt (1 MiB)"),
        ("data/pytest-of-me/tmpab12cd_e/model.pt", "{}/data/pytest-of-me/tmpab12cd_e/model.pt (1 MiB)"),
    ],
)
def test_files_in_older_folders_are_named_if_seen(
    tmp_path: Path, places: dict[str, str], name: str, shown: str
) -> None:
    assert find(tmp_path, places, name) == []
    assert find(tmp_path, places, name, seen=True) == [shown.format(tmp_path)]


@pytest.mark.parametrize(
    "name",
    [
        "home/.cache/huggingface/hub/models--a/blobs/x",
        "home/.cache/huggingface/datasets/a/b.arrow",
        "home/.cache/torch/hub/checkpoints/a.pth",
        "home/.cache/pip/http/x",
        "home/.triton/x.so",
        "home/new/__pycache__/a.pyc",
        "home/.nv/ComputeCache/x",
        "tmp/torchinductor_root/x.so",
        "tmp/ray/session_1/logs/x.log",
        "tmp/tmpab12cd_e/x",
        "tmp/pytest-of-me/x",
        "home/wandb/run-1/a.wandb",
        "hf/hub/models--a/x",
        "run/work/code/model.pt",
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_caches_and_files_of_the_run_are_not_named(
    tmp_path: Path, places: dict[str, str], name: str, seen: bool
) -> None:
    assert find(tmp_path, {**places, "HF_HOME": str(tmp_path / "hf")}, name, seen=seen) == []


def test_small_old_and_deleted_files_are_not_named(tmp_path: Path, places: dict[str, str]) -> None:
    assert find(tmp_path, places, "tmp/new/a", size=MIN_BYTES - 1) == []
    files = OutsideFiles([tmp_path / "run"], places)
    for name in ("deleted", "old-file", "link", "folder"):
        (tmp_path / "tmp" / f"new-{name}").mkdir()
    deleted = tmp_path / "tmp" / "new-deleted" / "a"
    deleted.write_bytes(LARGE)
    files.seen.add(str(deleted))
    deleted.unlink()
    old = tmp_path / "tmp" / "new-old-file" / "a"
    old.write_bytes(LARGE)
    os.utime(old, (1, 1))
    (tmp_path / "tmp" / "new-link" / "a").symlink_to(tmp_path / "data")
    assert files.find() == []


def test_each_folder_is_named_once_with_all_its_files(tmp_path: Path, places: dict[str, str]) -> None:
    files = OutsideFiles([tmp_path / "run"], places)
    for name in ("a/1", "a/2", "b"):
        (tmp_path / "tmp/out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tmp/out" / name).write_bytes(LARGE)
    assert files.find() == [f"{tmp_path}/tmp/out (3 MiB{UNLESS})"]
    assert files.find() == []


def test_files_of_other_programs_are_not_remembered(tmp_path: Path, places: dict[str, str]) -> None:
    files = OutsideFiles([tmp_path / "run"], places)
    for number in range(10):
        files.see(f"{places['HOME']}/.cache/huggingface/{number}")
        files.see(f"/proc/{number}/oom_score_adj")
    assert not files.seen


def test_search_ends_in_a_disk_with_many_files(
    tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "MAX_ENTRIES", 20)
    for number in range(100):
        (tmp_path / "data" / f"{number}").mkdir()
    files = OutsideFiles([tmp_path / "run"], places)
    names = ("data/model.pt", "home/mine/model.pt")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LARGE)
    files.seen.add(f"{tmp_path}/data/model.pt")
    listed: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    assert files.find() == [
        f"{tmp_path}/data/model.pt (1 MiB)",
        "~/mine/model.pt (1 MiB, unless another program wrote it)",
    ]
    assert len(listed) < 30


def test_remembered_files_have_a_limit(tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "MAX_ENTRIES", 20)
    files = OutsideFiles([tmp_path / "run"], places)
    for number in range(100):
        files.see(f"{tmp_path}/data/{number}")
    assert len(files.seen) == 20
