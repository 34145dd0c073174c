"""Inputs: of a disk, a bucket and another run; on this node before the script starts."""

import shutil
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs import filesystem
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import inputs
from ray_on_ecs.tracking.storage import RunStorage
from tests.aws import BUCKET


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture
def storage(s3: Any) -> RunStorage:
    for name, content in (("a.txt", b"a"), ("deep/b.txt", b"bb")):
        s3.put_object(Bucket=BUCKET, Key=f"data/{name}", Body=content)
        s3.put_object(Bucket=BUCKET, Key=f"inputs/other/files/{name}", Body=content)
    return RunStorage.open(f"s3://{BUCKET}/inputs", "mine")


def contents(folder: str) -> dict[str, str]:
    return {str(each.relative_to(folder)): each.read_text() for each in Path(folder).rglob("*") if each.is_file()}


@pytest.mark.parametrize("source", [f"s3://{BUCKET}/data", f"s3://{BUCKET}/data/", "run:other"])
def test_a_prefix_of_a_bucket_is_fetched_once(
    storage: RunStorage, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = inputs.resolve("data", source, storage)
    folder = inputs.fetch(address)
    assert contents(folder) == {"a.txt": "a", "deep/b.txt": "bb"}
    assert capsys.readouterr().out == f"fetching {address} to this node: 2 files, 0 MiB\n"
    assert inputs.fetch(address) == folder
    assert not capsys.readouterr().out


def test_an_object_is_fetched_as_a_file(storage: RunStorage) -> None:
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


def test_an_object_that_shrinks_meanwhile_is_refused(storage: RunStorage, s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="shrinking/a", Body=b"long")
    found, path = filesystem.open_filesystem(f"s3://{BUCKET}/shrinking")
    [listed] = filesystem.list_files(found, path)
    s3.put_object(Bucket=BUCKET, Key="shrinking/a", Body=b"")
    with pytest.raises(OSError, match="shorter"):
        filesystem.copy_to_disk(found, {tmp_path / "a": listed})


def test_what_has_changed_in_the_bucket_is_fetched_anew(storage: RunStorage, s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="changing/a.txt", Body=b"a")
    before = inputs.fetch(inputs.resolve("data", f"s3://{BUCKET}/changing", storage))
    s3.put_object(Bucket=BUCKET, Key="changing/a.txt", Body=b"longer")
    after = inputs.fetch(inputs.resolve("data", f"s3://{BUCKET}/changing", storage))
    assert (contents(before), contents(after)) == ({"a.txt": "a"}, {"a.txt": "longer"})


def test_a_folder_of_the_disk_is_used_where_it_is(storage: RunStorage, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    assert inputs.fetch(inputs.resolve("data", str(tmp_path / "data"), storage)) == str(tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(UsageError, match="is not on every node"):
        inputs.fetch(str(tmp_path / "data"))


def test_a_stream_is_its_address(storage: RunStorage, cache: Path) -> None:
    assert inputs.fetch(inputs.resolve("data", f"stream:s3://{BUCKET}/data", storage)) == f"s3://{BUCKET}/data"
    assert not cache.exists(), "nothing is fetched"


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
def test_what_is_not_there_is_refused_in_a_line(storage: RunStorage, source: str) -> None:
    with pytest.raises(UsageError, match=f"--input: data={source} can't be read") as caught:
        inputs.resolve("data", source, storage)
    assert "\n" not in str(caught.value)


def test_what_the_disk_has_no_room_for_is_refused(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(filesystem.shutil, "disk_usage", lambda folder: usage(filesystem.SPARE_BYTES + 2))
    with pytest.raises(UsageError, match=rf"there is room for 0.0 GiB .* give stream:s3://{BUCKET}/data"):
        inputs.fetch(f"s3://{BUCKET}/data")
