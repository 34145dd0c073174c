import os
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import BUCKET
from training.errors import UsageError
from training.storage import RunStorage


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, aws_variables: dict[str, str], s3_client: Any) -> Any:
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)
    return s3_client


def keys(client: Any, prefix: str) -> set[str]:
    return {found["Key"] for found in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])}


def test_a_folder_is_made_only_when_something_is_written(tmp_path: Path) -> None:
    storage = RunStorage.open(str(tmp_path / "new" / "deep"), "run")
    storage.check_writable()
    assert list(tmp_path.iterdir()) == [], "a check leaves nothing behind"
    storage.write_json("result.json", {"a": 1})
    assert (tmp_path / "new" / "deep" / "run" / "result.json").is_file()
    assert storage.read_json("result.json") == {"a": 1}
    assert storage.read_json("config.json") is None, "what is not there is None"


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


@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"s3://no-such-bucket/runs.*does not exist") as caught:
        RunStorage.open("s3://no-such-bucket/runs", "run").check_writable()
    assert "\n" not in str(caught.value)


def test_a_bucket_is_written_under_its_prefix_and_run(s3: Any, tmp_path: Path) -> None:
    storage = RunStorage.open(f"s3://{BUCKET}/storage/", "run")
    storage.check_writable()
    assert keys(s3, "storage/") <= {"storage/"}, "a check leaves no object but the prefix's marker"
    storage.write_lines("metrics.jsonl", [{"epoch": 0}, {"epoch": 1}])
    (tmp_path / "model.pt").write_bytes(b"weights")
    storage.upload(tmp_path, "best")
    assert {"storage/run/metrics.jsonl", "storage/run/best/model.pt"} <= keys(s3, "storage/run")
    assert storage.uri == f"s3://{BUCKET}/storage/run", "the place is shown as a user types it"
    body = s3.get_object(Bucket=BUCKET, Key="storage/run/metrics.jsonl")["Body"].read()
    assert body == b'{"epoch": 0}\n{"epoch": 1}\n', "one document a line"
