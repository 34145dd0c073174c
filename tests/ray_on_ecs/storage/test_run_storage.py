import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.storage import bucket as module
from ray_on_ecs.storage.bucket import Bucket
from ray_on_ecs.storage.disk import Disk
from ray_on_ecs.storage.run_storage import RunStorage
from tests.aws import BUCKET
from tests.flaky_s3 import flaky_proxy


def keys(client: Any, prefix: str) -> set[str]:
    return {found["Key"] for found in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])}


def test_folder_is_created_by_the_first_write(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path / "new" / "deep"), "run")
    storage.check_writable()
    assert list(tmp_path.iterdir()) == []
    storage.write_json("result.json", {"a": 1})
    assert (tmp_path / "new" / "deep" / "run" / "result.json").is_file()
    assert storage.read_json("result.json") == {"a": 1}
    assert storage.read_json("config.json") is None


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_path_below_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--storage-path.*can't be written"):
        RunStorage.open(str(tmp_path / below), "run").check_writable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        RunStorage.open(str(tmp_path / "results"), "run").check_writable()


@pytest.mark.parametrize("path", ["gs://bucket/runs", "s3://", "s3:///runs", "http://example.com"])
def test_a_path_of_another_kind_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="neither a folder nor a bucket"):
        RunStorage.open(path, "run")


def test_keys_have_prefix_and_run_name(s3: Any) -> None:
    storage = RunStorage.open(f"s3://{BUCKET}/storage/", "run")
    storage.check_writable()
    assert keys(s3, "storage/") <= {"storage/"}
    storage.write_lines("metrics.jsonl", [{"epoch": 0}, {"epoch": 1}])
    storage.write("best/model.pt", b"weights")
    assert {"storage/run/metrics.jsonl", "storage/run/best/model.pt"} <= keys(s3, "storage/run")
    assert storage.uri == f"s3://{BUCKET}/storage/run"
    body = s3.get_object(Bucket=BUCKET, Key="storage/run/metrics.jsonl")["Body"].read()
    assert body == b'{"epoch": 0}\n{"epoch": 1}\n'


# The calls that change a bucket: of small files, parts of large ones, a file that is deleted, and a folder.
CHANGES = (r"PUT .*json$", r"PUT .*partNumber=", r"POST .*uploadId=", r"DELETE .*json$", r"POST .*delete$")


def test_calls_that_are_lost_are_made_again(s3: Any, aws_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = bytes(range(256)) * 2**16
    with flaky_proxy(aws_server, 0.3, 0.1) as line:
        for change in CHANGES:
            line.decide("lose", change)
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
        storage = RunStorage.open(f"s3://{BUCKET}/again", "run")
        storage.check_writable()
        for number in range(5):
            storage.write_json(f"{number}.json", {"number": number})
            assert storage.read_json(f"{number}.json") == {"number": number}
        with storage.open_writer("folder_1/model.pt") as stream:
            for start in range(0, len(weights), 2**20):
                stream.write(weights[start : start + 2**20])
        assert storage.folders("folder") == ["folder_1"]
        assert storage.file_sizes("folder_1") == {"model.pt": len(weights)}
        assert storage.read("folder_1/model.pt") == weights
        storage.write("folder_2/model.pt", b"")
        storage.delete_folder("folder_2")
        storage.delete("0.json")
        storage.delete("never.json")
        assert line.failed > 3
        assert line.lost > 5
        assert all(any(re.match(each, lost) for lost in line.lost_requests) for each in CHANGES)
    expected = {f"again/run/{n}.json" for n in range(1, 5)} | {"again/run/folder_1/model.pt"}
    assert keys(s3, "again/run/") - {"again/run/"} == expected


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize(("before", "after"), [("long" * 1000, "short"), ("short", "long" * 1000)])
def test_document_replaced_during_a_read(
    s3: Any, aws_server: str, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server)
    storage = RunStorage.open(f"s3://{BUCKET}/runs", "replaced")
    storage.write_json("status.json", {"state": before})
    answers = []

    def replacing(self: Bucket, method: str, path: str, **arguments: Any) -> Any:
        answer = real(self, method, path, **arguments)
        if method.startswith(("get", "head")) and not answers:
            answers.append(answer)
            storage.write_json("status.json", {"state": after})
        return answer

    real = Bucket.call
    monkeypatch.setattr(Bucket, "call", replacing)
    assert storage.read_json("status.json") in ({"state": before}, {"state": after})
    assert storage.read_json("status.json") == {"state": after}


def test_a_broken_document_is_read_twice_and_refused(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "run")
    storage.write("files.json", "{")
    with pytest.raises(UsageError, match=r"files.json in .*/run is broken .*; delete it or give another --run-name"):
        storage.read_json("files.json")


@pytest.mark.usefixtures("s3")
def test_another_process_retries_as_often(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with flaky_proxy(aws_server, 0.0) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
        monkeypatch.setattr(module, "MAX_ATTEMPTS", 5)
        storage = pickle.loads(pickle.dumps(RunStorage.open(f"s3://{BUCKET}/never", "run")))
        assert storage.uri == f"s3://{BUCKET}/never/run"
        line.failure_rate = 1.0
        with pytest.raises(OSError, match=r"503|can't be reached"):
            storage.write_json("a.json", 1)
        assert line.failed == 5


def test_file_is_replaced_atomically(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path), "run")
    storage.write("metrics.jsonl", "old")
    with Path(storage.path("metrics.jsonl")).open() as reader:
        storage.write("metrics.jsonl", "new")
        assert reader.read() == "old"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_listing_leaves_out_files_that_are_being_written(tmp_path: Path) -> None:
    disk, folder = Disk(), tmp_path / "run"
    users = folder / "below" / "a.pt.part"
    users.parent.mkdir(parents=True)
    users.touch()
    names: list[set[str]] = []
    with disk.writing(str(folder / "below" / "a.pt")) as file:
        file.write(b"whole")
        file.flush()
        names.append(set(disk.listing(str(folder), recursive=True).files))
        assert not disk.has_files(str(folder / "below" / "a.pt"))
    names.append(set(disk.listing(str(folder), recursive=True).files))
    assert names == [{"below/a.pt.part"}, {"below/a.pt.part", "below/a.pt"}]


def test_version_is_written_without_a_second_name_in_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path, names = Disk(), str(tmp_path / "state"), list[str]()
    for step in ("link", "replace"):
        original = getattr(os, step)

        def listed(*paths: Any, original: Any = original) -> None:
            names.extend(disk.listing(str(tmp_path)).files)
            original(*paths)

        monkeypatch.setattr(os, step, listed)
    assert disk.write_if(path, b"first", None)
    assert disk.write_if(path, b"second", "first")
    assert names == ["state"]
    assert os.listdir(tmp_path) == ["state"]
