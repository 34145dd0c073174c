"""The settings of a run by the flags of `ray-on-ecs run`."""

import json
from pathlib import Path

import pytest

from ray_on_ecs.cli.run_flags import flags_after_script
from ray_on_ecs.config import CLUSTER_FLAG, JOB_VARIABLE, LOCAL_VARIABLE, RunConfig
from ray_on_ecs.errors import UsageError
from tests.settings import parse


def config(*arguments: str) -> RunConfig:
    return parse(arguments, {})


def test_arguments_after_the_script_belong_to_it() -> None:
    settings = config("--run-name", "mine", "train.py", "--epochs", "3", "--run-name", "other", "-m")
    assert settings.run_name == "mine"
    assert settings.command == ("train.py", "--epochs", "3", "--run-name", "other", "-m")


@pytest.mark.parametrize(
    ("text", "typed", "named"),
    [
        ("print()", "--then-stop", ["--then-stop"]),
        ("print()", "--num-workers=3 --then-stop -x", ["--num-workers", "--then-stop"]),
        ("parser.add_argument('--num-workers')", "--num-workers 3 --detach", ["--detach"]),
        ("class Arguments:\n    run_name: str", "--run-name a", []),
        ("print()", "--epochs 3", []),
        ("print()", "--local", ["--local"]),
    ],
)
def test_flags_of_the_command_after_the_script_are_named(
    tmp_path: Path, text: str, typed: str, named: list[str]
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert flags_after_script(config("--working-dir", str(tmp_path), "train.py", *typed.split())) == named


@pytest.mark.parametrize(("typed", "named"), [("--num-workers 3", []), ("--then-stop", ["--then-stop"])])
def test_of_a_module_only_unmistakable_flags_are_named(typed: str, named: list[str]) -> None:
    assert flags_after_script(config("-m", "package.train", *typed.split())) == named


def test_command_that_continues_a_run_stops_its_workers_too() -> None:
    assert "--then-stop" in config("--then-stop", "--run-name", "mine", "train.py").next_command()


@pytest.mark.parametrize("local", [False, True], ids=["stack", "local"])
def test_same_command_continues_a_run(monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    monkeypatch.delenv(LOCAL_VARIABLE, raising=False)
    if local:
        monkeypatch.setenv(LOCAL_VARIABLE, "1")
    flags = ("--num-workers", "2", "--run-name", "mine", "--working-dir", "/x/working-dir")
    cluster = "--local " if local else ""
    typed = f"ray-on-ecs run {cluster}--num-workers 2 --run-name mine train.py"
    assert config(*flags, "train.py").next_command() == typed.split()


def test_command_that_continues_a_run_is_for_the_same_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {CLUSTER_FLAG: "--outputs 'my stack.json'"}
    monkeypatch.setenv(JOB_VARIABLE, json.dumps({"metadata": metadata}))
    assert config("train.py").next_command()[2:4] == ["--outputs", "my stack.json"]


def test_command_that_continues_a_local_run_has_its_storage_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCAL_VARIABLE, "1")
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", "/my runs")  # perhaps for the first command alone
    command = config("--storage-path", "/my runs", "train.py").next_command()
    assert command[2:5] == ["--local", "--storage-path", "/my runs"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("../other.txt", "'../other.txt' is not in {folder}, so the nodes don't have it; move it there, or give"),
        ("/etc/hosts", "'/etc/hosts' is not in {folder}, so the nodes don't have it; move it there, or give"),
        ("nowhere.txt", "'nowhere.txt' can't be read ([Errno 2] "),
        (".", "'.' can't be read ([Errno 21] "),
    ],
)
def test_unavailable_requirements_file_is_refused(tmp_path: Path, given: str, message: str) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    for file in (folder / "train.py", tmp_path / "other.txt"):
        file.touch()
    settings = config("--working-dir", str(folder), "--requirements", given, "train.py")
    with pytest.raises(UsageError) as caught:
        settings.check_files()
    assert str(caught.value).startswith(f"--requirements: {message.format(folder=folder)}")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("pyproject.toml", "give a file with the line '-e .'"),
        ("sub/setup.py", "give a file with the line '-e .'"),
        ("setup.cfg", "give a file with the line '-e .'"),
        ("uv.lock", "uv export --no-emit-project -o requirements.txt writes one"),
        ("poetry.lock", "poetry export -o requirements.txt writes one"),
        ("pdm.lock", "pdm export -o requirements.txt writes one"),
        ("Pipfile", "pipenv requirements > requirements.txt writes one"),
        ("Pipfile.lock", "pipenv requirements > requirements.txt writes one"),
        (
            "environment.yaml",
            "there, pip list --format=freeze > requirements.txt writes one; leave out what only conda",
        ),
        ("conda-gpu.yml", "there, pip list --format=freeze > requirements.txt writes one; leave out what only conda"),
        ("pixi.toml", "there, pip list --format=freeze > requirements.txt writes one; leave out what only conda"),
        ("a-1.0-py3-none-any.whl", "give a file with the line './a-1.0-py3-none-any.whl'"),
    ],
)
def test_other_file_of_packages_has_a_way_out(tmp_path: Path, name: str, cure: str) -> None:
    (tmp_path / "sub").mkdir()
    for file in ("train.py", name):
        (tmp_path / file).touch()
    settings = config("--working-dir", str(tmp_path), "--requirements", name, "train.py")
    with pytest.raises(UsageError) as caught:
        settings.check_files()
    assert str(caught.value).startswith(f"--requirements: {name!r} is not a requirements file of pip; {cure}")


@pytest.mark.parametrize(
    ("given", "command_line"),
    [
        (["train.py", "-x"], ("python3", "-u", "train.py", "-x")),
        (["-m", "package.train", "-x"], ("python3", "-u", "-m", "package.train", "-x")),
        (["--no-python", "./train.sh", "-x"], ("./train.sh", "-x")),
    ],
)
def test_entrypoints_are_started_like_torchrun(given: list[str], command_line: tuple[str, ...]) -> None:
    assert config(*given).argv("python3", {}) == command_line


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ([], None),
        (["--num-workers", "4"], (4, 4)),
        (["--nnodes", "2", "--nproc-per-node", "4"], (8, 8)),
        (["--nnodes", "1:4", "--nproc_per_node", "2"], (2, 8)),
        (["--nproc-per-node", "2"], (2, 2)),
        (["--nnodes", "3"], (3, 3)),
        (["--nnodes", "1", "--nproc-per-node", "gpu"], None),
    ],
)
def test_torchrun_flags_give_the_number_of_workers(given: list[str], workers: tuple[int, int] | None) -> None:
    assert config(*given, "train.py").workers == workers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--num-workers", "2", "--nnodes", "1", "x.py"], "--num-workers: can't be given with --nnodes"),
        (["--nnodes", "none", "x.py"], "--nnodes: 'none' is not allowed; it must be a number from 1"),
        (["--nproc-per-node", "0", "x.py"], "--nproc-per-node: '0' is not allowed"),
        (["-m", "--no-python", "x"], "--no-python: can't be given with -m"),
        (["--env", "A", "x.py"], "--env: 'A' is not allowed; it must be NAME=VALUE"),
        (["--env", "A=1", "--env", "A=2", "x.py"], "--env: 'A' is given twice"),
        (["--env", "RANK=0", "x.py"], "--env: RANK can't be given, because the runner sets it for each worker"),
        (
            ["--input", "data=/x", "x.py", "$INPUT_other"],
            r"names \$INPUT_other, and the run has \$INPUT_data; add --input",
        ),
        (["x.py", "--data=$INPUT_A/b"], r"names \$INPUT_A, and the run has no input; add --input A=URI"),
        (["--input", "data=", "x.py"], "--input: 'data=' is not allowed; it must be NAME=URI"),
        (["--metric", "loss", "x.py"], "--metric: 'loss' is not allowed; it must be NAME=TEXT"),
        (["--metric", "loss=(", "x.py"], r"--metric: loss='\(' is not a regular expression"),
        (["--metric", "loss=loss", "x.py"], "or one group in parentheses, for the number; it has none"),
        (["--metric", "a={number} {number}", "x.py"], r"must have one \{number\}; repeat the flag for more"),
        (["--metric", "time=t {number}", "x.py"], "'time=t {number}' can't be given, because every record has a time"),
        (["--metric", "1a={number}", "x.py"], "--metric: '1a={number}' is not allowed; it must be NAME=TEXT"),
        (["--epochs", "3", "x.py"], "--epochs"),
    ],
)
def test_wrong_command_line_is_one_line(given: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        config(*given)
    assert "\n" not in str(caught.value)


def test_continuing_command_repeats_all_settings() -> None:
    given = [
        *("--module", "--env", "A=1", "--env", "B=", "--metric", "loss=loss: (.*)"),
        *("--run-name", "a", "train", "--run"),
    ]
    assert config(*given).command_line({}) == given


@pytest.mark.parametrize("flags", [["train.py"], ["-m", "train"], ["--no-python", "./train"], ["--mpi", "train.py"]])
def test_arguments_have_the_paths_of_the_node(flags: list[str]) -> None:
    variables = {"INPUT_DATA": "/cache/data", "RUN_DIR": "/run", "HOME": "/root", "INPUT_X": "/x"}
    settings = config("--input", "DATA=s3://b/x", *flags, "--data=$INPUT_DATA/a", "$HOME", "${RUN_DIR}", "\\$INPUT_X")
    assert settings.argv("python3", variables)[-4:] == ("--data=/cache/data/a", "$HOME", "/run", "\\$INPUT_X")
    assert settings.command[1] == "--data=$INPUT_DATA/a"


OF_RUNNER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
OF_RUNNER += ("ROLE_NAME", "MAX_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RUN_NAME", "RUN_DIR", "RUN_URI")
OF_RUNNER += ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORES", "INPUT_X", "INPUT_")
OF_USER = ("TORCHELASTIC_USE_AGENT_STORE", "WANDB_RUN_ID", "WANDB_RESUME", "TMPDIR", "OMPI_MCA_btl", "PYTHONPATH")
OF_USER += ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "TF_CONFIG", "RANKS", "MY_RANK", "INPUT", "rank")


@pytest.mark.parametrize("name", OF_RUNNER)
def test_variables_of_the_runner_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--env: {name} can't be given.*leave it out"):
        config("--env", f"{name}=0", "x.py")
    with pytest.raises(UsageError, match=f"--secret: {name} is a variable of the runner"):
        config("--secret", name, "x.py")


@pytest.mark.parametrize("name", OF_USER)
def test_other_variables_are_the_users(name: str) -> None:
    assert config("--env", f"{name}=0", "x.py").variables == {name: "0"}
