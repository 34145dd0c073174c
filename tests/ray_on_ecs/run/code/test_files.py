"""The list of uploaded files, compared with git's own where git has one."""

import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run.code import files
from ray_on_ecs.run.code.files import CodeFile, LeftOut, check_size, list_code
from ray_on_ecs.run.code.git import revision, tracked
from ray_on_ecs.run.code.ignore import IGNORE_FILES, Patterns

ATOMS = [
    *("a", "b", "c", "ab", ".", "-", "ü", " ", "!", "#", "/", "/", "/", "*", "**", "***", "?", "[ab]", "[!a]", "[^b]"),
    *("[]a]", "[a-]", "[c-a]", "[[:alpha:]]", "[[:foo:]]", "[", "]", "\\a", "\\*", "\\", "\\ "),
]
NAMES = ["a", "b", "c", "ab", "ba", "abc", ".a", "a.b", "a*", "ü", "[", "]a", "a ", "-", "!a", "#a", "\\", "a\nb"]
ENDS = ["", "", "/", " ", "\r"]
USUAL_ATOMS = ["a", "b", "c", "ab", ".", "-", "/", "/", "*", "**", "?", "[ab]", "[!a]"]
# pathspec's `?` is a character, and git's a byte.
USUAL_NAMES = [name for name in NAMES if name.isascii() and name.isprintable()]


@pytest.fixture(autouse=True)
def _git_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / "gitconfig"))
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "t")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "t@example.org")


def write(folder: Path, *names: str | bytes, content: bytes = b"abc") -> Path:
    """Create files in a folder, unless they are there."""
    for name in names:
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(content)
    return folder


def git(folder: Path, *arguments: str, status: int = 0) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True)
    assert done.returncode in (0, status), done.stderr
    return os.fsdecode(done.stdout)


def names_of(folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    return [file.name for file in list_code(folder, include, exclude).files]


def names_by_git(folder: Path) -> list[str]:
    listed = git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return sorted(name for name in listed.split("\0") if name)


def random_patterns(chance: random.Random, atoms: Sequence[str] = ATOMS, ends: Sequence[str] = ENDS) -> str:
    return "\n".join(
        "".join([chance.choice(["", "", "!"]), *chance.choices(atoms, k=chance.randint(1, 4)), chance.choice(ends)])
        for _ in range(chance.randint(1, 6))
    )


def random_folders(
    top: Path, chance: random.Random, names: Sequence[str] = NAMES, *patterns: Sequence[str]
) -> list[Path]:
    """Make folders with files of odd names and ignore files of random patterns."""
    folders = [top, *(top / "/".join(chance.choices(names, k=depth)) for depth in (1, 1, 2, 3))]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        write(folder, *chance.sample(names, 8), ".gitignore", content=random_patterns(chance, *patterns).encode())
    git(top, "init", "--quiet")
    return folders


@pytest.mark.parametrize("seed", range(20))
def test_random_patterns_as_git(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folders = random_folders(tmp_path, chance)
    (tmp_path / ".git/info/exclude").write_text(random_patterns(chance))
    git(tmp_path, "--literal-pathspecs", "add", "--force", "--", *chance.sample(names_of(tmp_path, ["*"]), 3))
    for folder in folders:
        is_ignored = folder != tmp_path and git(tmp_path, "check-ignore", "--no-index", str(folder), status=1)
        if not is_ignored:
            assert names_of(folder) == names_by_git(folder)


@pytest.mark.parametrize("seed", range(10))
def test_usual_patterns_without_git_as_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random_folders(tmp_path, random.Random(seed), USUAL_NAMES, USUAL_ATOMS, ["", "", "/"])
    by_git = names_by_git(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert names_of(tmp_path) == by_git


@pytest.fixture(params=["git", "no git"])
def _with_and_without_git(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no git":
        monkeypatch.setenv("PATH", "")


@pytest.mark.parametrize("is_repository", [True, False])
@pytest.mark.usefixtures("_with_and_without_git")
def test_nested_ignore_files_without_git(tmp_path: Path, is_repository: bool) -> None:
    write(tmp_path, ".gitignore", content=b"/data/*\n!/data/keep.txt\ndataset/*\n*.log\n# comment\n\\#odd\n")
    write(tmp_path, "sub/.gitignore", content=b"local.txt\n!kept.log\n")
    write(tmp_path, "#odd", "data/keep.txt", "data/raw.bin", "foo/dataset/a.txt", "src/proj/data/__init__.py", "t.py")
    write(tmp_path, "sub/local.txt", "sub/kept.log", "sub/left.log", "sub/deep/local.txt", "local.txt")
    if is_repository:
        (tmp_path / ".git").mkdir()
    kept = ["data/keep.txt", "foo/dataset/a.txt", "local.txt", "src/proj/data/__init__.py", "sub/kept.log", "t.py"]
    assert names_of(tmp_path, exclude=[".gitignore"]) == kept


def test_ignore_files_above_count(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, ".gitignore", content=b"*.log\n/a/b/c.txt\n/a/out/\n")
    write(tmp_path, "a/.gitignore", content=b"!kept.log\n")
    write(tmp_path, "a/b/kept.log", "a/b/left.log", "a/b/c.txt", "a/b/d/c.txt", "a/out/left.log", "a/out/t.py")
    assert names_of(tmp_path / "a/b") == ["d/c.txt", "kept.log"]
    assert names_of(tmp_path / "a/out") == ["left.log", "t.py"]  # named by the user, though ignored


def test_files_of_the_repository_and_the_user(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, "a.own", "a.user", "a.py")
    (tmp_path / ".git/info/exclude").write_text("*.own\n")
    write(Path(os.environ["XDG_CONFIG_HOME"]), "git/ignore", content=b"*.user\n")
    assert names_of(tmp_path) == ["a.py"]
    other = write(tmp_path_factory.mktemp("user"), "ignore", content=b"*.py\n")
    git(tmp_path, "config", "core.excludesFile", str(other / "ignore"))
    assert names_of(tmp_path) == ["a.user"]


def test_tracked_files_are_uploaded_though_ignored(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, ".gitignore", content=b"*.bin\n/data/\n")
    write(tmp_path, "w.bin", "x.bin", "data/a/tracked.txt", "data/a/other.txt", "data/more.txt")
    git(tmp_path, "add", "--force", "w.bin", "data/a/tracked.txt")
    assert names_of(tmp_path) == [".gitignore", "data/a/tracked.txt", "w.bin"] == names_by_git(tmp_path)
    ignored = [each for each in list_code(tmp_path).left_out if each.why in IGNORE_FILES]
    assert ignored == [LeftOut("data/", ".gitignore"), LeftOut("x.bin", ".gitignore")]
    write(tmp_path, ".rayignore", content=b"*.bin\ndata\n")
    assert names_of(tmp_path) == [".gitignore", ".rayignore"]


@pytest.mark.parametrize("ignores", [".gitignore", ".rayignore"])
@pytest.mark.parametrize(
    ("tracked", "include", "is_listed"),
    [("", [], False), ("data/a/b.txt", [], True), ("data.txt", [], False), ("", ["data/a"], True), ("", [""], False)],
)
def test_ignored_folder_is_listed_if_it_may_have_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: str, tracked: str, include: list[str], is_listed: bool
) -> None:
    """A folder of data may have millions of files."""
    git(tmp_path, "init", "-q")
    write(tmp_path, "data/a/b.txt", "data/c.txt", "data.txt")
    write(tmp_path, ignores, content=b"data/\n")
    if tracked:
        git(tmp_path, "add", "--force", tracked)
    listed = []
    scandir = os.scandir
    monkeypatch.setattr("os.scandir", lambda path: listed.append(str(path)) or scandir(path))
    list_code(tmp_path, include)
    assert any(path.endswith("/data") for path in listed) == (is_listed and (ignores == ".gitignore" or not tracked))


def test_submodule_has_its_own_rules(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, ".gitignore", content=b"*.txt\n")
    git(write(tmp_path / "lib", "a.txt", "b.log"), "init", "-q")
    write(tmp_path / "lib", ".gitignore", content=b"*.log\n")
    assert names_of(tmp_path) == [".gitignore", "lib/.gitignore", "lib/a.txt"]


@pytest.mark.parametrize("place", ["lib", "a/b/lib"])
@pytest.mark.usefixtures("_with_and_without_git")
def test_submodule_has_the_ignore_file_of_the_user(tmp_path: Path, place: str) -> None:
    write(Path(os.environ["XDG_CONFIG_HOME"]), "git/ignore", content=b"*.user\n/top\n")
    write(tmp_path / place, "a.py", "b.user", "top", "c/top", ".git/config")
    assert names_of(tmp_path) == [f"{place}/a.py", f"{place}/c/top"]


def test_ignore_file_that_a_submodule_names_does_not_count(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = write(tmp_path_factory.mktemp("user"), "ignore", content=b"*.user\n")
    git(tmp_path, "config", "--global", "core.excludesFile", str(other / "ignore"))
    git(write(tmp_path / "lib", "a.py", "b.user"), "init", "--quiet")
    git(tmp_path / "lib", "config", "core.excludesFile", str(write(other, "evil", content=b"*.py\n") / "evil"))
    assert names_of(tmp_path) == ["lib/a.py"]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ([], [], [".gitignore", ".rayignore", "t.py"]),
        (["*.bin"], [], [".gitignore", ".rayignore", "data/raw/b.bin", "t.py", "w.bin"]),
        (["/data/"], [], [".gitignore", ".rayignore", "data/raw/a.txt", "data/raw/b.bin", "t.py"]),
        (["data/raw/*", "!*.bin"], [], [".gitignore", ".rayignore", "data/raw/a.txt", "t.py"]),
        (["*.log"], ["*.py", ".*"], ["r.log"]),
        (["*.bin"], ["/data", ".*"], ["t.py", "w.bin"]),
        (["*"], [".*ignore", "a.txt"], ["data/raw/b.bin", "r.log", "t.py", "w.bin"]),
    ],
)
def test_include_brings_back_and_exclude_wins(
    tmp_path: Path, include: list[str], exclude: list[str], expected: list[str]
) -> None:
    write(tmp_path, ".gitignore", content=b"*.bin\ndata/\n")
    write(tmp_path, ".rayignore", content=b"*.log\n")
    write(tmp_path, "t.py", "w.bin", "r.log", "data/raw/a.txt", "data/raw/b.bin", "m/__pycache__/x.pyc", "n.pyc")
    write(tmp_path, ".git/config", "venv/bin/python", "m/.pytest_cache/x", "m/node_modules/x")
    assert names_of(tmp_path, include, exclude) == expected


def test_left_out_is_named(tmp_path: Path) -> None:
    write(tmp_path, ".gitignore", content=b"data/\n*.bin\nall/\n")
    write(tmp_path, ".git/objects/a", ".git/b", "web/node_modules/x", "a/.venv/x", "a/__pycache__/x.pyc", "a/x.pyc")
    write(tmp_path, "data/a/b", "data/c", "a/w.bin", "t.py", "u.py", "data/.git/x", "all/b/c")
    assert list_code(tmp_path, ["/data/c", "/all/b"], ["u.py"]).left_out == (
        LeftOut("a/.venv", ""),
        LeftOut("a/w.bin", ".gitignore"),
        LeftOut("data/", ".gitignore"),
        LeftOut("u.py", "--exclude"),
        LeftOut("web/node_modules", ""),
    )


def test_lines_for_the_terminal(tmp_path: Path) -> None:
    write(tmp_path, ".gitignore", content=b"data/\n*.bin\n")
    write(tmp_path, ".venv/a", "data/a", "1.bin", "2.bin", "3\n.bin")
    os.mkfifo(tmp_path / "p")
    assert list(list_code(tmp_path).describe_left_out()) == [
        "left out: data/ (.gitignore), .venv, 1.bin (.gitignore) and 2 more",
        "left out: p (not a file)",
    ]
    assert not list(list_code(write(tmp_path / "other", "t.py")).describe_left_out())


def test_links_are_kept_and_never_followed(tmp_path: Path) -> None:
    code = write(tmp_path / "code", "pkg/a.py", "data_tools/b.py")
    write(tmp_path, "outside/x")
    links = {
        "pkg/top": "..",
        "data_tools/root": "..",
        "loop": "loop",
        "dangling": "pkg/nothing",
        "pkg/deep": "../data_tools/../pkg",
        "out": "../outside",
        "absolute": str(tmp_path / "outside"),
        "pkg/out": "../../outside/x",
        "by_another": "pkg/top/../outside",
    }
    for name, target in links.items():
        (code / name).symlink_to(target)
    code_files = list_code(code)
    out = ["absolute", "by_another", "out", "pkg/out"]
    assert code_files.left_out == tuple(LeftOut(name, files.LINK) for name in out)
    kept = [CodeFile(name, 0, target) for name, target in links.items() if name not in out]
    assert code_files.files == tuple(sorted([CodeFile("data_tools/b.py", 3), CodeFile("pkg/a.py", 3), *kept]))


def test_absolute_links_in_the_folder_are_relative(tmp_path: Path) -> None:
    code = write(tmp_path / "code", "pkg/a.py", "b.py")
    (tmp_path / "way").symlink_to("code")
    targets = {"top": code, "all": f"{code}/", "b": code / "b.py", "by_way": tmp_path / "way" / "pkg" / "a.py"}
    for name, target in targets.items():
        (code / "pkg" / name).symlink_to(target)
    found = {file.name: file.link for file in list_code(code).files if file.link}
    assert found == {"pkg/top": "..", "pkg/all": "..", "pkg/b": "../b.py", "pkg/by_way": "a.py"}


def test_any_name_is_listed(tmp_path: Path) -> None:
    names = [
        b"line\nbreak",
        b"quote\"'",
        b"r\xe9sultats.txt",
        "トレーニング/モデル.pt".encode(),
        b"back\\slash",
        b"~t",
        b"-x",
    ]
    write(tmp_path, *names, b"ignor\xe9")
    write(tmp_path, ".gitignore", content=b"ignor\xe9\n.gitignore\n")
    assert names_of(tmp_path) == sorted(map(os.fsdecode, names))


def test_unreadable_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a/x", "b/secret", "c.py")

    def scandir(path: Any) -> Any:
        if str(path).endswith("/a"):
            raise PermissionError(path)
        return list_folder(path)

    list_folder = os.scandir  # root may read all
    monkeypatch.setattr("os.scandir", scandir)
    monkeypatch.setattr("os.access", lambda path, _: not path.endswith("secret"))
    with pytest.raises(UsageError) as refused:
        list_code(tmp_path)
    assert str(refused.value) == (
        f"--working-dir: {tmp_path} has 2 entries that you may not read, such as a, b/secret; all code is uploaded: "
        "make them readable, or leave them out by --exclude or .gitignore"
    )
    assert names_of(tmp_path, [], ["/a", "secret"]) == ["c.py"]


def test_folder_with_unreachable_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "listed/x", "c.py")

    def lstat(path: Any, **options: Any) -> Any:
        if str(path).startswith(f"{tmp_path}/listed/"):
            raise PermissionError(path)
        return status_of(path, **options)

    status_of = os.lstat  # root may reach all
    monkeypatch.setattr("os.lstat", lstat)
    with pytest.raises(UsageError, match="has 1 entry that you may not read, such as listed;"):
        list_code(tmp_path)


def test_too_much_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 4000)
    write(tmp_path, "data/a/b", "data/c", content=bytes(1500))
    write(tmp_path, "models/m", "w\n.bin", content=bytes(1024))
    write(tmp_path, "t.py")
    with pytest.raises(UsageError) as refused:
        check_size(tmp_path, list_code(tmp_path).files)
    assert str(refused.value) == (
        f"--working-dir: {tmp_path} has 4.9 KiB, and code is at most 3.9 KiB; the largest are data/ (2.9 KiB), "
        "models/ (1.0 KiB), w\\n.bin (1.0 KiB): leave out what is not code by --exclude or .gitignore, and give data "
        "as --input"
    )
    check_size(tmp_path, list_code(tmp_path, [], ["data/"]).files)


PRIVATE = b"-----BEGIN EC PRIVATE KEY-----\n"
KEYS = [
    *(".ssh/id_rsa", ".aws/credentials", ".gnupg/x", ".kube/config", ".docker/config.json", ".config/gcloud/a/x.json"),
    *(".netrc", ".pypirc", ".npmrc", ".git-credentials", ".pgpass", ".env", ".env.local", "prod.env", "a/.env"),
    *(".env~", ".env-prod", ".env_local", ".envs/a/b", ".env.bak", ".flaskenv", ".env.example.local"),
    *(".netrc~", "_netrc", ".netrc.old", "credentials.json.bak.orig", ".ssh.old/x", "server.key.bak", "key.pem.old"),
    *("service-account-1.json", "a/client_secret_1.apps.json", ".streamlit/secrets.toml", "terraform.tfvars"),
    *("a/x.auto.tfvars.json", ".config/git/credentials", "a/.config/pip/pip.conf", ".pip/pip.conf", ".dockercfg"),
    *(".modal.toml", ".kaggle/x", "a.p8", "a.keystore", "b.jks", ".npmrc.swp", "config/master.key"),
    *("key.pem", "server.key", "a.p12", "b.pfx", "id_rsa", "a/id_ed25519", "id_ecdsa.old", ".bash_history"),
    *(".ray-on-ecs/secrets/x/y", ".config/gh/hosts.yml", ".config/rclone/rclone.conf", ".cache/huggingface/token"),
    *(".huggingface/token", "terraform.tfstate", "a/terraform.tfstate.backup", ".pulumi/credentials.json"),
    *(".vault-token", ".databrickscfg", ".kaggle/kaggle.json", "a/b/.config/gh/x", ".cargo/credentials.toml"),
    *(".aws/sso/cache/x.json", ".envrc", ".ENV", "Key.PEM", "A/.SSH/ID_RSA", "Prod.Env", "a/.Aws/Config"),
]
HARMLESS = [
    *(".env.example", "a/.env.sample", ".env-template", "keys.py", "tokenizer.pem.py", "monkey.key.txt", "monkey"),
    *("id_rsa_test.py", "Pulumi.yaml", "env/x.yaml", "aws/credentials", "docker/config.json", "ssh/id.txt", "netrc.md"),
    *("history.csv", ".config/other/x", ".cache/huggingface/x", "gcloud/x", "a.pem.gz", "tfstate", "secrets.py"),
    *(".docker/Dockerfile", ".aws/task-definition.json", "certs/ca.pem", "data/answers.key", "conf/base.env", "a~"),
    *("environment.py", "service.json", "x.tfvars", "keystore", "terraform.tfvars.example"),
]


@pytest.mark.parametrize("name", KEYS)
def test_key_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, "train.py", name, content=PRIVATE)
    assert names_of(tmp_path) == ["train.py"]
    assert names_of(tmp_path, ["*", "*.*", "**/*", "a/*", "a/", "cache", "**/cache", "x.json"]) == ["train.py"]
    [entry] = list_code(tmp_path).left_out
    assert entry.why == files.KEY
    assert name.startswith(entry.name)


def test_line_about_keys_names_them(tmp_path: Path) -> None:
    write(tmp_path, "train.py", ".env", ".ssh/id_rsa", ".ssh/known_hosts", "a\n.pem", content=PRIVATE)
    [line] = list_code(tmp_path).describe_left_out()
    assert line == "left out, as it may hold a key: .env, .ssh/, a\\n.pem; --include PATH uploads one"
    write(tmp_path, *(f"{number}.pem" for number in range(1000)), content=PRIVATE)
    [line] = list_code(tmp_path).describe_left_out()
    assert line.endswith(" and 993 more; --include PATH uploads one")


def test_ignored_folder_of_keys_is_one_of_keys(tmp_path: Path) -> None:
    write(tmp_path, ".ssh/config", "a/.aws/sso/x", ".gitignore", content=b".ssh\na/\n")
    git(tmp_path, "init", "--quiet")
    assert names_of(tmp_path, ["config", "sso/", "x"]) == [".gitignore"]
    assert names_of(tmp_path, [".ssh/config", "a/.aws/sso"]) == [".gitignore", ".ssh/config", "a/.aws/sso/x"]


def test_tracked_key_is_left_out_and_named(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, "data/.env", "data/a", ".env", ".gitignore", content=b"data\n.env\n")
    git(tmp_path, "add", "--force", "data", ".env")
    assert names_of(tmp_path) == [".gitignore", "data/a"]
    assert {entry.name for entry in list_code(tmp_path).left_out if entry.why == files.KEY} == {".env", "data/.env"}


def test_tracked_link_out_of_an_ignored_folder_is_named(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, "data/a", ".gitignore", content=b"data\n")
    (tmp_path / "data" / "out").symlink_to("../..")
    git(tmp_path, "add", "--force", "data/out")
    assert [(entry.name, entry.why) for entry in list_code(tmp_path).left_out] == [
        ("data/", ".gitignore"),
        ("data/out", files.LINK),
    ]


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_file_is_uploaded(tmp_path: Path, name: str) -> None:
    assert names_of(write(tmp_path, name)) == [name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"-----BEGIN CERTIFICATE-----\nMIIkey=\n-----END CERTIFICATE-----\n", False),
        (bytes(100) + PRIVATE, True),
        (b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n", True),
        (b"export HF_TOKEN=abc\n", True),
        (b"OPENAI_APIKEY = abc\n", True),
        (b"AWS_ACCESS_KEY_ID=abc\n", True),
        (b"db_password='abc'\n", True),
        (b"DATABASE_URL=postgres://user:abc@host/x\n", True),
        (b"EPOCHS=3\nMONKEY=1\nTOKENIZERS_PARALLELISM=false\nBYPASS=1\nURL=https://host/@x\n", False),
        (b"HF_TOKEN=\nHF_TOKEN\n", False),
        (b"", False),
    ],
)
@pytest.mark.parametrize("name", ["a.pem", "a.KEY", "a.env.bak"])
def test_text_decides_whether_a_file_holds_a_key(tmp_path: Path, name: str, text: bytes, expected: bool) -> None:
    assert names_of(write(tmp_path, name, content=text)) == [name] * (not expected)


@pytest.mark.parametrize("name", KEYS)
def test_key_is_brought_back_by_its_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, "train.py", name, f"{name}.pem", "other/x.key", f"other/{name}", content=PRIVATE)
    assert names_of(tmp_path, [name]) == sorted(["train.py", name])
    assert names_of(tmp_path, [f"/{name}"]) == sorted(["train.py", name])


@pytest.mark.parametrize("folder", [".ssh", "a/.kube", ".config/gcloud", ".SSH", ".azure[1]/.ssh"])
def test_folder_of_keys_is_brought_back_by_its_name(tmp_path: Path, folder: str) -> None:
    names = [f"{folder}/config", f"{folder}/sub/key.pem"]
    write(tmp_path, "train.py", "a/.env", *names, content=PRIVATE)
    assert names_of(tmp_path, [folder]) == sorted(["train.py", *names]) == names_of(tmp_path, [f"{folder}/"])
    assert names_of(tmp_path, [folder], ["*.pem"]) == sorted(["train.py", names[0]])


@pytest.mark.parametrize("folder", ["/", "~", "~/.", "~/..", "~/../..", "~/link"])
def test_home_and_the_folders_above_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    home = write(tmp_path / "a" / "home" / "ada", "train.py")
    (home / "link").symlink_to("..")
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(UsageError, match="more than code; give the folder with the script"):
        list_code(Path(folder).expanduser())
    assert names_of(write(home / "code", "train.py")) == ["train.py"]
    assert names_of(write(home.parent / "adam", "train.py")) == ["train.py"]


def test_home_that_is_the_project_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(write(tmp_path, "train.py", ".ssh/id_rsa")))
    for include in ([], ["train.py"], ["*"]):
        with pytest.raises(UsageError, match=r"run `git init` in it$"):
            list_code(tmp_path, include)
    git(tmp_path, "init", "--quiet")
    assert names_of(tmp_path) == ["train.py"]
    with pytest.raises(UsageError, match="more than code"):
        list_code(Path("/"), ["train.py"])


# {0} is a program, and {1} a folder with hooks.
PROGRAMS = {
    "a monitor": "[core]\nfsmonitor = {0}\n",
    "a monitor in an included file": "[include]\npath = more\n",
    "a hook": "",
    "hooks in another folder": "[core]\nhooksPath = {1}\n",
    "a filter": '[filter "f"]\nclean = {0}\nsmudge = {0}\nrequired = true\n',
    "a filter that is a process": '[filter "f"]\nprocess = {0}\nrequired = true\n',
    "a filter with a strange name": '[FILTER "f"]\nCLEAN = {0}\n[filter "a=b\\nc"]\nclean = {0}\n',
    "a program for ssh": '[core]\nsshCommand = {0}\n[remote "origin"]\nurl = ssh://h/r\npromisor = true\n',
    "a remote helper": '[remote "origin"]\nurl = ext::{0}\npromisor = true\n[protocol "ext"]\nallow = always\n',
}


@pytest.fixture
def hostile(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A repository in a folder of code, with one of PROGRAMS that makes the file `ran`."""
    place, kind = request.param
    code, repository = tmp_path / "code", tmp_path / place
    program = tmp_path / "hooks" / "post-index-change"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    for folder in {code, repository}:
        git(write(folder, "train.py", ".gitattributes", content=b"* filter=f\n"), "init", "--quiet")
        git(folder, "add", "train.py")
        git(folder, "commit", "--quiet", "--message", "first")
    inside = repository / ".git"
    (inside / "more").write_text(PROGRAMS["a monitor"].format(program))
    text = PROGRAMS[kind].format(program, program.parent)
    (inside / "config").write_text((inside / "config").read_text() + text)
    if kind == "a hook":
        shutil.copytree(program.parent, inside / "hooks", dirs_exist_ok=True)
    if "promisor" in text:  # git fetches what is missing
        tree = git(repository, "rev-parse", "HEAD^{tree}").strip()
        (inside / "objects" / tree[:2] / tree[2:]).unlink()
    os.utime(repository / "train.py", (1, 1))
    return repository


@pytest.mark.parametrize(
    "hostile",
    [(place, kind) for kind in PROGRAMS for place in ("code", "code/nested", "code/sub/below")],
    indirect=True,
    ids=" in ".join,
)
def test_programs_of_a_repository_do_not_run(tmp_path: Path, hostile: Path) -> None:
    assert "train.py" in names_of(tmp_path / "code")
    revision(tmp_path / "code")
    revision(hostile)
    assert not (tmp_path / "ran").exists()
    subprocess.run(["git", "status"], cwd=hostile, capture_output=True)  # plain git does run them
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "pattern",
    [
        "*a*a*a*a*a*ab",
        "*a" * 40 + "b",
        "**/a" * 30,
        "**/" * 40 + "x",
        "*?*?*?*?*?b",
        "[a]*" * 30 + "b",
        "a/*a*a*a*a*/b",
        "*" * 200 + "b",
        "**/a/" * 30 + "b",
        "**/*/" * 30 + "b",
        "**/?a*/" * 20 + "b",
        "/**/a/**" * 20 + "/b",
        "**/*a*a*/" * 15 + "b",
        "a**/" * 30 + "b",
        "**/[!b]/" * 30 + "b",
        "*/" * 40 + "b",
        "**/a/*/" * 20 + "**/b",
        "x/**/" * 30 + "y",
        "**/a*/**/*a/" * 15 + "b",
        "**/a?*/" * 20 + "*b",
        "a" + " " * 50_000 + "b",
        "**/a/" * 50_000 + "b",
        "[" + "[:" * 50_000,
    ],
    ids=lambda pattern: pattern[:16],
)
@pytest.mark.timeout(300)  # it would take hours if all combinations were tried
def test_hostile_pattern_is_decided(pattern: str) -> None:
    patterns = Patterns([pattern], "/code")
    for name in ("a" * 2000, "a/" + "a" * 2000, "/".join("a" * 2000), "x/" * 2000, "/".join(["aaa", "a"] * 500)):
        assert not patterns.decide(f"/code/{name}c", is_folder=False)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("**/a/**/a/**/b", "a/x/a/b"),
        ("**/a/b/**/b", "a/a/b/b"),
        ("**/*a/*b/**/c*d", "xa/yb/za/b/cd"),
        ("**/a/**/a/b", "a/a/a/b"),
        ("a**/b/**/c", "ax/b/c"),
        ("/**/*x*y/**", "1/2/xxyy/3"),
        ("*x*xy*", "xxxyz"),
        ("**/**/**/a", "a"),
    ],
)
def test_pattern_with_several_ways_matches(pattern: str, name: str) -> None:
    assert Patterns([pattern], "/code").decide(f"/code/{name}", is_folder=False)


def commit_all(folder: Path) -> Path:
    """Make a repository whose ignore file names a file that it tracks."""
    git(write(folder, ".gitignore", content=b"*.bin\n"), "init", "--quiet")
    git(write(folder, "t.bin", "t.py"), "add", "--force", ".")
    git(folder, "commit", "--quiet", "--message=one")
    return folder


def as_worktree(top: Path) -> Path:
    git(commit_all(top / "main"), "worktree", "add", "--quiet", str(top / "tree"))
    return top / "tree"


def as_submodule(top: Path) -> Path:
    commit_all(top / "lib")
    git(
        commit_all(top / "main"),
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        str(top / "lib"),
        "s",
    )
    return top / "main" / "s"


def as_shallow(top: Path) -> Path:
    git(top, "clone", "--quiet", "--depth=1", f"file://{commit_all(top / 'main')}", "shallow")
    return top / "shallow"


def as_sparse(top: Path) -> Path:
    write(top / "main", "else/where.py")
    git(commit_all(top / "main"), "sparse-checkout", "set", "--cone", "--sparse-index", "nowhere")
    return top / "main"


def as_detached(top: Path) -> Path:
    git(commit_all(top / "main"), "checkout", "--quiet", "--detach")
    return top / "main"


def as_locked(top: Path) -> Path:
    (commit_all(top / "main") / ".git" / "index.lock").touch()
    return top / "main"


def as_link(top: Path) -> Path:
    (top / "link").symlink_to(commit_all(top / "main"))
    return top / "link"


def as_new(top: Path) -> Path:
    git(write(top / "main", ".gitignore", content=b"*.bin\n"), "init", "--quiet")
    git(write(top / "main", "t.bin", "t.py"), "add", "--force", ".")
    return top / "main"


def as_split(top: Path) -> Path:
    git(commit_all(top / "main"), "update-index", "--split-index")
    return top / "main"


LAYOUTS = [as_worktree, as_submodule, as_shallow, as_sparse, as_detached, as_locked, as_link, as_new, as_split]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variables", [(), ("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")])
def test_tracked_files_are_in_whatever_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any, variables: Sequence[str]
) -> None:
    folder = layout(tmp_path)
    for name in variables:  # of a hook, or of another repository
        monkeypatch.setenv(name, str(tmp_path / "other"))
    assert names_of(folder) == [".gitignore", "t.bin", "t.py"] + [".gitmodules"] * (folder / ".gitmodules").exists()
    assert tracked(folder)[1] == ""
    assert bool(revision(folder)) == (layout is not as_new)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({".git/index": b"broken"}, ".git/index: index file smaller than expected"),
        ({".git/index": b"x" * 200}, "index file corrupt"),
        ({".git": b"gitdir: /nowhere/at/all\n"}, "not a git repository: /nowhere/at/all"),
        ({".git": b"broken"}, "invalid gitfile format"),
        ({".git/HEAD": b""}, "not a git repository"),
        ({".git/config": b"[core"}, "in file .git/config"),
        ({".git/config": b"[core]\nrepositoryformatversion = 9\n"}, "Expected git repo version <= 1, found 9"),
    ],
)
def test_repository_that_git_can_not_read_has_a_reason(tmp_path: Path, files: dict[str, bytes], reason: str) -> None:
    for name, content in files.items():
        if name.startswith(".git/"):
            commit_all(tmp_path)
        (tmp_path / name).write_bytes(content)
    assert reason in tracked(tmp_path)[1]
    assert "\n" not in tracked(tmp_path)[1]
    assert reason in list_code(tmp_path).git_fault
    assert "t.py" in names_of(write(tmp_path, "t.py"))


def test_repository_without_git_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracked(tmp_path)[1] == ""
    commit_all(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert tracked(tmp_path)[1] == tracked(tmp_path / "sub")[1] == "git is not installed"


def test_safe_directory_of_the_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_all(tmp_path)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    cure = f"git config --global --add safe.directory {tmp_path}"
    assert tracked(tmp_path)[1] == f"detected dubious ownership in repository at '{tmp_path}'; {cure}"
    assert names_of(tmp_path) == [".gitignore", "t.py"]
    for name, value in {"COUNT": "1", "KEY_0": "safe.directory", "VALUE_0": "*"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert tracked(tmp_path)[1] == ""
    assert names_of(tmp_path) == [".gitignore", "t.bin", "t.py"]
