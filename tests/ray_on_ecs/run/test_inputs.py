"""Inputs: of a disk, a bucket and another run; on this node before the script starts."""

import errno
import hashlib
import itertools
import shutil
import tempfile
import threading
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import inputs
from ray_on_ecs.storage import filesystem
from ray_on_ecs.storage.disk import Disk, StoredFile
from ray_on_ecs.storage.run_storage import RunStorage
from tests.aws import BUCKET
from tests.waiting import LIMIT_SECONDS


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture
def storage(s3: Any) -> RunStorage:
    for name, content in (("a.txt", b"a"), ("deep/b.txt", b"bb")):
        s3.put_object(Bucket=BUCKET, Key=f"data/{name}", Body=content)
        s3.put_object(Bucket=BUCKET, Key=f"inputs/other/files/{name}", Body=content)
    return RunStorage.open(f"s3://{BUCKET}/inputs", "mine")


def contents(folder: str) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("source", [f"s3://{BUCKET}/data", f"s3://{BUCKET}/data/", "run:other"])
def test_bucket_prefix_is_fetched_once(storage: RunStorage, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = inputs.resolve("data", source, storage)
    folder = inputs.fetch(address)
    assert contents(folder) == {"a.txt": "a", "deep/b.txt": "bb"}
    assert capsys.readouterr().out == f"fetching {address} to this node: 2 files, 0 MiB\n"
    assert inputs.fetch(address) == folder
    assert not capsys.readouterr().out


def test_object_is_fetched_as_a_file(storage: RunStorage) -> None:
    path = inputs.fetch(inputs.resolve("data", f"s3://{BUCKET}/data/a.txt", storage))
    assert (Path(path).name, Path(path).read_text()) == ("a.txt", "a")


def test_objects_larger_than_a_piece_are_fetched_whole(
    storage: RunStorage, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "PIECE_BYTES", 1000)
    for size in (0, 999, 1000, 1001, 5500):
        s3.put_object(Bucket=BUCKET, Key=f"sizes/{size}", Body=bytes(range(250)) * (size // 250) + b"x" * (size % 250))
    folder = Path(inputs.fetch(inputs.resolve("data", f"s3://{BUCKET}/sizes", storage)))
    for size in (0, 999, 1000, 1001, 5500):
        expected = s3.get_object(Bucket=BUCKET, Key=f"sizes/{size}")["Body"].read()
        assert (folder / str(size)).read_bytes() == expected


def put(s3: Any, prefix: str, keys: Iterable[str]) -> str:
    for key in keys:
        s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{key}", Body=b"" if key.endswith("/") else key.encode())
    return f"s3://{BUCKET}/{prefix}"


def test_unusual_keys_keep_their_names(storage: RunStorage, s3: Any) -> None:
    names = ["a b+c=#1%.txt", "ünï.txt", "100%25.txt", "q?x&y.txt", "back\\slash", " trail ", "tab\t", "'\"", "..."]
    names += ["x" * 255, "sub/" + "é" * 127, "sub/~", "-rf"]
    source = put(s3, "odd", [*names, "", "empty/", "sub/"])  # as the console makes folders
    assert contents(inputs.fetch(inputs.resolve("data", source, storage))) == {name: name for name in names}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (("shard", "shard/00.bin"), "'shard' is a folder, too"),
        (("a//b",), "'a//b' has an empty part, '.' or '..'"),
        (("/lead",), "'/lead' has an empty part, '.' or '..'"),
        (("../up",), "'../up' has an empty part, '.' or '..'"),
        (("a/../../../up",), "'a/../../../up' has an empty part, '.' or '..'"),
        (("./here",), "'./here' has an empty part, '.' or '..'"),
        (("é" * 128,), f"'{'é' * 128}' has a part of more than 255 bytes"),
        (
            ("./1", "./2", "./3", "./4", "./5"),
            ", ".join(f"'./{n}' has an empty part, '.' or '..'" for n in (1, 2, 3)) + ", and 2 more",
        ),
    ],
    ids=["a folder, too", "empty", "absolute", "above", "far above", "here", "long", "many"],
)
def test_keys_that_cannot_be_files_are_named(
    storage: RunStorage, s3: Any, cache: Path, keys: tuple[str, ...], named: str
) -> None:
    source = put(s3, f"bad-{hashlib.sha256(repr(keys).encode()).hexdigest()}", [*keys, "ok.txt"])
    way_out = f"rename them, or give stream:{source} and read it from there, part by part"
    with pytest.raises(UsageError) as caught:
        inputs.resolve("data", source, storage)
    assert str(caught.value) == f"--input: data={source} has keys that can't be files: {named}; {way_out}"
    with pytest.raises(UsageError) as caught:
        inputs.fetch(source)  # they were added after the driver's check
    assert str(caught.value) == f"--input: {source} has keys that can't be files: {named}; {way_out}"
    assert not list(cache.iterdir())
    assert inputs.resolve("data", f"stream:{source}", storage) == f"stream:{source}"


def test_keys_of_several_lines_are_named_on_one() -> None:
    filesystem.check_names("s3://bucket", ["two\nlines"], "--input", "give less")
    with pytest.raises(UsageError, match=r"files: '../two\\nlines' has an empty part, '.' or '..'; rename them"):
        filesystem.check_names("s3://bucket", ["../two\nlines"], "--input", "give less")


def test_folder_marker_with_content_is_named(storage: RunStorage, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="marked/folder/", Body=b"content")
    with pytest.raises(UsageError, match=r"s3://\S+/marked has keys .*'folder/' has an empty part.*give st"):
        inputs.fetch(f"s3://{BUCKET}/marked")


def test_object_deleted_during_fetch_may_be_retried(
    storage: RunStorage, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = put(s3, "going", ["a", "b"])
    copy_to_disk = filesystem.copy_to_disk

    def delete_first(*given: Any) -> None:
        s3.delete_object(Bucket=BUCKET, Key="going/b")
        copy_to_disk(*given)

    monkeypatch.setattr(filesystem, "copy_to_disk", delete_first)
    with pytest.raises(FileNotFoundError):
        inputs.fetch(source)
    assert contents(inputs.fetch(source)) == {"a": "a"}


@pytest.mark.parametrize("sizes", [[1] * 40, [80]], ids=["many small files", "a large file"])
def test_reads_run_concurrently(sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "PIECE_BYTES", 2)
    all_at_once = threading.Barrier(filesystem.FETCH_THREADS, timeout=LIMIT_SECONDS)
    reads = itertools.count()

    class Source(Disk):
        def read(self, path: str, start: int = 0, size: int | None = None, version: str = "") -> bytes:
            if next(reads) < filesystem.FETCH_THREADS:
                all_at_once.wait()
            return b"x" * (size or 0)

    files = {tmp_path / str(number): StoredFile(str(number), size) for number, size in enumerate(sizes)}
    filesystem.copy_to_disk(Source(), files)
    assert [path.stat().st_size for path in files] == sizes
    assert next(reads) == 40


def test_object_truncated_during_fetch_is_refused(storage: RunStorage, s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="shrinking/a", Body=b"long")
    found, path = filesystem.open_filesystem(f"s3://{BUCKET}/shrinking")
    [listed] = found.listing(path).files.values()
    s3.put_object(Bucket=BUCKET, Key="shrinking/a", Body=b"")
    with pytest.raises(OSError, match="shorter"):
        filesystem.copy_to_disk(found, {tmp_path / "a": listed})


def test_changed_objects_are_fetched_again(storage: RunStorage, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="changing/a.txt", Body=b"a")
    before = inputs.fetch(inputs.resolve("data", f"s3://{BUCKET}/changing", storage))
    s3.put_object(Bucket=BUCKET, Key="changing/a.txt", Body=b"longer")
    after = inputs.fetch(inputs.resolve("data", f"s3://{BUCKET}/changing", storage))
    assert (contents(before), contents(after)) == ({"a.txt": "a"}, {"a.txt": "longer"})


def test_local_folder_is_used_in_place(storage: RunStorage, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    assert inputs.fetch(inputs.resolve("data", str(tmp_path / "data"), storage)) == str(tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(UsageError, match="is not on every node"):
        inputs.fetch(str(tmp_path / "data"))


def test_streamed_input_is_its_address(storage: RunStorage, cache: Path) -> None:
    assert inputs.fetch(inputs.resolve("data", f"stream:s3://{BUCKET}/data", storage)) == f"s3://{BUCKET}/data"
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    "source",
    [
        f"s3://{BUCKET}/nothing",
        "s3://no-such-bucket/x",
        "run:unknown",
        "gs://bucket/x",
        "nowhere",
        "stream:s3://none/x",
    ],
)
def test_missing_input_is_refused_in_one_line(storage: RunStorage, source: str) -> None:
    with pytest.raises(UsageError, match=f"--input: data={source} can't be read") as caught:
        inputs.resolve("data", source, storage)
    assert "\n" not in str(caught.value)


def test_input_larger_than_the_disk_is_refused(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(filesystem.shutil, "disk_usage", lambda folder: usage(filesystem.SPARE_BYTES + 2))
    with pytest.raises(UsageError, match=rf"there is room for 0.0 GiB .* give stream:s3://{BUCKET}/data"):
        inputs.fetch(f"s3://{BUCKET}/data")


def test_first_file_of_a_shared_folder_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faces" / "0").mkdir(parents=True)
    (tmp_path / "faces" / "0" / "a.jpg").touch()
    monkeypatch.setattr(Disk, "listing", None)
    assert inputs.resolve("data", str(tmp_path / "faces"), RunStorage.open(str(tmp_path), "mine"))


def test_dead_mount_is_not_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(path: str) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", path)

    monkeypatch.setattr(inputs.os, "stat", dead)
    with pytest.raises(OSError, match="Transport endpoint"):
        inputs.fetch("/mnt/data/faces")
