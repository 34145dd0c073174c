"""The command line: its help, its imports, its way to a stack, and its arguments of a run."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli import run, run_flags
from ray_on_ecs.cli.main import COMMANDS, main
from ray_on_ecs.cluster.clusters import LocalCluster, StackCluster
from ray_on_ecs.cluster.stack import PulumiError, find
from ray_on_ecs.config import SETTINGS, RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.jobs import machine
from ray_on_ecs.node import api
from ray_on_ecs.rules import secret_hints
from ray_on_ecs.run import document
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.storage.bucket import Bucket
from ray_on_ecs.storage.run_storage import RunStorage
from tests.ray_on_ecs.cli.folders import Folders
from tests.ray_on_ecs.cli.folders import outputs as connection

CONNECTION = {**connection("the-bucket"), "region": "us-west-2"}
OUTPUTS = {"connection": CONNECTION, "estimated_hourly_usd": "unknown", "train_command": "aws ssm start-session"}
SECTIONS = ("Resources", "Run", "Files", "Metrics", "Fault tolerance", "Script", "Cluster")
# Prints the output of `pulumi stack output`, and writes its arguments.
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
    """A project's folder, with a command pulumi that has the outputs; the file with its arguments."""
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


HEAVY = {"ray", "torch", "grpc", "pulumi", "aiohttp"}


def test_help_lists_verbs_without_heavy_imports() -> None:
    code = (
        "import sys; from ray_on_ecs.__main__ import main; from ray_on_ecs.cli.main import COMMANDS\n"
        "for words in ((), *((verb,) for verb in COMMANDS)):\n"
        "    main([*words, '--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *others = [set(line.split()) for line in done.stderr.splitlines()]
    assert not (HEAVY | {"boto3", "pyarrow", "matplotlib", "rich"}) & first
    for verb, modules in zip(COMMANDS, others, strict=True):
        assert not (HEAVY | {"boto3", "pyarrow", "matplotlib"}) & modules, verb


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("runs", "--local"), 0),
        (("logs", "--local", "night"), 0),
        (("stop", "--local", "night"), 2),
        (("run", "--local", "--detach", "train.py"), 0),
    ],
    ids=["runs", "logs", "stop", "run"],
)
def test_command_imports_neither_ray_nor_torch(words: tuple[str, ...], status: int, tmp_path: Path) -> None:
    """Also with jobs, which it lists."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    folders = Folders(str(tmp_path / "runs"))
    folders.script("night")
    folders.of("night").write("logs/20261125T141834Z.txt", b"a line\n")
    code = (
        "import sys; from ray_on_ecs.__main__ import main; from ray_on_ecs.jobs import machine\n"
        "machine.DRIVER = ('-c', ''); status = main(sys.argv[1:])\n"
        "print(*sys.modules, file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path / "code",
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "RAY_ON_ECS_STORAGE_PATH": folders.path,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert not HEAVY & set(done.stderr.splitlines()[-1].split())


def test_help_of_run_has_settings_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("--num-workers", "--working-dir", "--max-restarts", "--fetch", "--local"))
    sections = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert sections == [f"{section}:" for section in SECTIONS]
    assert {spec.metadata["section"] for spec in SETTINGS} < set(SECTIONS)
    hidden = ("--nnodes", "--nproc-per-node", "--standalone", "--rdzv", "--master", "--node-rank")
    assert not [each for each in hidden if each in shown]


@pytest.mark.parametrize("words", [("--help",), ("run", "--help")], ids=["all", "run"])
def test_help_fits_into_80_columns(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words]) == 0
    shown = capsys.readouterr().out
    assert not [line for line in shown.splitlines() if len(line) > 80]
    assert not re.search(r"default: \d+\.0\b|x>=", shown)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_asks_the_command(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_RAY_ON_ECS_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert f"_RAY_ON_ECS_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_verbs_flags_and_values_are_completed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_RAY_ON_ECS_COMPLETE", "bash_complete")

    def completed(words: str) -> str:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out

    assert completed("ray-on-ecs not").split() == ["plain,notebook"]
    assert "--max-restarts" in completed("ray-on-ecs run --max-re")
    assert "plain,cuda" in completed("ray-on-ecs run --device cu")
    assert completed("ray-on-ecs run --working-dir ex").split() == ["dir,ex"]
    assert completed("ray-on-ecs run tr").split() == ["file,tr"]


def test_torchrun_flags_are_accepted_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    torchrun = ("--standalone", "--rdzv_endpoint=host:1", "--nnodes=1", "--nproc-per-node=2")
    command = ["train.py", "--node-rank", "3"]
    settings = {"num_workers": 2, "run_name": "x", "command": command}
    assert given(*torchrun, "--run-name", "x", *command) == settings
    monkeypatch.setattr(machine, "DRIVER", ("-c", ""))
    main(["run", "--local", *torchrun, "train.py"])
    line = "--standalone, --rdzv-endpoint: not needed; the run has its own rendezvous and log"
    assert capsys.readouterr().err.splitlines()[0] == line


def test_finished_run_is_refused_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    typed = ["run", "--local", "--run-name", "first", "--storage-path", "my results", "train.py"]
    result = tmp_path / "my results" / "first" / "result.json"
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    assert main(typed) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("ray-on-ecs: --run-name: run 'first' is finished, results in ")
    variable, *words = shlex.split(line.rpartition("(")[2].removesuffix(")"))
    monkeypatch.setenv(*variable.split("=", 1))
    assert main(words[1:]) == 0
    assert not result.parent.exists()


def test_wrong_word_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "ray-on-ecs: No such command 'trian'. Did you mean run? (see ray-on-ecs --help)\n"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *(
            ("report", "open"),
            ("resume", "run"),
            ("continue", "run"),
            ("stat", "status"),
            ("show", "open"),
            ("list", "runs"),
            ("ps", "runs"),
            ("kill", "stop"),
        ),
        *(("delete", "rm"), ("submit", "run"), ("download", "fetch"), ("ssh", "shell"), ("log", "logs")),
    ],
)
def test_word_of_another_program_names_the_command(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    assert main([word]) == 2
    assert f"Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--local"], ["--stack", "my stack"]], ids=" ".join)
def test_status_of_a_run_names_its_commands(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    typed = " ".join(["", *map(shlex.quote, flags)])
    assert main(["status", "first", *flags]) == 2
    assert capsys.readouterr().err == (
        f"ray-on-ecs: first: status shows the cluster; ray-on-ecs runs{typed} lists the runs, "
        f"ray-on-ecs logs{typed} first and ray-on-ecs open{typed} first show one\n"
    )


def test_stack_outputs_come_from_pulumi(pulumi: Path) -> None:
    stack = find(None, None)
    assert (stack.bucket, stack.storage_path) == ("the-bucket", "s3://the-bucket/runs")
    assert stack.estimated_hourly_usd is None
    find("prod", None)
    first, second = pulumi.read_text().splitlines()
    project = Path.cwd().parent
    assert first == f"{project} stack output --json --non-interactive"
    assert second == f"{first} --stack prod"


def test_invalid_stack_is_one_line(pulumi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, hint in (
        (
            "error: getting secrets manager: passphrase must be set with PULUMI_CONFIG_PASSPHRASE",
            "export PULUMI_CONFIG",
        ),
        ("error: PULUMI_ACCESS_TOKEN must be set for login during non-interactive CLI sessions", "pulumi login"),
    ):
        monkeypatch.setenv("SAYS", said)
        with pytest.raises(PulumiError, match=rf"pulumi stack output fails in .*; {hint}") as caught:
            find(None, None)
        assert caught.value.fix.startswith(hint)
    with pytest.raises(UsageError, match="--outputs: /nowhere can't be read"):
        find(None, "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="command not found: pulumi; install Pulumi, set RAY_ON_ECS_CLUSTER"):
        find(None, None)


def given(*words: str) -> dict[str, Any]:
    """The settings in the document of a run on a stack."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dev.json"
        file.write_text(json.dumps(CONNECTION))
        cluster = StackCluster(find(None, str(file)))
        with run.command.make_context("run", list(words)) as context:
            config, typed = run_flags.settings_of(context.params)
        storage = RunStorage.open(folder, "x")
        document.write(
            storage, run._on_cluster(cluster, config, typed), typed, Code(name="code", archive="a.tar.gz"), {}
        )
        return storage.read_settings()


def test_flags_reach_the_run_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = ("--run-name", "x")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    script = {"run_name": "x", "command": ["train.py"]}
    assert given("--num-workers", "1:4", "--fetch", "here", *named, "train.py") == {**script, "num_workers": "1:4"}
    assert given(*named, "train.py") == script
    assert given("--worker-timeout", "600", *named, "train.py") == {**script, "worker_timeout": 600.0}, (
        "what is typed wins over the cluster's default, also if it is ours"
    )
    flags = ("--env", "A=1", "--env", "B=2", *named)
    assert given(*flags, "train.py", "--epochs", "9", "-m", "--detach") == {
        "run_name": "x",
        "env": ["A=1", "B=2"],
        "command": ["train.py", "--epochs", "9", "-m", "--detach"],
    }
    module = {"run_name": "x", "module": True, "max_restarts": 1}
    assert given("-m", *named, "--max-restarts", "1", "my.package", "--local") == {
        **module,
        "command": ["my.package", "--local"],
    }
    assert given("--gpu", "H100,A100", *named, "train.py") == {**script, "gpu": "H100,A100"}
    assert given("--pool", "h100", *named, "train.py") == {**script, "pool": "h100"}
    monkeypatch.setenv("RAY_ON_ECS_NUM_WORKERS", "4")
    assert given(*named, "train.py") == {**script, "num_workers": 4}


@pytest.mark.parametrize("path", ["pip/gpu.txt", "./pip/../pip/gpu.txt", "{folder}/pip/gpu.txt"])
def test_requirements_file_is_relative_to_the_folder(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip").mkdir()
    for name in ("train.py", "pip/gpu.txt"):
        (tmp_path / name).touch()
    found = given("--requirements", path.format(folder=tmp_path), "train.py")
    assert found["requirements"] == "pip/gpu.txt"


@pytest.mark.parametrize(("value", "status"), [("1", 0), ("true", 0), ("0", 2), ("", 2), ("x", 2)])
def test_variable_chooses_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, status: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ON_ECS_LOCAL", value)
    monkeypatch.setenv("RAY_ON_ECS_CLUSTER", "s3://")  # is refused
    assert main(["runs"]) == status
    assert main(["runs", "--compose", "--local"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_flags_override_the_environment(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ON_ECS_OUTPUTS", "/nowhere")
    outputs.write_text("{}")
    assert main(["stop", "--outputs", str(outputs), "first"]) == 3
    assert f"--outputs: {outputs} has no outputs" in capsys.readouterr().err
    assert main(["stop", "--local", "first"]) == 2
    assert "run 'first' not found in " in capsys.readouterr().err
    assert main(["stop", "--local", "--stack", "dev", "first"]) == 2
    assert "give one of them" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ON_ECS_STACK", "dev")
    assert main(["stop", "first"]) == 2


def test_wrong_run_is_refused_without_a_cluster(pulumi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, line in (
        (("--keep-gib", "five", "train.py"), "--keep-gib: 'five' is not allowed; it must be a number"),
        (("--epochs", "5", "train.py"), "--epochs: is not a flag of ray-on-ecs run; flags of the script follow it"),
        (
            ("--num-worker", "5", "train.py"),
            "--num-worker: is not a flag of ray-on-ecs run; did you mean --num-workers?",
        ),
        (
            ("--spot", "train.py"),
            "--spot: is not a flag of ray-on-ecs run; each pool has its own, by the keys spot and "
            "workerPools.NAME.spot, and --pool chooses the pool; flags of the script follow it",
        ),
        (("--instance-type", "p5.48xlarge", "train.py"), "--instance-type: is not a flag of ray-on-ecs run; each pool"),
        (("--gpu", "H100:8", "train.py"), "--gpu: 'H100:8' has a number; use --gpu H100 --num-workers 8"),
        ((), "SCRIPT: is missing; give the script to run"),
        (("nosuch.py",), "SCRIPT: there is no file 'nosuch.py'"),
        (("--detach", "--fetch", "x"), "--fetch: not allowed with --detach"),
        (("--json",), "--json: requires --detach"),
    ):
        assert main(["run", *words]) == 2
        assert line in capsys.readouterr().err
    assert not pulumi.exists()


@pytest.mark.parametrize(("flag", "name"), [("--local", "this machine"), ("--compose", "compose")])
def test_only_a_stack_has_workers_to_stop_and_to_pay(
    flag: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for words, line in (
        (["--then-stop"], f"--then-stop: {name} has no instances to stop; leave it out"),
        (["--max-usd", "5"], f"--max-usd: {name} has no prices; limit the run by --max-hours, and leave it out"),
    ):
        assert main(["run", flag, *words, "train.py"]) == 2
        assert capsys.readouterr().err == f"ray-on-ecs: {line}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing is left behind"


def test_syntax_error_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os\nprint('a'\n")
    assert main(["run", "--local", "train.py"]) == 2
    assert capsys.readouterr().err == "ray-on-ecs: SCRIPT: train.py:2: SyntaxError: '(' was never closed\n"


@pytest.mark.parametrize("source", ["nosuch", "stream:nosuch", "empty"])
def test_missing_input_is_refused_before_ray_starts(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "empty").mkdir()
    assert main(["run", "--local", "--input", f"data={source}", "train.py"]) == 2
    assert capsys.readouterr().err.startswith(f"ray-on-ecs: --input: data={source} can't be read (")


def test_storage_path_that_is_a_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "results").touch()
    assert main(["run", "--local", "train.py"])
    assert "results is not a folder; give another folder" in capsys.readouterr().err


def test_local_inputs_are_absolute_for_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").touch()
    (tmp_path / "train.py").touch()
    sources = ("a=data", "b=stream:data", "c=s3://no-such-bucket/x", "d=run:first")
    config = RunConfig(command=("train.py",), input=sources)
    folder = Path.cwd() / "data"
    wanted = (f"a={folder}", f"b=stream:{folder}", "c=s3://no-such-bucket/x", "d=run:first")
    assert run._on_cluster(LocalCluster(), config, ()).input == wanted


def test_variable_named_like_a_secret_has_a_hint() -> None:
    variables = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "password", "OPENAI_APIKEY", "MONKEY", "TOKENIZER"), "x")
    hints = secret_hints(variables)
    assert [hint.split()[1] for hint in hints] == ["HF_TOKEN", "WANDB_API_KEY", "password", "OPENAI_APIKEY"]
    assert hints[0] == (
        "--env: HF_TOKEN shows its value in the results and in Ray's dashboard; "
        "--secret HF_TOKEN takes it from your shell and shows it nowhere"
    )


def test_flag_before_the_command_has_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--local", "runs"]) == 2
    assert capsys.readouterr().err == "ray-on-ecs: --local: follows the command, as in ray-on-ecs runs --local\n"


def test_local_token_is_found_in_ray_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    assert api.own_token() == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of-this-machine\n")
    assert api.own_token() == "of-this-machine"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "typed")
    assert api.own_token() == "typed"


def test_stack_bucket_needs_no_region_lookup(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "mine")
    storage = StackCluster(find(None, str(outputs))).storage("first")
    assert storage.uri == "s3://the-bucket/runs/first"
    assert storage.path("result.json") == "the-bucket/runs/first/result.json"
    assert isinstance(storage.store, Bucket)
    assert storage.store.client.meta.region_name == "us-west-2"


def test_windows_is_refused_in_one_line() -> None:
    """Without the parts that Python lacks on Windows, any of which would be a traceback."""
    program = """
import os, signal, sys
os.name = "nt"
for name in ("SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGALRM"):
    delattr(signal, name)
for name in ("killpg", "setsid", "getpgid", "fork", "getuid"):
    delattr(os, name)
sys.modules.update(dict.fromkeys(("fcntl", "pwd", "grp", "resource", "termios", "tty")))
from ray_on_ecs.cli.main import main
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    line = "ray-on-ecs: Windows is not supported; use macOS, Linux, or WSL on Windows\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
