"""`ray-on-ecs fetch` from folders and from S3."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli.fetch import copy_run
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.clusters import LocalCluster
from ray_on_ecs.storage.snapshot import KeptFile, Snapshot, publish, write_snapshot
from tests.aws import BUCKET
from tests.ray_on_ecs.cli.folders import Folders

PNG = "\x89PNG\r\n\x1a\n"
OF_RUNNER = {"curves.png", "model.safetensors", "logs/first.txt"}
RESULTS = {"run.json", "metrics.jsonl", "result.json", "files/a.part", *OF_RUNNER}
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
    found.of("first").write("curves.png", f"{PNG} a plot".encode("latin-1"))
    return found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


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
    copy_run(LocalCluster(), "first", Path("runs"))
    there = folders.of("first").find("model.safetensors")
    assert there
    assert Path("runs/first/model.safetensors").stat().st_mtime == pytest.approx(there.mtime_ns / 1e9, abs=1)


def test_selected_files_are_copied(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(fetched(capsys, "first", "--only", "*.json", "--only", "logs/*")["files"]) == {
        "run.json",
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
    assert ", nothing new: " in str(copy_run(LocalCluster(), "first", Path("runs")))
    assert capsys.readouterr() == ("", "")


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
    assert [path.name for path in keys.parent.iterdir()] == ["authorized_keys"]
    assert Path("runs/first/files/out/authorized_keys").read_text() == "of an attacker"


LINKS = ["/etc/passwd", "/", "..", "../..", "../../../other", "a/../../..", "../../..", "x/../../../other"]


@pytest.mark.parametrize("text", LINKS)
def test_link_out_of_the_folder_is_left_out(own: Folders, capsys: pytest.CaptureFixture[str], text: str) -> None:
    snapshot(own, {"out": KeptFile(link=f"../../{text}" if text.startswith("..") else text), "in": KeptFile(link="b")})
    assert main(["fetch", "--local", "first"]) == 0
    assert not os.path.lexists("runs/first/files/out")
    assert Path("runs/first/files/in").is_symlink()
    assert (
        "left out, as they are not safe on this machine, or can't be files here: 'files/out'" in capsys.readouterr().err
    )


def test_links_that_lead_out_together_are_left_out(own: Folders) -> None:
    links = {"d/e": "..", "x": "d/e/..", "y": "x/..", "z": "y/..", "w": "z/..", "circle": "circle"}
    snapshot(own, {name: KeptFile(link=text) for name, text in links.items()})
    for _ in range(2):
        assert main(["fetch", "--local", "first"]) == 0
        assert links_out() == []
        assert Path("runs/first/files/x").is_symlink()


def links_out() -> list[str]:
    """Links in the fetched folder that lead to another place."""
    top = os.path.realpath("runs/first")
    links = [path for path in Path("runs/first").rglob("*") if path.is_symlink()]
    return [str(path) for path in links if os.path.commonpath([os.path.realpath(path), top]) != top]


LATER = {  # the links of a run at the first fetch, and at the second one
    "a folder becomes a link": ({"x": "d/e/../.."}, {"d/e": ".."}),
    "a link leads up": ({"x": "d/../..", "d": "a/b"}, {"d": "."}),
    "links of links": ({"z": "y/..", "y": "x/../b", "x": "a/b/c"}, {"x": "."}),
    "a link vanishes": ({"w": "s/r/../../..", "s": ".", "r": "a/b"}, {"s": "."}),
    "a folder between": ({"x": "p/q/../../../..", "p/q": "../a/b/c"}, {"p": "."}),
}


@pytest.mark.parametrize("kind", LATER)
def test_link_of_an_earlier_fetch_is_checked_again(own: Folders, kind: str) -> None:
    folders = {f"{name}/f": KeptFile(f"files/{name}/f", 1) for name in ("d/e", "a/b/c")}
    for name in folders:
        own.of("first").write(f"files/{name}", "1")
    for links in LATER[kind]:
        kept = {name: file for name, file in folders.items() if not any(name.startswith(f"{link}/") for link in links)}
        snapshot(own, {**kept, **{name: KeptFile(link=text) for name, text in links.items()}})
        for name in links:
            shutil.rmtree(Path("runs/first/files", name), ignore_errors=True)
        assert main(["fetch", "--local", "first"]) == 0
        assert links_out() == []


def test_link_that_has_become_a_file_is_copied(own: Folders) -> None:
    for file in (KeptFile(link="b"), KeptFile("files/a", 1, written_at=1)):
        snapshot(own, {"a": file, "b": KeptFile("files/b", 1, written_at=1)}, a="1", b="2")
        assert main(["fetch", "--local", "first"]) == 0
    assert [Path("runs/first/files", name).read_text() for name in "ab"] == ["1", "2"]


def test_links_of_the_user_stay(own: Folders, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    Path("runs/first/files").mkdir(parents=True)
    own_links = {"data": str(tmp_path / "data"), "up": "../../../../data"}
    for name, text in own_links.items():
        Path("runs/first/files", name).symlink_to(text)
    snapshot(own, {"a": KeptFile(link="b")})
    assert main(["fetch", "--local", "first"]) == 0
    assert {name: os.readlink(f"runs/first/files/{name}") for name in own_links} == own_links


USERS = ["checkpoints", "checkpoints/step-000000010", "logs", "result.json", "curves.png", "report.html", "files"]


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("exists", [True, False])
def test_link_of_the_user_is_followed(own: Folders, tmp_path: Path, name: str, exists: bool) -> None:
    contents = {"checkpoints/step-000000010/.metadata": "1", "logs/a.txt": "2", "result.json": "{}", "curves.png": PNG}
    for file, content in contents.items():
        own.of("first").write(file, content.encode("latin-1"))
    own.files("first", "a", "b/c")
    own.status("first", "finished")
    own.of("first").write("report.html", "a page of others")
    link, big = Path("runs/first", name), tmp_path / "big" / "disk"
    link.parent.mkdir(parents=True)
    big.parent.mkdir()
    if exists:
        big.touch() if "." in name else big.mkdir()
    link.symlink_to(big)
    for _ in range(2):
        assert main(["fetch", "--local", "first", "--checkpoints"]) == 0
        assert link.is_symlink()
        assert {*contents, "report.html", "files/a", "files/b/c"} <= {
            str(Path(*path.parts[2:])) for path in all_files("runs/first")
        }
    assert big.exists()


def all_files(top: str) -> list[Path]:
    return [Path(parent, name) for parent, _, names in os.walk(top, followlinks=True) for name in names]


def test_links_of_a_run_are_not_made_below_a_link_of_the_user(
    own: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/first").mkdir(parents=True)
    (tmp_path / "big").mkdir()
    Path("runs/first/files").symlink_to(tmp_path / "big")
    snapshot(own, {"a": KeptFile("files/a", 1), "in": KeptFile(link="a")}, a="1")
    assert main(["fetch", "--local", "first"]) == 0
    assert [path.name for path in (tmp_path / "big").iterdir()] == ["a"]
    assert "can't be files here: 'files/in'" in capsys.readouterr().err


def test_files_of_git_are_left_out(own: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ck/.git/config", ".GIT/hooks/x", "checkpoints/.git/config"):
        own.of("first").write(name, "[core]")
    assert main(["fetch", "--local", "first", "--checkpoints"]) == 0
    assert not [path for path in Path("runs").rglob("*") if path.name.lower() == ".git"]
    assert "'ck/.git/config'" in capsys.readouterr().err


@pytest.mark.parametrize("top", ["", "ck/", "files/", "files/a/b/"])
@pytest.mark.parametrize(
    "orders", [["HCORW"], ["HORW", "HCORW"], ["C", "H", "ORW"], ["ORW", "C", "H"], ["HORW", "CORW"]]
)
def test_bare_repository_is_not_fetched(
    own: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], top: str, orders: list[str]
) -> None:
    core = (
        "repositoryformatversion = 0",
        "bare = false",
        "worktree = w",
        f'fsmonitor = "touch {tmp_path / "ran"}; false"',
    )
    program = "\n\t".join(("[core]", *core))
    repository = {"H": ("HEAD", "ref: refs/heads/main\n"), "C": ("config", program), "O": ("objects/a", "1")}
    repository |= {"R": ("refs/b", "1"), "W": ("w/x", "1")}
    for order in orders:
        shutil.rmtree(own.of("first").path())
        own.script("first", is_finished=False)
        contents = {top + name: content for name, content in map(repository.__getitem__, order)}
        for name, content in contents.items():
            own.of("first").write(name, content)
        kept = {name: KeptFile(name, len(content)) for name, content in contents.items() if name.startswith("files/")}
        write_snapshot(own.of("first"), Snapshot({name.removeprefix("files/"): file for name, file in kept.items()}))
        assert main(["fetch", "--local", "first"]) == 0
        subprocess.run(["git", "status"], cwd=Path("runs/first", top), capture_output=True, check=False)
        assert not (tmp_path / "ran").exists()
    assert "can't be files here: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../a", "/a", "", "a//b", "x/.git/config", ".git", "\ud800", "n" * 256, "a\0"])
def test_odd_name_in_the_manifest_is_left_out(own: Folders, capsys: pytest.CaptureFixture[str], name: str) -> None:
    snapshot(own, {name: KeptFile("files/good", 1), "good": KeptFile("files/good", 1)}, good="1")
    assert main(["fetch", "--local", "first"]) == 0
    assert repr(f"files/{name}") in capsys.readouterr().err
    assert "good" in {path.name for path in Path("runs/first/files").iterdir()}
    assert len(list(Path("runs/first/files").rglob("*"))) == 1


@pytest.mark.parametrize("link", ["result.json", "logs", "files/out"])
def test_file_behind_a_link_of_the_storage_is_left_out(own: Folders, tmp_path: Path, link: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "key").write_text("secret")
    own.of("first").write("files/a", "1")
    Path(own.of("first").path(link)).symlink_to(victim if link != "result.json" else victim / "key")
    snapshot(own, {"a": KeptFile("files/a", 1), "key": KeptFile("files/out/key", 6)})
    assert main(["fetch", "--local", "first"]) == 0
    assert files(Path("runs/first")) == {"run.json", "metrics.jsonl", "files/a"}


def test_names_that_are_one_on_the_disk(
    own: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray_on_ecs.names.ignores_case", lambda folder: True)
    own.files("first", "Model.pt", "model.pt")
    for _ in range(2):
        assert main(["fetch", "--local", "first"]) == 0
        assert "can't be files here: 'files/model.pt'" in capsys.readouterr().err
        assert files(Path("runs/first/files")) == {"Model.pt"}


@pytest.mark.parametrize("folder", ["checkpoints", "ck", "a/b", ".", "step-000000001"])
@pytest.mark.parametrize("file", ["checkpoint.json", ".metadata", "__0_0.distcp"])
def test_checkpoints_of_any_folder_are_left_out(own: Folders, folder: str, file: str) -> None:
    own.of("first").write(f"{folder}/step-000000010/{file}", "1")
    own.of("first").write(f"{folder}/step-000000010/more/weights", "1")
    assert main(["fetch", "--local", "first"]) == 0
    assert files(Path("runs/first")) == {"run.json", "metrics.jsonl"}
    assert main(["fetch", "--local", "first", "--checkpoints"]) == 0
    assert len(files(Path("runs/first"))) == 4


@pytest.mark.parametrize(
    "name",
    [
        "exports/step-000000010/model.safetensors",
        "step-000000010/model.safetensors",
        "step-best/checkpoint.json",
        "ck/step-10/__0_0.distcp",
        "model/checkpoint.json",
        "files/step-000000010/checkpoint.json",
        "ray/step-000000010/.metadata",
        "step-000000010",
    ],
)
def test_export_in_a_folder_like_a_checkpoint_is_copied(own: Folders, name: str) -> None:
    own.of("first").write(name, "1")
    snapshot(own, {"step-000000010/checkpoint.json": KeptFile(name, 1)} if name.startswith("files/") else {})
    assert main(["fetch", "--local", "first"]) == 0
    assert name in files(Path("runs/first"))


def test_report_is_rendered_here(own: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    own.status("first", "failed")
    own.of("first").write("report.html", "<script>of another user</script>")
    assert fetched(capsys, "first", "--only", "report.html")["copied"] == ["report.html"]
    page = Path("runs/first/report.html").read_text()
    assert "script>" not in page
    assert "default-src 'none'" in page
    assert fetched(capsys, "first")["copied"].count("report.html") == 0
    own.of("first").write("status.json", '{"state": "failed"}')
    for command, status in (["fetch"], 0), (["open", "--no-browser"], 2):
        assert main([*command, "--local", "first"]) == status
        assert "the report of run first can't be made" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["<svg onload='alert(1)'/>", "", "\x89PNG", "GIF89a", "<html>"])
def test_curves_that_are_not_a_picture_are_left_out(
    own: Folders, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    for text, is_kept in ((f"{PNG}...", True), (content, False)):
        own.of("first").write("curves.png", text.encode("latin-1"))
        assert main(["fetch", "--local", "first"]) == 0
        assert Path("runs/first/curves.png").exists() is is_kept
    assert "'curves.png'" in capsys.readouterr().err


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
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
