"""Secrets of a run: the two stores, AWS Secrets Manager, the rules of values, and what hides them in lines."""

import base64
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from ray_on_ecs import secrets
from ray_on_ecs.cluster.aws import Refused
from ray_on_ecs.cluster.clusters import StackCluster
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import SECRETS_KEY_VARIABLE, SECRETS_VARIABLE, secrets_prefix
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError
from ray_on_ecs.jobs.documents import HeadState
from ray_on_ecs.jobs.remote import RemoteJobs
from tests.aws import client, environment
from tests.ray_on_ecs.cli.folders import outputs
from tests.starts import start_of

RUN = "s3://bucket/runs/first"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1a2b"
ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"


@pytest.fixture
def aws(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SSM of the tests, whose parameters this process finds as one of a cluster does."""
    for name, value in {**environment(aws_server), SECRETS_VARIABLE: secrets_prefix("ray")}.items():
        monkeypatch.setenv(name, value)
    return client("ssm", aws_server)


@pytest.fixture(params=["files", "parameters"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> secrets.Store:
    if request.param == "parameters":
        request.getfixturevalue("aws")
    else:
        monkeypatch.setenv("HOME", str(tmp_path))
    return secrets.store(RUN)


def test_values_are_read_until_they_are_deleted(store: secrets.Store) -> None:
    values = {f"TOKEN_{number}": f"value {number}\nof two lines" for number in range(12)}
    assert not store.read(list(values))
    for _ in range(2):  # the answer was lost
        store.put(values)
    assert store.read(["OTHER", *values]) == values
    store.put({"TOKEN_0": "another"})
    assert secrets.read(["TOKEN_0"], RUN) == {"TOKEN_0": "another"}
    for _ in range(2):
        store.delete(["OTHER", *values])
        assert not store.read(list(values))


def test_runs_of_one_name_under_two_storage_paths_are_two(store: secrets.Store) -> None:
    store.put({"TOKEN": "mine"})
    other = secrets.store("s3://bucket/other/first")
    other.delete(["TOKEN"])
    assert not other.read(["TOKEN"])
    assert store.read(["TOKEN"]) == {"TOKEN": "mine"}
    store.delete(["TOKEN"])


def test_a_parameter_is_encrypted_and_below_the_clusters_prefix(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteJobs, "state", lambda jobs: (HeadState(), 1.0))
    stack = replace(Stack(name="dev", **outputs("bucket")), cluster_name="ray")
    StackCluster(stack).secrets_of(RUN).put({"TOKEN": "value"})
    [found] = aws.get_parameters_by_path(Path="/ray-on-ecs/ray/runs", Recursive=True)["Parameters"]
    assert found["Type"] == "SecureString"
    assert re.fullmatch(r"/ray-on-ecs/ray/runs/first/[0-9a-f]{8}/TOKEN", found["Name"])
    assert secrets.read(["TOKEN"], RUN) == {"TOKEN": "value"}, "a laptop's is the cluster's"
    secrets.store(RUN).delete(["TOKEN"])


def test_a_file_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = secrets.store("/storage/first")
    store.put({"TOKEN": "value"})
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folders = [parent for parent in file.parents if parent != tmp_path and parent.is_relative_to(tmp_path)]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    store.delete(["TOKEN"])
    assert [path.name for path in (tmp_path / ".ray-on-ecs").rglob("*")] == ["secrets"]


def test_a_file_that_can_not_be_stored_leaves_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = secrets.store(RUN)
    store.put({"OLD": "earlier"})
    [old] = (path for path in tmp_path.rglob("OLD"))
    (old.parent / "SECOND").mkdir()  # stands for a full disk
    (old.parent / ".FIRST.12345").write_text("value")  # of a command that was killed
    with pytest.raises(ResourceError, match=r"^--secret: FIRST, SECOND could not be stored in .* \(Is a directory\); "):
        store.put({"FIRST": "value", "SECOND": "value"})
    assert [path.name for path in old.parent.iterdir() if path.is_file() and "FIRST" in path.name] == []
    store.delete(["OLD"])
    assert not list(tmp_path.rglob("OLD"))


def test_a_secret_of_secrets_manager_is_read(aws: Any, aws_server: str) -> None:
    manager = client("secretsmanager", aws_server)
    arn = manager.create_secret(Name="hf", SecretString="of the company")["ARN"]
    assert secrets.read([f"TOKEN={arn}"], RUN) == {"TOKEN": "of the company"}
    with pytest.raises(UsageError, match=r"^--secret: TOKEN can't be read .*; the key jobSecrets names what jobs may$"):
        secrets.read([f"TOKEN={ARN}"], RUN)


@pytest.mark.parametrize("key", ["", KEY], ids=["of AWS", "of the stack"])
def test_values_are_encrypted_with_the_key_of_the_stack(key: str, aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRETS_KEY_VARIABLE, key)
    store = secrets.store(RUN)
    store.put({"TOKEN": "hf_abc"})
    [stored] = [
        parameter for parameter in aws.describe_parameters()["Parameters"] if parameter["Name"].endswith("/TOKEN")
    ]
    store.delete(["TOKEN"])
    assert stored["KeyId"] == (key or "alias/aws/ssm")


def test_what_aws_says_of_a_value_is_hidden() -> None:
    def refuse(method: str, **given: Any) -> Any:
        raise Refused("ValidationException", f"ssm: Value '{given['Value']}' failed")

    with pytest.raises(ResourceError) as caught:
        secrets.Parameters("/p", refuse).put({"TOKEN": "hf_abc"})
    assert str(caught.value) == "--secret: TOKEN could not be stored (ValidationException)"
    assert caught.value.__suppress_context__, "a traceback would show the first one"


def test_a_deleted_value_is_one_line(aws: Any) -> None:
    with pytest.raises(UsageError, match=r"^--secret: the run's value of A, B is deleted; give the same command again"):
        secrets.read(["A", "B"], RUN)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["TOKEN=hf_typed"], "export TOKEN, and give --secret TOKEN"),
        (["hf_typed-1"], "give NAME or NAME=ARN"),
        (["TOKEN", f"TOKEN={ARN}"], "'TOKEN' is given twice"),
        (["PATH"], "PATH is a variable of the runner"),
        (["RAY_AUTH_TOKEN"], "RAY_AUTH_TOKEN is a variable of the runner"),
    ],
    ids=["a value", "no name", "twice", "path", "ray"],
)
def test_a_flag_that_can_not_be_used(given: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunConfig(secret=tuple(given))
    assert str(caught.value).startswith("--secret: ")
    assert said in str(caught.value)
    assert "hf_typed" not in str(caught.value), "it may be the value"


def test_the_variables_of_the_runner_are_no_secrets(tmp_path: Path) -> None:
    of_torchrun = start_of(tmp_path).torchrun_variables()
    for name in (*of_torchrun, "RUN_DIR", "INPUT_DATA", "GIT_COMMIT", SECRETS_VARIABLE, SECRETS_KEY_VARIABLE):
        with pytest.raises(UsageError, match=f"{name} is a variable of the runner"):
            secrets.parse([name])


def test_a_secret_is_not_also_a_variable() -> None:
    with pytest.raises(UsageError, match="--secret: TOKEN is also given by --env"):
        RunConfig(env=("TOKEN=x",), secret=("TOKEN",))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "TOKEN is not set; export it"),
        ("", "TOKEN is not set"),
        ("abc", "fewer than 4 characters"),
        ("a\nb\n  c  \n", "fewer than 4 characters"),
        ("x" * 4097, "put it into AWS Secrets Manager"),
    ],
    ids=["unset", "empty", "short", "short lines", "long"],
)
def test_a_value_that_can_not_be_used(monkeypatch: pytest.MonkeyPatch, value: str | None, said: str) -> None:
    monkeypatch.delenv("TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("TOKEN", value)
    with pytest.raises(TrainingError, match=said) as caught:
        secrets.take_from_environment(["TOKEN"])
    assert caught.value.exit_status == 2


def test_a_value_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "value")
    assert secrets.take_from_environment(["TOKEN", f"OTHER={ARN}"]) == {"TOKEN": "value"}
    with pytest.raises(UsageError):  # Ray's processes would inherit it
        secrets.take_from_environment(["TOKEN"])


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("token=hf_abc.", "token=***."),
        ("hf_abcdef and hf_abc", "*** and ***"),
        ("-----BEGIN KEY-----", "***"),
        ("ab/c+d== then xy", "*** then xy"),
        (r"'-----BEGIN KEY-----\nab/c+d==\nxy'", r"'***\n***\nxy'"),
        ("https://user:ab%2Fc%2Bd%3D%3D@host/", "https://user:***@host/"),
        (r'{"password": "q\"uote"}', '{"password": "***"}'),
        ("auth aGZfYWJjZGVm", "auth ***"),
        ("key cSJ1b3Rl.", "key ***."),
        ("all LS0tLS1CRUdJTiBLRVktLS0tLQphYi9jK2Q9PQp4eQo=", "all ***="),
        ("nothing", "nothing"),
    ],
)
def test_values_are_hidden_line_by_line(line: str, shown: str) -> None:
    mask = secrets.Masker(["hf_abc", "hf_abcdef", "-----BEGIN KEY-----\nab/c+d==\nxy\n", 'q"uote'])
    assert mask(line) == shown


@pytest.mark.parametrize("value", ["hf_abc/x y?>~", "ab" * 49, "a?>~" * 61, "ä/ö ü" * 20, "x" * 4096])
@pytest.mark.parametrize(
    "encode",
    [
        quote,
        quote_plus,
        lambda value: quote(value, safe=""),
        lambda value: base64.b64encode(value.encode()).decode(),
        lambda value: base64.b64encode(f"{value}\n".encode()).decode(),
        lambda value: base64.urlsafe_b64encode(value.encode()).decode(),
        lambda value: base64.urlsafe_b64encode(f"{value}\n".encode()).decode(),
        lambda value: base64.encodebytes(value.encode()).decode(),
        lambda value: base64.encodebytes(f"{value}\n".encode()).decode(),
        lambda value: "\n".join(wrap(base64.b64encode(value.encode()).decode(), 64)),
    ],
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_encoded_values_are_hidden(value: str, encode: Callable[[str], str], end: str) -> None:
    shown = secrets.Masker([value + end])(f"<{encode(value)}>")
    assert re.fullmatch(r"<(\*{3}|=|\n|\b\w{1,3}\b)*>", shown)


def test_without_secrets_nothing_is_hidden() -> None:
    assert secrets.Masker([])("any line") == "any line"
