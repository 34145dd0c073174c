import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.config import LOCAL_VARIABLE, RunConfig, defaults_in
from ray_on_ecs.contract import GPUS
from ray_on_ecs.errors import UsageError
from ray_on_ecs.flags import environment_variable, flag
from tests.settings import parse

SCRIPT = "train.py"


def parsed(*flags: str, environment: Mapping[str, str] = {}) -> RunConfig:
    return parse([*flags, SCRIPT], environment)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-restarts", "many"], ["--max-restarts", "many"]),
        (["--max-restarts", "-1"], ["--max-restarts", "0 or more"]),
        (["--keep-gib", "0"], ["--keep-gib", "0.0", "above 0"]),
        (["--keep-gib", "nan"], ["--keep-gib", "nan", "finite"]),
        (["--num-workers", "0"], ["--num-workers", "0", "from 1"]),
        (["--num-workers", "2:1"], ["--num-workers", "2:1", "a minimum and a maximum"]),
        (["--num-workers", "1:"], ["--num-workers", "1:", "a minimum and a maximum"]),
        (["--num-workers", "0:4"], ["--num-workers", "0:4", "from 1"]),
        (["--hang-timeout", "0"], ["--hang-timeout", "above 0"]),
        (["--worker-timeout", "-1"], ["--worker-timeout", "0.0 or more"]),
        (["--worker-timeout", "inf"], ["--worker-timeout", "inf", "finite"]),
        (["--device", "tpu"], ["--device", "tpu", "auto, cuda, cpu"]),
        (["--per-node", "--mpi"], ["--per-node", "--mpi"]),
        (["--run-name", "a/b"], ["--run-name", "a/b", "letters"]),
        (["--run-name", ".."], ["--run-name", "..", "letters"]),
        (["--max-restart", "3"], ["--max-restart", "did you mean --max-restarts?"]),
    ],
)
def test_a_bad_value_is_named_with_its_rule_on_one_line(arguments: list[str], named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(*arguments)
    message = str(caught.value)
    assert all(word in message for word in named), f"the user must see {named} in: {message}"
    assert "\n" not in message, "an error is one line"


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA:SECRET@bucket",
        "s3://AKIA:SEC/SECRET@bucket/prefix",
        "s3://SECRET@bucket/x",
        "s3://AKIA/SECRET@bucket",
        "s3://AKIA:SECRET%40bucket",
        "s3://AKIA:SECRET%2540bucket",
        "s3://AKIA%3ASECRET/x",
        "s3://AKIA:SECRET",
        "s3:///AKIA:SECRET@bucket",
        "s3://bucket/x?access_key=A&secret_key=SECRET",
        "s3://bucket?secret_key=SECRET",
        "s3://AKIA:SECRET@bucket@x?SECRET",
        "stream:s3://AKIA:SECRET@bucket",
        "stream:s3://bucket/x?secret_key=SECRET",
        "https://user:SECRET@host/x",
        "s3:/AKIA:SECRET@bucket",
        "s3:AKIA:SECRET@bucket",
        "stream:s3:AKIA:SECRET@bucket",
        "S3:AKIA/SECRET",
        "s3//AKIA:SECRET@bucket",
        "AKIA:SECRET@bucket",
        "AKIA:SECRET%40bucket",
        "AKIA:SEC/SECRET@bucket",
        "SECRET:SECRET@b://c@d",
    ],
)
@pytest.mark.parametrize("flags", ["--input data={}", "--input {}", "--input a/b={}", "--storage-path {}"])
def test_key_in_an_address_is_refused_without_being_shown(flags: str, address: str) -> None:
    with pytest.raises(UsageError, match="may have a key in its address") as refused:
        parsed(*flags.format(address).split(" "))
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        *("s3://bucket/a@b", "s3://bucket/a:b@c", "s3://bucket/a%40b", "stream:s3://my.bucket-1/a@b", "run:other"),
        *("/disk/a:b@c", "./a:b@c", "~/a:b@c", "../a:b@c", "a@b", "data/a@b", "a:b", "s3data/x", "stream:/disk/a@b"),
    ],
)
def test_sign_in_a_path_is_not_a_key(address: str) -> None:
    assert parsed("--input", f"data={address}").inputs == {"data": address}
    assert parsed("--storage-path", address).storage_path == address


def test_without_flags_the_defaults_of_the_dataclass_hold() -> None:
    assert parsed() == RunConfig(command=(SCRIPT,)), "the command line must not have other defaults"


def test_an_environment_variable_sets_the_default_and_a_flag_wins_over_it() -> None:
    variables = {environment_variable("storage_path"): "s3://bucket/runs", "RAY_ON_ECS_NUM_WORKERS": "4"}
    assert parsed(environment=variables).storage_path == "s3://bucket/runs", (
        "the task definition hands over the bucket so"
    )
    assert parsed(environment=variables).num_workers == 4, "a number from the environment is a number"
    assert parsed("--num-workers", "2", environment=variables).num_workers == 2, "what is typed wins"


def test_a_number_of_workers_may_be_a_range() -> None:
    assert parsed("--num-workers", "1:4").workers == (1, 4)
    assert parsed("--num-workers", "3").workers == (3, 3)
    assert parsed().workers is None


def test_an_empty_environment_variable_is_none() -> None:
    assert parsed(environment={"RAY_ON_ECS_CLOUDWATCH_NAMESPACE": ""}).cloudwatch_namespace is None


def test_a_bad_environment_variable_is_refused_like_a_flag() -> None:
    with pytest.raises(UsageError, match="--max-restarts: -1 is not allowed"):
        parsed(environment={"RAY_ON_ECS_MAX_RESTARTS": "-1"})


def test_a_run_without_a_name_gets_one_that_tells_what_it_is() -> None:
    name = parsed().named().run_name
    assert name is not None
    assert re.fullmatch(r"train-\d{4}-\d{4}-[a-z0-9]{3}", name), "a name tells script and time"
    long = RunConfig(command=("jobs/my_own_very_long_training_script.py",)).named().run_name
    assert str(long).startswith("my-own-very-long-tra-")
    assert str(RunConfig(command=("__.py",)).named().run_name).startswith("run-")
    modules = ("mycompany.research.train", "mycompany.research.evaluate", "a.b", "a.c", "pkg")
    found = [str(RunConfig(command=(name,), module=True).named().run_name)[:-14] for name in modules]
    assert found == ["mpany-research-train", "ny-research-evaluate", "a-b", "a-c", "pkg"]
    assert parsed("--run-name", "mine").named().run_name == "mine", "a given name stays"


def test_help_is_quick_and_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0, "asking for help is no mistake"
    shown = capsys.readouterr().out
    settings = [spec for spec in fields(RunConfig) if spec.metadata and not spec.metadata.get("hidden")]
    assert all(spec.metadata.get("flags", (flag(spec.name),))[-1] in shown for spec in settings), (
        "each setting is in --help"
    )
    assert "Exit status" in shown, "scripts need to know what the exit status means"


@pytest.mark.parametrize(
    ("flags", "text", "argv"),
    [
        ([], "--resume out/last.ckpt", ["python", "-u", "train.py", "--lr", "1", "--resume", "out/last.ckpt"]),
        (["-m"], "ckpt_path=a.ckpt", ["python", "-u", "-m", "train.py", "--lr", "1", "ckpt_path=a.ckpt"]),
        (["--no-python"], "'a b' c", ["train.py", "--lr", "1", "a b", "c"]),
        (["--mpi"], "--resume", ["python", "-u", "train.py", "--lr", "1", "--resume"]),
        (["--driver"], "--resume", ["python", "-u", "train.py", "--lr", "1", "--resume"]),
    ],
)
def test_resume_args_are_only_a_resumed_scripts(flags: list[str], text: str, argv: list[str]) -> None:
    config = parse([*flags, "--resume-args", text, "train.py", "--lr", "1"])
    assert config.command == ("train.py", "--lr", "1")
    assert list(config.resumed().argv("python", {})) == argv
    assert config.resumed().resumed() == config.resumed()


@pytest.mark.parametrize("text", ["'", '"a', "--resume 'x", "a\\"])
def test_resume_args_with_an_open_quote_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--resume-args: .* is not a list of arguments .*; quote them as in a shell"):
        RunConfig(command=("train.py",), resume_args=text)


@pytest.mark.parametrize(
    ("environment", "given", "kept"),
    [
        ({"RAY_ON_ECS_GPU": "H100"}, {}, {"gpu": "H100"}),
        ({"RAY_ON_ECS_POOL": "a"}, {"num_workers": 2}, {"pool": "a"}),
        ({"RAY_ON_ECS_GPU": "H100"}, {"device": "cuda"}, {"gpu": "H100"}),
        ({"RAY_ON_ECS_GPU": "H100"}, {"pool": "a"}, {}),
        ({"RAY_ON_ECS_POOL": "a"}, {"gpu": "H100"}, {}),
        ({"RAY_ON_ECS_POOL": "a"}, {"pool": "b"}, {}),
        ({"RAY_ON_ECS_POOL": "a"}, {"device": "cpu"}, {}),
        ({"RAY_ON_ECS_GPU": "H100"}, {"device": "cpu"}, {}),
        ({"RAY_ON_ECS_GPU": "H100", "RAY_ON_ECS_DEVICE": "cpu"}, {}, {"device": "cpu"}),
        ({"RAY_ON_ECS_GPU": "H100"}, {"driver": True}, {}),
        ({"RAY_ON_ECS_POOL": "a", LOCAL_VARIABLE: "1"}, {}, {}),
    ],
)
def test_pools_of_the_environment(environment: dict[str, str], given: Any, kept: Any) -> None:
    assert defaults_in(environment, given) == kept
    RunConfig(**{**defaults_in(environment, given), **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpu": "H100:8"}, "--gpu: 'H100:8' has a number; use --gpu H100 --num-workers 8"),
        ({"gpu": "H100: 8"}, "use --gpu H100 --num-workers 8"),
        ({"gpu": "A10G,H100=16"}, "use --gpu H100 --num-workers 16"),
        ({"gpu": "H100x8"}, "use --gpu H100 --num-workers 8"),
        ({"gpu": "A10Gx4"}, "use --gpu A10G --num-workers 4"),
        ({"gpu": "H100 x 8"}, "use --gpu H100 --num-workers 8"),
        ({"gpu": "8xH100"}, "use --gpu H100 --num-workers 8"),
        ({"gpu": "8 x H100"}, "use --gpu H100 --num-workers 8"),
        ({"gpu": "8 H100"}, "use --gpu H100 --num-workers 8"),
        ({"gpu": "H100:80GB:8"}, "use --gpu H100 --num-workers 8"),
        ({"gpu": "8"}, "--gpu: '8' is a number; use --num-workers 8, and --gpu with a GPU's name"),
        ({"gpu": "RTX PRO 4500:2"}, "use --gpu 'RTX PRO 4500' --num-workers 2"),
        ({"pool": "h100:8"}, "--pool: 'h100:8' has a number; use --pool h100 --num-workers 8"),
        (
            {"gpu": "p5.48xlarge"},
            "--gpu: 'p5.48xlarge' is an instance type; use its GPU, --gpu H100, or --pool with the ",
        ),
        ({"gpu": "H100,ml.p4d.24xlarge"}, "use its GPU, --gpu A100, or --pool"),
        ({"gpu": "G7e.2xlarge"}, "use its GPU, --gpu 'RTX PRO Server 6000', or --pool"),
        ({"gpu": "p6-b200"}, "use its GPU, --gpu B200, or --pool"),
        ({"gpu": "x9.large"}, "use its GPU's name or --pool with the name of a pool"),
        ({"pool": "g5.xlarge"}, "--pool: 'g5.xlarge' is an instance type; use its GPU, --gpu A10G, or"),
        ({"gpu": "H100 L4"}, "--gpu: 'H100 L4' is not a name; put commas and no spaces between names, as in H100,L4"),
        ({"gpu": "H100;L4"}, "as in H100,L4"),
        ({"gpu": "H100/a100"}, "as in H100,a100"),
        ({"gpu": "[H100]"}, "as in H100"),
        ({"pool": "h100 l4"}, "--pool: 'h100 l4' is not a name; put commas and no spaces between names, as in h100,l4"),
        ({"pool": "h100|l4"}, "as in h100,l4"),
        ({"gpu": "H100,"}, "--gpu: 'H100,' has an empty name; put commas and no spaces between names, as in A,B"),
    ],
)
def test_lists_of_other_tools_are_refused_with_the_form_that_works(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        RunConfig(**given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "gpu", [*GPUS.values(), "h100", "H100, L4", "A10G or L4", "RTX-PRO-6000", "rtx pro 6000", "A10"]
)
def test_names_of_gpus_are_taken(gpu: str) -> None:
    assert RunConfig(gpu=gpu).gpu == gpu


@pytest.mark.parametrize("pool", ["h100x8", "p5", "default,cpu", "l4-spot, h100", "H100"])
def test_names_of_pools_are_taken(pool: str) -> None:
    assert RunConfig(pool=pool).pool == pool


def test_command_to_continue_names_no_missing_pool() -> None:
    config = RunConfig(command=("train.py",), device="cpu")
    assert config.command_line({"RAY_ON_ECS_POOL": "h100"}) == ["--device", "cpu", "train.py"]
