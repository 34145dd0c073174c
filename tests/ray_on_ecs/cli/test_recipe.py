"""The packaged jobs are listed, and copied without a change to existing files."""

import ast
from pathlib import Path

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.cli.recipe import RECIPES, path_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_are_listed_with_their_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, line in zip(RECIPES, lines, strict=True):
        word, about = line.split(maxsplit=1)
        assert (word, about in path_of(name).read_text()) == (name, True)


@pytest.mark.parametrize("name", RECIPES)
def test_copy_needs_no_other_file(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "copy", name]) == 0
    copied = folder / f"{name}.py"
    assert copied.read_text() == path_of(name).read_text()
    assert capsys.readouterr().out == (
        f"{name}.py: ray-on-ecs run {name}.py starts it on the cluster, "
        f"ray-on-ecs run --local {name}.py on this machine\n"
    )
    imported = [
        node for node in ast.walk(ast.parse(copied.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imported}
    assert "training" not in {str(name).split(".")[0] for name in names}


@pytest.mark.parametrize("target", ["mine.py", "deeper"])
def test_target_is_a_file_or_folder(target: str, folder: Path) -> None:
    (folder / "deeper").mkdir()
    assert main(["recipe", "copy", "ray_train_ddp.py", target]) == 0
    assert (folder / target).is_file() or (folder / target / "ray_train_ddp.py").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nothing"], "NAME: unknown recipe 'nothing'; use ray_train_ddp, image_classifier"),
        (["image_classifier", "here.py"], "FILE: 'here.py' exists; give another name"),
        (["image_classifier", "nowhere/"], "FILE: 'nowhere/image_classifier.py' can't be written (No such file"),
        (["image_classifier", "nowhere/x.py"], "FILE: 'nowhere/x.py' can't be written (No such file or directory)"),
    ],
)
def test_user_error_is_one_line_without_changes(
    words: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "here.py").write_text("mine")
    assert main(["recipe", "copy", *words]) == 2
    assert line in capsys.readouterr().err
    assert (folder / "here.py").read_text() == "mine"
    assert len(list(folder.iterdir())) == 1
