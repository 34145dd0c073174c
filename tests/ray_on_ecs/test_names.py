"""Names and links that others have chosen."""

from pathlib import Path

import pytest

from ray_on_ecs.names import (
    conflicts,
    fault_of,
    ignores_case,
    is_inside,
    is_of_git,
    leads_out,
    make_way,
    of_bare_repositories,
)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/etc/passwd",
        "a/",
        "a//b",
        "//a",
        ".",
        "..",
        "../a",
        "a/..",
        "a/../b",
        "a/./b",
        "./a",
        "a\0b",
        "ü" * 128,
        "\ud800",
        "/".join("d" * 2049),
    ],
)
def test_name_that_leaves_its_folder_or_is_no_file(name: str) -> None:
    assert fault_of(name)


@pytest.mark.parametrize(
    "name", ["a", "a/b", "...", "..a", "a..", "a\nb", "-", "ü" * 127, "a" * 255, "a\\b", " ", "\udcff"]
)
def test_name_of_a_file(name: str) -> None:
    assert fault_of(name) is None


@pytest.mark.parametrize(
    "name",
    [
        ".git",
        ".GIT/config",
        "a/.git/hooks/x",
        ".Git ",
        ".git.",
        ".git . .",
        "git~1",
        "GIT~1/config",
        ".g\u200cit",
        ".git\ufeff",
    ],
)
def test_name_of_a_repository(name: str) -> None:
    assert is_of_git(name)


@pytest.mark.parametrize("name", [".gitignore", "git", ".github/a", "a.git", "git~2", ".git_", "x/.gitkeep"])
def test_name_beside_a_repository(name: str) -> None:
    assert not is_of_git(name)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *[("a", "/"), ("a", "/etc"), ("a", ".."), ("a", "../b"), ("a/b", "../.."), ("a/b", "../../c"), ("a", "b/../.."),
        ("a", "./../b"), ("a/b/c", "../../../d"), ("a", "b\0"), ("a", "../a")],
    ],
)  # fmt: skip
def test_link_out_of_the_folder(name: str, target: str) -> None:
    assert leads_out(name, target)


@pytest.mark.parametrize(
    ("name", "target"), [("a", "b"), ("a/b", "../c"), ("a/b/c", "../../d"), ("a", "b/../c"), ("a", ".")]
)
def test_link_within_the_folder(name: str, target: str) -> None:
    assert not leads_out(name, target)


def test_macos_counts_characters_and_takes_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert fault_of("モ" * 255) is None
    assert fault_of("モ" * 256) == "has a part of more than 255 characters"
    assert fault_of("😀" * 128)
    assert fault_of("\udce9") == "is not text"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], []),
        (["a", "A", "b", "b/c/d", "B/c"], ["b"]),
        (["a", "a"], ["a"]),
        (["a/b/c", "a/b"], ["a/b"]),
        (["a/b", "a/bc", "ab"], []),
    ],
)
def test_names_that_exclude_each_other(tmp_path: Path, names: list[str], found: list[str]) -> None:
    assert conflicts(names, tmp_path) == found


def test_disk_that_ignores_case_is_known(tmp_path: Path) -> None:
    assert not ignores_case(Path("/"))
    assert not ignores_case(tmp_path / "run" / "12")
    (tmp_path / "run" / "12").mkdir(parents=True)
    assert not ignores_case(tmp_path / "run" / "12")
    (tmp_path / "RUN").mkdir()
    assert not ignores_case(tmp_path / "run" / "12")
    (tmp_path / "RUN").rmdir()
    (tmp_path / "RUN").symlink_to("run")  # on such a disk both names lead to one folder
    assert ignores_case(tmp_path / "run" / "12")


REPOSITORY = ["x/objects/a", "x/refs/b", "x/hooks/c"]


@pytest.mark.parametrize(
    ("names", "there", "found"),
    [
        (["x/HEAD", "x/config"], [], {"x/HEAD", "x/config"}),
        (["HEAD", "config"], [], {"HEAD", "config"}),
        (["x/HEAD", "x/commondir", "x/c/config"], [], {"x/HEAD", "x/commondir"}),
        (["x/config"], ["x/HEAD"], {"x/config"}),
        (["x/HEAD"], ["x/config"], {"x/HEAD"}),
        (["x/commondir"], ["x/HEAD"], {"x/commondir"}),
        (["x/HEAD", "x/config", "y/config", "config"], [], {"x/HEAD", "x/config"}),
        (["x/HEAD", "y/config"], [], set()),
        (["x/config", "config.json", "x/HEAD.txt", "x/config.worktree"], [], set()),
        (["x/head", "x/config"], [], set()),
        (["x/HEAD"], ["x/HEAD"], set()),
    ],
)
def test_files_that_make_a_folder_a_repository(
    tmp_path: Path, names: list[str], there: list[str], found: set[str]
) -> None:
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert of_bare_repositories([*REPOSITORY, *names], tmp_path) == found


@pytest.mark.parametrize("head", ["x/head", "X/Head", "x/HE\u200cAD", "x/HEAD."])
def test_repository_on_a_disk_that_ignores_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    monkeypatch.setattr("ray_on_ecs.names.ignores_case", lambda folder: True)
    assert of_bare_repositories([*REPOSITORY, head, "x/Config"], tmp_path) == {head, "x/Config"}


def test_link_over_links_leads_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "d").mkdir(parents=True)
    (folder / "d" / "e").symlink_to("..")
    (folder / "x").symlink_to("d/e/..")
    (folder / "circle").symlink_to("circle")
    assert is_inside(folder / "d" / "e", folder)
    assert not is_inside(folder / "x", folder)
    assert not is_inside(folder / "x" / "evil", folder)


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder.mkdir()
    (folder / "a").symlink_to(elsewhere)
    (folder / "file").touch()
    make_way(folder, folder / "a" / "b" / "c")
    with pytest.raises(FileExistsError):
        make_way(folder, folder / "file" / "c")
    make_way(folder, folder / "file" / "c", over_files=True)
    (folder / "a" / "b" / "c").write_text("new")
    assert not (folder / "a").is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]
