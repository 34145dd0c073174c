"""The stack of a command: the nearest project with a cluster, and its credentials."""

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import stack
from ray_on_ecs.cluster.stack import Stack, find
from ray_on_ecs.errors import ResourceError, UsageError

# Prints the file `answer` of the project, or of the stack that is named; `profile` for `pulumi config get`.
PULUMI = """#!/bin/sh
echo "$PWD $*" >> "$CALLS"
file=answer; [ "$1" = config ] && file=profile
while [ $# -gt 0 ]; do [ "$1" = --stack ] && file="$file-$2"; shift; done
if [ -f "$file" ]; then cat "$file"; exit; fi
case "$file" in
    answer) echo "error: no stack selected; please use \\`pulumi stack select\\`" >&2;;
    *) echo "error: no stack named '${file#*-}' found" >&2;;
esac
exit 255
"""
KEYS = {field.name: "x" for field in fields(Stack) if field.name not in ("name", "project")}
OURS = json.dumps({"connection": KEYS})
APP = json.dumps({"url": "https://app"})


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for projects, with Pulumi on the path and without a checkout."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "pulumi"
    program.write_text(PULUMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(stack, "CHECKOUT", tmp_path / "checkout")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    # `find` sets it.
    monkeypatch.setenv("AWS_PROFILE", "before")
    monkeypatch.delenv("AWS_PROFILE")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def project(folder: Path, answer: str | None = OURS, name: str = "Pulumi.yaml", of: str = "") -> Path:
    """Make a project whose selected stack, or the stack that is named, has these outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    if answer is not None:
        (folder / f"answer{of}").write_text(answer)
    return folder


def start_in(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


OTHERS = {
    "an app": APP,
    "a stack with the address of a database": json.dumps({"connection": "postgres://db"}),
    "a stack with a database": json.dumps({"connection": {"host": "db", "region": "us-west-2"}}),
    "a stack with a list": json.dumps({"connection": []}),
}


@pytest.mark.parametrize("below", ["", "ml", "ml/deep/er"])
@pytest.mark.parametrize("name", ["Pulumi.yaml", "Pulumi.yml", "Pulumi.json"])
def test_project_is_here_or_above(folders: Path, below: str, name: str) -> None:
    ours = project(folders / "ours", name=name)
    project(folders / "checkout")
    start_in(ours / below)
    assert find(None, None).project == ours


@pytest.mark.parametrize("other", OTHERS)
def test_project_without_a_cluster_is_passed_over(folders: Path, other: str) -> None:
    ours = project(folders / "ours")
    start_in(project(ours / "app", OTHERS[other]) / "ml")
    assert find(None, None).project == ours


def test_named_stack_is_in_the_project_that_has_it(folders: Path) -> None:
    ours = project(folders / "ours", of="-prod")
    start_in(project(ours / "app", APP) / "ml")
    assert (found := find("prod", None)).project == ours
    assert found.name == "prod"
    with pytest.raises(UsageError, match=r"fails in .*/app \(no stack named 'dev' found\); .* give --outputs FILE"):
        find("dev", None)


ENDS: dict[str, tuple[str | None, type[Exception], str]] = {
    "no stack is selected": (None, UsageError, r"fails in .*/here \(no stack selected.*give --outputs FILE"),
    "the stack is not up": ("{}", ResourceError, "/here has no outputs: the stack is not up; .* give --outputs FILE"),
    "Pulumi prints nothing": ("", ResourceError, "/here has no outputs: the stack is not up"),
    "the output is not JSON": ("warning: x", ResourceError, "is not JSON"),
    "the outputs are a list": ("[1]", UsageError, "has no outputs of a stack"),
    "the stack is of an earlier version": (
        json.dumps({"connection": {"cluster_name": "x", "bucket": "x"}}),
        UsageError,
        "/here: its output connection has no cluster_info_parameter, estimated_hourly_usd",
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_nearest_project_that_may_have_the_cluster_ends_the_search(folders: Path, end: str) -> None:
    """The cluster of the project above, or of the checkout, would be a guess."""
    answer, error, says = ENDS[end]
    project(folders / "checkout")
    start_in(project(project(folders / "ours") / "here", answer))
    with pytest.raises(error, match=says):
        find(None, None)


def test_search_without_a_cluster_names_the_way_out(folders: Path) -> None:
    with pytest.raises(UsageError, match=r"Pulumi\.yaml not found here or in a parent folder; for .* --outputs FILE"):
        find(None, None)
    start_in(project(folders / "app", APP))
    with pytest.raises(UsageError, match=r"/app: has no output connection; for the cluster of another project change"):
        find(None, None)


def test_use_of_the_checkout_is_said(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = project(folders / "checkout")
    main(["open", "first"])
    output = capsys.readouterr().err.splitlines()[0]
    assert output == f"using stack (selected) of the project in {checkout}, as none here or above has a cluster"
    start_in(checkout / "ml")
    main(["open", "first"])
    assert "using stack" not in capsys.readouterr().err


PROFILES: dict[str, tuple[Callable[[Path], object], str | None, str | None]] = {
    "none": (lambda ours: None, None, None),
    "of this stack": (lambda ours: (ours / "profile").write_text("ml-prod\n"), None, "ml-prod"),
    "of the named stack": (lambda ours: (ours / "profile-prod").write_text("ml-prod"), "prod", "ml-prod"),
    "of another stack": (lambda ours: (ours / "profile-dev").write_text("ml-prod"), "prod", None),
    "not on this machine": (lambda ours: (ours / "profile").write_text("of-ada"), None, None),
    "empty": (lambda ours: (ours / "profile").write_text("\n"), None, None),
    "chosen by AWS_PROFILE": (lambda ours: os.environ.update(AWS_PROFILE="mine"), None, "mine"),
    "replaced by keys": (lambda ours: os.environ.update(AWS_ACCESS_KEY_ID="A"), None, None),
    "chosen by AWS_DEFAULT_PROFILE": (lambda ours: os.environ.update(AWS_DEFAULT_PROFILE="mine"), None, None),
    "replaced by a web identity": (lambda ours: os.environ.update(AWS_WEB_IDENTITY_TOKEN_FILE="f"), None, None),
}


@pytest.mark.parametrize("profile", PROFILES)
def test_profile_of_the_stack_gives_the_credentials(
    folders: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, name, used = PROFILES[profile]
    (folders / "credentials").write_text("[ml-prod]\naws_access_key_id=A\naws_secret_access_key=x\n")
    ours = project(folders / "ours", of=f"-{name}" if name else "")
    (ours / "Pulumi.prod.yaml").write_text("config:\n  aws:profile: ml-prod\n")
    start_in(ours)
    for variable in stack.CREDENTIALS:  # undone at the end of the test
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    make(ours)
    find(name, None)
    assert os.environ.get("AWS_PROFILE") == used


def test_profile_is_looked_up_only_where_it_is_configured(folders: Path) -> None:
    ours = project(folders / "ours")
    (ours / "Pulumi.prod.yaml").write_text("config:\n  aws:region: us-west-2\n")
    start_in(ours)
    find(None, None)
    assert len((folders / "calls").read_text().splitlines()) == 1
