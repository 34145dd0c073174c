"""The document of a run: written by a command, read by its driver, and refused in one line if it is not one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.config import SETTINGS, RunConfig
from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import document
from ray_on_ecs.run.__main__ import main
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.document import RunDocument
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage

CODE = Code(
    name="work",
    archive="/runs/.code/a.tar.gz",
    links={"data/x.bin": "/work/data/x.bin"},
    left_out=["a.log"],
    git={"GIT_COMMIT": "abc"},
)
# A value of each setting that is not its default.
OTHER: dict[str, Any] = {
    "command": ("train.py", "--lr", "0.1"),
    "num_workers": "1:4",
    "device": "cpu",
    "worker_timeout": 5.0,
    "include": ("*.bin",),
    "exclude": ("*.npy", "x/"),
    "keep_gib": 2.5,
    "requirements": "pip.txt",
    "env": ("A=1", "B="),
    "secret": ("TOKEN",),
    "input": ("data=/data",),
    "metric": ("loss=loss: {number}",),
    "max_restarts": 0,
    "hang_timeout": 60.0,
    "cloudwatch_namespace": "ray",
    "module": True,
}


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path / "runs"), "mine")


def written(storage: RunStorage, **settings: Any) -> RunConfig:
    config = RunConfig(run_name="mine", **settings)
    document.write(storage, config, (), CODE, document.read_earlier(storage))
    return config


def test_settings_and_code_are_read_as_written(storage: RunStorage) -> None:
    config = written(storage, **OTHER)
    found = RunDocument.read(storage.uri, {})
    assert found.config == replace(config, storage_path=storage.base)
    assert found.code == CODE
    assert found.storage.uri == storage.uri


def test_every_setting_is_written(storage: RunStorage) -> None:
    switches = ("no_python", "mpi", "driver", "no_driver")
    apart = {"run_name", "storage_path", "working_dir", "nnodes", "nproc_per_node", *switches}
    assert {spec.name for spec in SETTINGS} - apart <= OTHER.keys()
    for name in switches:
        written(storage, command=("a.py",), **{name: True})
        assert getattr(RunDocument.read(storage.uri, {}).config, name) is True
    written(storage, command=("a.py",), nnodes="1:2", nproc_per_node="4")
    assert RunDocument.read(storage.uri, {}).config.workers == (4, 8)


def test_cluster_has_defaults_of_settings_that_are_not_given(storage: RunStorage) -> None:
    defaults = {"WORKER_TIMEOUT": "1800", "CLOUDWATCH_NAMESPACE": "ray", "RUN_NAME": "x"}
    environment = {f"RAY_ON_ECS_{name}": value for name, value in defaults.items()}
    written(storage, command=("a.py",))
    found = RunDocument.read(storage.uri, environment).config
    assert (found.worker_timeout, found.cloudwatch_namespace, found.run_name) == (1800.0, "ray", "mine")
    written(storage, command=("a.py",), worker_timeout=5.0, cloudwatch_namespace="own")
    found = RunDocument.read(storage.uri, environment).config
    assert (found.worker_timeout, found.cloudwatch_namespace) == (5.0, "own")
    config = RunConfig(command=("a.py",), run_name="mine")
    document.write(storage, config, {"worker_timeout"}, CODE, {})
    assert RunDocument.read(storage.uri, environment).config.worker_timeout == config.worker_timeout


def test_resumed_run_keeps_its_id(storage: RunStorage) -> None:
    ids = []
    for is_deleted in (False, False, True):
        if is_deleted:
            storage.delete(layout.SETTINGS)
        written(storage, command=("a.py",))
        ids.append(RunDocument.read(storage.uri, {}).id)
    first, resumed, new = ids
    assert first == resumed != new


def test_folder_of_the_nodes_gets_the_document(storage: RunStorage, tmp_path: Path) -> None:
    shared = tmp_path / "efs"
    written(storage, command=("a.py",), storage_path=str(shared))
    found = RunDocument.read(storage.uri, {})
    assert found.storage.uri == f"{shared}/mine"
    assert RunDocument.read(found.storage.uri, {}) == found


def changed(**parts: Any) -> str:
    """A good document with other parts; None leaves one out."""
    good = {"format": 1, "id": "a", "settings": {"command": ["a.py"]}, "code": {"name": "x", "archive": "/a.tar.gz"}}
    return json.dumps({name: value for name, value in {**good, **parts}.items() if value is not None})


def settings(**values: Any) -> str:
    return changed(settings={"command": ["a.py"], **values})


def code(**values: Any) -> str:
    return changed(code={"name": "x", "archive": "/a.tar.gz", **values})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is broken"),
        ("{", "is broken"),
        ("[]", "is broken"),
        ("null", "is broken"),
        (changed(format=2), "was written by another version"),
        (changed(format=None), "was written by another version"),
        (changed(id=None), "is broken"),
        (changed(settings=None), "is broken"),
        (changed(settings=[]), "is broken"),
        (changed(settings="x"), "is broken"),
        (settings(colour="red"), "'colour' is not a setting of this version"),
        (settings(command="a.py"), "command is 'a.py'"),
        (settings(command=["a.py", 1]), "command is"),
        (settings(env={"A": "1"}), "env is"),
        (settings(module="yes"), "module is 'yes'"),
        (settings(max_restarts="3"), "max_restarts is '3'"),
        (settings(max_restarts=True), "max_restarts is True"),
        (settings(max_restarts=-1), "--max-restarts: -1 is not allowed"),
        (settings(worker_timeout="soon"), "worker_timeout is 'soon'"),
        (settings(worker_timeout=None), "worker_timeout is None"),
        (settings(num_workers=[2]), r"num_workers is \[2\]"),
        (settings(num_workers="2:1"), "--num-workers: '2:1' is not allowed"),
        (settings(requirements=5), "requirements is 5"),
        (settings(storage_path="s3://A:B@c"), "--storage-path: "),
        (changed(code=None), "is broken"),
        (changed(code="/a.tar.gz"), "is broken"),
        (code(name="../x"), "is broken"),
        (code(name="a/b"), "is broken"),
        (code(name=""), "is broken"),
        (code(name=5), "is broken"),
        (code(archive="/etc/passwd"), "is broken"),
        (code(links={"../../x": "/etc/passwd"}), "is broken"),
        (code(links={"/x": "/etc/passwd"}), "is broken"),
        (code(links={"x": 5}), "is broken"),
        (code(git={"GIT_COMMIT": 5}), "is broken"),
        (code(git=["a"]), "is broken"),
        (code(links=["a"]), "is broken"),
        (code(left_out="ab"), "is broken"),
        (code(left_out={"a": 1}), "is broken"),
        (code(more=1), "is broken"),
    ],
)
def test_document_of_another_form_is_one_line(storage: RunStorage, content: str, reason: str) -> None:
    storage.write(layout.SETTINGS, content)
    with pytest.raises(UsageError, match=reason) as caught:
        RunDocument.read(storage.uri, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [changed(format=2), changed(settings=[1]), changed(settings=None), "[]", "{"])
def test_earlier_document_of_another_form_is_refused(storage: RunStorage, content: str) -> None:
    assert document.read_earlier(storage) == {}
    storage.write(layout.SETTINGS, content)
    with pytest.raises(UsageError, match="--run-name: "):
        document.read_earlier(storage)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "takes the folder of a run; ray-on-ecs run starts one"),
        (["a", "b"], "takes the folder of a run; ray-on-ecs run starts one"),
        (["--run-name", "mine", "train.py"], "takes the folder of a run"),
        (["train.py"], "'train.py' is not the folder of a run"),
        (["/"], "'/' is not the folder of a run"),
        (["/runs/.."], "is not the folder of a run"),
        (["/runs/a b"], "is not the folder of a run"),
        (["s3://bucket"], "is not the folder of a run"),
        (["/nowhere/mine"], "there is not a run at /nowhere/mine; ray-on-ecs run starts one"),
    ],
)
def test_wrong_address_is_one_line(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert line in err
