"""The document of a run: written by a command, read by its driver, and refused in one line if it is not one."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.config import SETTINGS, RunConfig
from ray_on_ecs.errors import StorageError, UsageError
from ray_on_ecs.run import document
from ray_on_ecs.run.__main__ import main
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.document import RunDocument
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage

CODE = Code(
    name="work",
    archive="/runs/.code/a.tar.gz",
    copies={"data/x.bin": "/work/data/x.bin"},
    links={"data/y.bin": "/work/data/y.bin"},
    left_out=["a.log"],
    git={"GIT_COMMIT": "abc"},
)
# A value of each setting that is not its default.
OTHER: dict[str, Any] = {
    "command": ("train.py", "--lr", "0.1"),
    "num_workers": "1:4",
    "device": "cpu",
    "network_check": "off",
    "pool": "h100,cpu",
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
    "max_hours": 2.5,
    "max_usd": 40.0,
    "hang_timeout": 60.0,
    "resume_args": "--resume last.ckpt",
    "cloudwatch_namespace": "ray",
    "module": True,
}


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path / "runs"), "mine")


def written(storage: RunStorage, **settings: Any) -> RunConfig:
    config = RunConfig(run_name="mine", **settings)
    has_earlier = Path(storage.path(layout.SETTINGS)).is_file()
    document.write(storage, config, (), CODE, document.read_earlier(storage) if has_earlier else {})
    return config


def test_settings_and_code_are_read_as_written(storage: RunStorage) -> None:
    config = written(storage, **OTHER)
    run = RunDocument.read(storage.uri, {})
    assert run.config == replace(config, storage_path=storage.base)
    assert run.code == CODE
    assert run.storage.uri == storage.uri


def test_every_setting_is_written(storage: RunStorage) -> None:
    switches = ("no_python", "mpi", "per_node", "driver", "no_driver", "then_stop", "require_efa")
    apart = {"run_name", "storage_path", "working_dir", "gpu", *switches}
    assert {spec.name for spec in SETTINGS} - apart <= OTHER.keys()
    for name in switches:
        written(storage, command=("a.py",), **{name: True})
        assert getattr(RunDocument.read(storage.uri, {}).config, name) is True
    written(storage, command=("a.py",), gpu="H100,A100")  # which can't be given with a pool
    assert RunDocument.read(storage.uri, {}).config.gpu_names == ("H100", "A100")


def test_cluster_has_defaults_of_settings_that_are_not_given(storage: RunStorage) -> None:
    defaults = {"WORKER_TIMEOUT": "1800", "CLOUDWATCH_NAMESPACE": "ray", "RUN_NAME": "x"}
    environment = {f"RAY_ON_ECS_{name}": value for name, value in defaults.items()}
    written(storage, command=("a.py",))
    run = RunDocument.read(storage.uri, environment).config
    assert (run.worker_timeout, run.cloudwatch_namespace, run.run_name) == (1800.0, "ray", "mine")
    written(storage, command=("a.py",), worker_timeout=5.0, cloudwatch_namespace="own")
    run = RunDocument.read(storage.uri, environment).config
    assert (run.worker_timeout, run.cloudwatch_namespace) == (5.0, "own")
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
    run = RunDocument.read(storage.uri, {})
    assert run.storage.uri == f"{shared}/mine"
    assert not shared.exists(), "the run's lock comes first"
    run.keep()
    assert RunDocument.read(run.storage.uri, {}).content == run.content
    [file] = shared.rglob("*.json")
    written_at = file.stat().st_mtime_ns
    run.keep()
    assert file.stat().st_mtime_ns == written_at


def test_document_of_another_command_is_refused(storage: RunStorage) -> None:
    config = RunConfig(command=("a.py", "--lr", "0.1"), run_name="mine", keep_gib=0.1)
    first = document.write(storage, config, (), CODE, {})
    assert RunDocument.read(storage.uri, {}, first).config.command == config.command
    document.write(storage, replace(config, command=("b.py",)), (), CODE, {})
    with pytest.raises(UsageError, match=r"another command has written .*/run\.json, too; start the run again"):
        RunDocument.read(storage.uri, {}, first)


def test_setting_that_the_environment_gave_may_be_ignored(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ON_ECS_NUM_WORKERS", "4")
    config = RunConfig(command=("tune.py",), run_name="mine", driver=True, num_workers=4)
    document.write(storage, config, {"num_workers"}, CODE, {})
    assert RunDocument.read(storage.uri, {}).config.workers is None


def test_unreadable_storage_is_one_line(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(storage.path(layout.SETTINGS)).mkdir(parents=True)
    with pytest.raises(StorageError, match="can't be read"):
        RunDocument.read(storage.uri, {})
    with pytest.raises(StorageError, match="can't be written"):
        written(storage, command=("a.py",))


GOOD_CODE = {"name": "x", "archive": "/a.tar.gz", "copies": {}, "links": {}, "left_out": [], "git": {}}


def changed(**parts: Any) -> str:
    """A good document with other parts; None leaves one out."""
    good = {"format": 1, "id": "a", "settings": {"command": ["a.py"]}, "code": GOOD_CODE}
    return json.dumps({name: value for name, value in {**good, **parts}.items() if value is not None})


def settings(**values: Any) -> str:
    return changed(settings={"command": ["a.py"], **values})


def code(**values: Any) -> str:
    return changed(code={**GOOD_CODE, **values})


@pytest.mark.parametrize("content", [changed(), settings(env=["A=1"], max_restarts=0), code(links={"x": "/x"})])
def test_document_in_this_form_is_accepted(storage: RunStorage, content: str) -> None:
    storage.write(layout.SETTINGS, content)
    assert RunDocument.read(storage.uri, {}).config.command == ("a.py",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "(is broken|can't be used)"),
        ("{", "(is broken|can't be used)"),
        ("[]", "(is broken|can't be used)"),
        ("null", "(is broken|can't be used)"),
        (changed(format=2), "was written by another version"),
        (changed(format=None), "was written by another version"),
        (changed(id=None), "(is broken|can't be used)"),
        (changed(settings=None), "(is broken|can't be used)"),
        (changed(settings=[]), "(is broken|can't be used)"),
        (changed(settings="x"), "(is broken|can't be used)"),
        (settings(colour="red"), "unexpected keyword argument 'colour'"),
        (settings(max_restarts=10**15), "--max-restarts: 1000000000000000 is not allowed"),
        (settings(max_restarts="3"), "can't be used"),
        (settings(max_restarts=-1), "--max-restarts: -1 is not allowed"),
        (settings(worker_timeout="soon"), "can't be used"),
        (settings(num_workers="2:1"), "--num-workers: '2:1' is not allowed"),
        (settings(storage_path="s3://A:B@c"), "--storage-path: "),
        (changed(code=None), "(is broken|can't be used)"),
        (changed(code="/a.tar.gz"), "(is broken|can't be used)"),
        (code(more=1), "(is broken|can't be used)"),
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
def test_wrong_address_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert line in err


def test_slow_write_does_not_replace_a_later_one(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    written(storage, command=("a.py",))
    run, write = RunDocument.read(storage.uri, {}), RunStorage.write_json
    is_slow, goes_on = threading.Event(), threading.Event()

    def wait_and_write(self: RunStorage, name: str, content: dict[str, Any]) -> None:
        if not is_slow.is_set():
            is_slow.set()
            goes_on.wait()
        write(self, name, content)

    monkeypatch.setattr(RunStorage, "write_json", wait_and_write)
    first = threading.Thread(target=lambda: run.note(pool={"name": "h100"}))
    second = threading.Thread(target=lambda: run.note(network={"transport": "EFA"}))
    first.start()
    is_slow.wait()
    second.start()
    second.join(0.2)  # without a lock it ends
    goes_on.set()
    first.join()
    second.join()
    kept = storage.read_json("run.json")
    assert kept
    assert (kept["pool"], kept["network"]) == ({"name": "h100"}, {"transport": "EFA"})
