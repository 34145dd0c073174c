"""The user's code of a run: stored by content, and placed on a node."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.code import archive
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.code.archive import store as store_code
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import make_ignored
from ray_on_ecs.storage.run_storage import RunStorage

LARGE = 2000


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LARGE_BYTES", LARGE - 1)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with code, a large file, an ignored file and a folder of ignored files."""
    folder = tmp_path / "project"
    files = {".gitignore": "*.bin\ncache/\n", "train.py": "import lib", "lib/__init__.py": "", "large.npy": "x" * LARGE}
    for name, text in {**files, "data/one.bin": "1", "cache/deep/two": "2"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def config_of(project: Path, **settings: object) -> RunConfig:
    return RunConfig(command=("train.py",), working_dir=str(project), **settings)  # ty: ignore[invalid-argument-type]


def store(config: RunConfig, storage: RunStorage, say: Callable[[str], None] = print, *, is_here: bool = True) -> Code:
    return store_code(config, storage, say, is_here=is_here)


def placed(code: Code, target: Path) -> set[str]:
    """Place the code; return the paths of its files."""
    code.place(target)
    return {str(Path(above, name).relative_to(target)) for above, _, names in os.walk(target) for name in names}


def test_code_is_stored_once_by_content(storage: RunStorage, project: Path) -> None:
    first, again = (store(config_of(project), storage) for _ in range(2))
    assert first == again
    assert first.archive.startswith(f"{storage.storage_path}/.code/")
    assert first.archive.endswith(".tar.gz")
    (project / "train.py").write_text("import another")
    assert store(config_of(project), storage).archive != first.archive


@pytest.mark.parametrize("is_here", [True, False])
def test_code_is_placed_on_a_node(storage: RunStorage, project: Path, tmp_path: Path, is_here: bool) -> None:
    code = store(config_of(project), storage, is_here=is_here)
    assert (code.copies.keys(), code.links) == ({"large.npy"} if is_here and storage.is_local else set(), {})
    assert placed(code, tmp_path / "node") == {".gitignore", "train.py", "lib/__init__.py", "large.npy"}
    assert (tmp_path / "node" / "large.npy").stat().st_size == LARGE


@pytest.mark.parametrize("name", ["results", "lr=0.1 [a]*", "a/b"])
def test_results_in_the_folder_are_not_code(project: Path, name: str) -> None:
    storage = RunStorage.open(str(project / name), "mine")
    first = store(config_of(project), storage)
    (project / name / "mine").mkdir()
    (project / name / "mine" / "model.pt").write_text("1")
    said: list[str] = []
    assert store(config_of(project), storage, said.append).archive == first.archive
    assert name not in "".join(said)
    assert "cache/" in "".join(said)


@pytest.mark.parametrize("is_repository", [True, False])
@pytest.mark.parametrize("name", ["results", "."])
def test_results_folder_of_the_project_is_code_without_its_runs(
    project: Path, tmp_path: Path, name: str, is_repository: bool
) -> None:
    (project / "results" / "sub").mkdir(parents=True)
    (project / "results" / "baseline.csv").write_text("1")
    (project / "results" / "sub" / "b.csv").write_text("2")
    if is_repository:
        git(project, "init", "-q")
        git(project, "add", ".")
    storage = RunStorage.open(str(project / name), "mine")
    first = store(config_of(project), storage)
    storage.write("run.json", "{}")
    storage.write("model.pt", "1")
    again = store(config_of(project), storage)
    assert again.archive == first.archive
    assert {"results/baseline.csv", "results/sub/b.csv"} < placed(again, tmp_path / "node")
    assert not (project / name / ".gitignore").exists() or name == "."


def test_runs_below_another_storage_path_are_not_code(project: Path, storage: RunStorage) -> None:
    (project / "results").mkdir()
    (project / "results" / "baseline.csv").write_text("1")
    first = store(config_of(project), storage)
    earlier = RunStorage.open(str(project / "results"), "earlier")
    store(config_of(project), earlier)
    earlier.write("run.json", "{}")
    earlier.write("model.pt", "1")
    assert store(config_of(project), storage).archive == first.archive


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_git_takes_no_results(project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    store(config_of(project), RunStorage.open(str(project / "results"), "mine"))
    assert git(project, "status", "--porcelain") == ""


def test_results_path_that_is_a_file_is_one_line(project: Path) -> None:
    (project / "results").write_text("1")
    with pytest.raises(UsageError, match=r"^--storage-path: the code can't be stored in .*/results \("):
        store(config_of(project), RunStorage.open(str(project / "results"), "mine"))


def test_folder_name_may_have_any_character(tmp_path: Path, project: Path) -> None:
    odd = project.rename(project.with_name("lr=0.1 #1"))
    config = store(config_of(odd), RunStorage.open(str(tmp_path / "results"), "mine"))
    assert config.name == "lr=0.1 #1"
    assert "train.py" in placed(config, tmp_path / "node")


def test_excluded_files_are_reported(storage: RunStorage, project: Path) -> None:
    said: list[str] = []
    config = store(config_of(project), storage, said.append)
    assert said == ["left out: cache/ (.gitignore), data/one.bin (.gitignore)"]
    assert set(config.left_out) == {"cache/", "data/one.bin"}
    assert store(config_of(project, include=("*.bin", "cache/")), storage).left_out == []


def test_too_much_code_is_refused(storage: RunStorage, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_on_ecs.run.code.files.MAX_BYTES", 10)
    with pytest.raises(UsageError, match=r"--working-dir: .* the largest are .* by --exclude or .gitignore"):
        store(config_of(project), storage, is_here=False)
    assert store(config_of(project, exclude=("*.npy",)), storage).archive


def test_commit_is_recorded(storage: RunStorage, project: Path) -> None:
    assert store(config_of(project), storage).git == {}
    git(project, "init", "-q")
    git(project, "add", "train.py")
    git(project, "commit", "-qm", "first")
    git(project, "tag", "v1.0")
    code = store(config_of(project), storage)
    assert (code.git, code.version) == ({"GIT_COMMIT": git(project, "rev-parse", "HEAD")}, "1.0")


def test_repository_that_git_refuses_is_said(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container's mount
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    git(project.parent, "init", "-q", str(project))
    said: list[str] = []
    store(config_of(project), RunStorage.open(str(tmp_path / "results"), "mine"), said.append)
    assert said[-1] == (
        "git can't read the repository, so files that it tracks although .gitignore names them are not uploaded: "
        f"detected dubious ownership in repository at '{project}'; git config --global --add safe.directory {project}"
    )


def test_fetched_runs_are_not_named_and_ignored_data_is(storage: RunStorage, project: Path, tmp_path: Path) -> None:
    make_ignored(project / "runs")
    make_ignored(project / "data")  # a common way to keep a folder out of git
    (project / "runs" / "first").mkdir()
    (project / "runs" / "first" / layout.SETTINGS).write_text("{}")
    (project / "data" / "x.csv").write_text("1")
    said: list[str] = []
    store(config_of(project), storage, said.append)
    assert "data/" in "".join(said)
    assert "runs/" not in "".join(said)
    included = store(replace(config_of(project), include=("data/x.csv",)), storage)
    assert "data/x.csv" in placed(included, tmp_path / "node")
