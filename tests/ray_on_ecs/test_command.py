"""The command line itself: its help, what it imports, how it finds a stack, and what it hands to the run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from infra.definitions import commands
from ray_on_ecs import aws
from ray_on_ecs.__main__ import VERBS, main
from ray_on_ecs.cluster import StackCluster
from ray_on_ecs.stack import find
from ray_on_ecs.verbs import run
from training.errors import ResourceError, UsageError

OUTPUTS = {
    "region": "us-west-2",
    "bucket": "the-bucket",
    "cluster_name": "the-cluster",
    "head_instance_id": "i-1",
    "head_host": "head.ray.internal",
    "token_parameter": "the-token",
    "workers_parameter": "the-workers",
    "services": {"head": "the-head"},
    "gpus": 2,
    "estimated_hourly_usd": "unknown",
    "train_command": "aws ssm start-session",
}
# Prints what `pulumi stack output` would, and how it was called.
PULUMI = """#!/bin/sh
echo "$PWD $*" >> "$CALLS"
if [ -n "$SAYS" ]; then echo "$SAYS" >&2; exit 255; fi
cat "$OUTPUTS"
"""


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    file = tmp_path / "prod.json"
    file.write_text(json.dumps(OUTPUTS))
    return file


@pytest.fixture
def pulumi(tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder, with a command pulumi that knows the outputs; the file that says how it was called."""
    program, project = tmp_path / "bin" / "pulumi", tmp_path / "project"
    program.parent.mkdir()
    program.write_text(PULUMI)
    program.chmod(0o755)
    (project / "deeper").mkdir(parents=True)
    (project / "Pulumi.yaml").touch()
    calls = tmp_path / "calls"
    for name, value in {"CALLS": calls, "OUTPUTS": outputs, "SAYS": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(project / "deeper")
    return calls


def imported(*words: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    code = "import sys; from ray_on_ecs.__main__ import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_names_every_verb_and_imports_nothing_that_is_heavy() -> None:
    assert not {"ray", "torch", "boto3", "aiohttp", "pyarrow", "matplotlib", "rich"} & imported("--help")
    for verb in VERBS:
        assert not {"ray", "torch", "boto3", "pyarrow", "matplotlib", "pulumi"} & imported(verb, "--help"), verb


def test_every_verb_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert main([verb, "--help"]) == 0
        assert f"Usage: ray-on-ecs {verb}" in capsys.readouterr().out


def test_the_help_of_run_has_every_setting_in_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("--epochs", "--working-dir", "--max-restarts", "--fetch", "--local"))
    sections = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert sections[0] == "This command:"
    assert "How fast:" in sections


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_completes_verbs_flags_and_values(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    assert "_RAY_ON_ECS_COMPLETE" in capsys.readouterr().out

    def completed(words: str) -> str:
        variables = {"_RAY_ON_ECS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return subprocess.run(
            [sys.executable, "-c", "from ray_on_ecs.__main__ import ray_on_ecs as r; r(prog_name='ray-on-ecs')"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        ).stdout

    assert "plain,compare" in completed("ray-on-ecs comp")
    assert "--epochs" in completed("ray-on-ecs run --ep")
    assert "plain,digits" in completed("ray-on-ecs run --dataset di")


def test_a_wrong_word_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "ray-on-ecs: No such command 'trian'. (see ray-on-ecs --help)\n"


def test_a_stack_is_found_by_asking_pulumi_in_its_project(pulumi: Path) -> None:
    stack = find(None, None)
    assert (stack.bucket, stack.storage_path, stack.gpus) == ("the-bucket", "s3://the-bucket/runs", 2)
    assert stack.estimated_hourly_usd is None, "AWS didn't say"
    find("prod", None)
    first, second = pulumi.read_text().splitlines()
    project = Path.cwd().parent
    assert first == f"{project} stack output --json --non-interactive"
    assert second == f"{first} --stack prod"


def test_a_stack_is_found_in_a_file(outputs: Path) -> None:
    assert find(None, str(outputs)).name == "prod"


def test_what_is_no_stack_is_one_line(
    pulumi: Path, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAYS", "error: no stack selected; please use `pulumi stack select`")
    with pytest.raises(UsageError, match=r"names no stack in .*project \(no stack selected; .*--stack NAME names one"):
        find(None, None)
    monkeypatch.setenv("SAYS", "")
    outputs.write_text("{}")
    with pytest.raises(ResourceError, match=r"prod of .*project is not up; pulumi up creates it"):
        find("prod", None)
    outputs.write_text(json.dumps({"url": "http://another.project"}))
    with pytest.raises(UsageError, match="has no output bucket, cluster_name"):
        find("prod", None)
    with pytest.raises(UsageError, match="--outputs: /nowhere can't be read"):
        find(None, "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no command pulumi; install Pulumi, or give"):
        find(None, None)


def submitted(*words: str, gpus: int = 2) -> str:
    """The job's command, as a stack with so many GPUs gets it."""
    (folder := Path(tempfile.mkdtemp())).joinpath("dev.json").write_text(json.dumps({**OUTPUTS, "gpus": gpus}))
    stack = find(None, str(folder / "dev.json"))
    shutil.rmtree(folder)
    context = run.command.make_context("run", list(words))
    given = {key: value for key, value in context.params.items() if key in run.settings()}
    return run._submission(StackCluster(stack), given, context.params["command"], 3).entrypoint


def test_flags_reach_the_run_as_they_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = ("--run-name", "x")
    assert submitted(*named) == "python -m training --num-workers 2 --run-name x", "a worker for each of its GPUs"
    assert submitted("--num-workers", "1:4", *named) == "python -m training --num-workers 1:4 --run-name x"
    assert submitted(*named, gpus=0) == "python -m training --run-name x"
    language = submitted("--recipe", "language", "--max-steps", "9", *named)
    assert language == "python -m training --num-workers 2 --recipe language --max-steps 9 --run-name x"
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    script = submitted("--env", "A=1", "--env", "B=2", *named, "train.py", "--epochs", "9", "-m", "--detach")
    assert script == (
        "python -m training.launch --num-workers 2 --run-name x --env A=1 --env B=2 train.py --epochs 9 -m --detach"
    )
    module = submitted("-m", *named, "--max-failures", "1", "my.package", "--local")
    assert (
        module == "python -m training.launch --num-workers 2 --run-name x --max-failures 1 --module my.package --local"
    )


def test_the_heads_container_is_found_as_the_stacks_own_commands_find_it() -> None:
    assert commands.HEAD_CONTAINER == aws.HEAD_CONTAINER
