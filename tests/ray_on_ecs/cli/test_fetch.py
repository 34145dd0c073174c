"""`ray-on-ecs fetch` from folders and from S3."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli.fetch import fetch_run
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.clusters import LocalCluster
from ray_on_ecs.tracking.snapshot import KeptFile, Snapshot, publish, write_snapshot
from tests.aws import BUCKET
from tests.ray_on_ecs.cli.folders import Folders

OF_RUNNER = {"curves.png", "model.safetensors", "logs/first.txt"}
RESULTS = {"config.json", "metrics.jsonl", "result.json", "files/a.part", *OF_RUNNER}
CHECKPOINT = {"checkpoints/step-000000010/__0_0.distcp", "checkpoints/step-000000010/.metadata"}


@pytest.fixture(params=["folder", "s3"])
def folders(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    aws_variables: dict[str, str],
    s3_client: Any,
    request: pytest.FixtureRequest,
) -> Folders:
    """A storage path of each kind with a run, `first`; the test starts in a separate folder."""
    path = str(tmp_path / "results") if request.param == "folder" else f"s3://{BUCKET}/fetch-{time.time_ns()}"
    for name, value in {**aws_variables, "RAY_ON_ECS_STORAGE_PATH": path}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = Folders(path)
    found.script("first", is_finished=False)
    found.of("first").write("result.json", "{}")
    found.files("first", "a.part")
    for file in ("run.lock", *OF_RUNNER, *CHECKPOINT):
        found.of("first").write(file, f"content of {file}")
    return found


def files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


def fetched(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["fetch", "--local", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_run_is_copied_without_checkpoints_and_lock(folders: Folders) -> None:
    assert main(["fetch", "--local", "first"]) == 0
    assert files(Path("runs/first")) == RESULTS
    assert Path("runs/first/files/a.part").read_text() == "content of files/a.part"
    assert Path("runs/first/model.safetensors").read_text() == "content of model.safetensors"


def test_checkpoints_are_copied_on_request(folders: Folders) -> None:
    assert main(["fetch", "--local", "first", "mine", "--checkpoints"]) == 0
    assert files(Path("mine/first")) == RESULTS | CHECKPOINT


def test_second_fetch_copies_only_new_files(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    first = fetched(capsys, "first")
    assert set(first["copied"]) == set(first["files"]) == RESULTS
    assert fetched(capsys, "first")["copied"] == []
    folders.of("first").write("model.safetensors", b"new")
    Path("runs/first/curves.png").write_bytes(b"cut")
    assert set(fetched(capsys, "first")["copied"]) == {"model.safetensors", "curves.png"}
    assert Path("runs/first/model.safetensors").read_bytes() == b"new"


def test_renamed_file_is_not_copied_again(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    storage, key = folders.of("first"), "versions/0-1-a/a.part"
    storage.write(key, "another content")
    write_snapshot(storage, Snapshot({"a.part": KeptFile(key, 15, written_at=1_700_000_000_123_456_789)}))
    assert "files/a.part" in fetched(capsys, "first")["copied"]
    storage.delete("files/a.part")  # on a disk, it does not belong to another snapshot
    publish(storage)
    assert not storage.exists(key)
    assert fetched(capsys, "first")["copied"] == []
    assert Path("runs/first/files/a.part").read_text() == "another content"


def test_modification_time_comes_from_the_storage(folders: Folders) -> None:
    fetch_run(LocalCluster(), "first", "runs")
    there = folders.of("first").filesystem.get_file_info(folders.of("first").path("model.safetensors"))
    assert Path("runs/first/model.safetensors").stat().st_mtime == pytest.approx(there.mtime.timestamp(), abs=1)


def test_selected_files_are_copied(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(fetched(capsys, "first", "--only", "*.json", "--only", "logs/*")["files"]) == {
        "config.json",
        "result.json",
        "logs/first.txt",
    }
    assert main(["fetch", "--local", "first", "--only", "*.bin"]) == 2
    assert "*.bin" in capsys.readouterr().err


def test_missing_run_is_refused_with_similar_names(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.status("another", "finished")
    assert main(["fetch", "--local", "frist"]) == 2
    assert "did you mean first?" in capsys.readouterr().err
    assert main(["fetch", "--local", "../results/first"]) == 2
    assert not Path("runs").exists()


def test_last_line_names_files_and_folder(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "--local", "first"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("runs/first: 7 files, ")
    assert "logs/" in line
    fetch_run(LocalCluster(), "first", "runs")
    printed = capsys.readouterr()
    assert "nothing new" in printed.err
    assert not printed.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder_is_reported(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir(mode=0o500)
    assert main(["fetch", "--local", "first"]) == 3
    assert "can't be copied" in capsys.readouterr().err


def test_file_at_the_target_is_reported(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/first/logs").parent.mkdir(parents=True)
    Path("runs/first/logs").write_text("in the way")
    assert main(["fetch", "--local", "first"]) == 3
    assert "can't be copied" in capsys.readouterr().err
    assert not [name for name in files(Path("runs")) if name.endswith(".part") and "files/" not in name]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """A storage path on the disk with a run, `first`; the test starts in a folder beside it."""
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", str(tmp_path / "results"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = Folders(str(tmp_path / "results"))
    found.script("first", is_finished=False)
    return found


def snapshot(folders: Folders, files: dict[str, KeptFile], **contents: str) -> None:
    for key, content in contents.items():
        folders.of("first").write(f"files/{key}", content)
    write_snapshot(folders.of("first"), Snapshot(files))


def test_nothing_is_written_through_a_link_of_an_earlier_fetch(own: Folders, tmp_path: Path) -> None:
    keys = tmp_path / "victim" / "authorized_keys"
    keys.parent.mkdir()
    keys.write_text("of the victim")
    Path("runs/first/files").mkdir(parents=True)
    for name in ("out", "deep"):
        Path("runs/first/files", name).symlink_to(keys.parent)
    own.of("first").write("files/out/authorized_keys", "of an attacker")
    own.of("first").write("files/deep/a/authorized_keys", "of an attacker")
    size = len("of an attacker")
    snapshot(own, {f"{at}/authorized_keys": KeptFile(f"files/{at}/authorized_keys", size) for at in ("out", "deep/a")})
    assert main(["fetch", "--local", "first"]) == 0
    assert keys.read_text() == "of the victim"
    assert [each.name for each in keys.parent.iterdir()] == ["authorized_keys"]
    assert Path("runs/first/files/out/authorized_keys").read_text() == "of an attacker"


LINKS = ["/etc/passwd", "/", "..", "../..", "../../../other", "a/../../..", "../../..", "x/../../../other"]


@pytest.mark.parametrize("text", LINKS)
def test_link_out_of_the_folder_is_left_out(own: Folders, capsys: pytest.CaptureFixture[str], text: str) -> None:
    snapshot(own, {"out": KeptFile(link=f"../../{text}" if text.startswith("..") else text), "in": KeptFile(link="b")})
    assert main(["fetch", "--local", "first"]) == 0
    assert not os.path.lexists("runs/first/files/out")
    assert Path("runs/first/files/in").is_symlink()
    assert (
        "left out, as they could change files elsewhere, or can't be files here: 'files/out'" in capsys.readouterr().err
    )


def test_links_that_lead_out_together_are_left_out(own: Folders, tmp_path: Path) -> None:
    links = {"d/e": "..", "x": "d/e/..", "y": "x/..", "z": "y/..", "w": "z/..", "circle": "circle"}
    snapshot(own, {name: KeptFile(link=text) for name, text in links.items()})
    for _ in range(2):
        assert main(["fetch", "--local", "first"]) == 0
        for path in Path("runs/first").rglob("*"):
            assert path.resolve().is_relative_to(Path("runs/first").resolve()), path


def test_files_of_git_are_left_out(own: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ck/.git/config", ".GIT/hooks/x", "checkpoints/.git/config"):
        own.of("first").write(name, "[core]")
    assert main(["fetch", "--local", "first", "--checkpoints"]) == 0
    assert not [path for path in Path("runs").rglob("*") if path.name.lower() == ".git"]
    assert "'ck/.git/config'" in capsys.readouterr().err


def test_longest_name_is_copied(own: Folders) -> None:
    own.of("first").write("a" * 255, "long")
    assert main(["fetch", "--local", "first"]) == 0
    assert Path("runs/first", "a" * 255).read_text() == "long"


def test_keys_that_are_no_files_are_left_out(
    aws_variables: dict[str, str], s3_client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = f"fetch-{time.time_ns()}"
    for name, value in {**aws_variables, "RAY_ON_ECS_STORAGE_PATH": f"s3://{BUCKET}/{path}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for key in ("result.json", "a//b", "../../out", "a/../../../out", "c/./d", "n" * 300, "/e"):
        s3_client.put_object(Bucket=BUCKET, Key=f"{path}/first/{key}", Body=b"{}")
    assert main(["fetch", "--local", "first"]) == 0
    assert files(Path("runs/first")) == {"result.json"}
    assert {each.name for each in tmp_path.iterdir()} == {"runs"}
