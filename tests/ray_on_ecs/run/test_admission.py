"""Commands of a run before anything starts: refused in one line."""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli.main import main as command
from ray_on_ecs.command import RAY_SETTINGS
from ray_on_ecs.config import JOB_VARIABLE, LOCAL_VARIABLE, RunConfig
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.errors import Interrupted, ResourceError, UsageError
from ray_on_ecs.run import admission, document
from ray_on_ecs.run.code import archive
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.storage.run_storage import RunStorage


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The storage path; the current folder has a script."""
    for name, value in {**RAY_SETTINGS, "RAY_ON_ECS_STORAGE_PATH": str(tmp_path / "runs")}.items():
        monkeypatch.setenv(name, value)  # restored after the test
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").touch()
    monkeypatch.chdir(code)
    return tmp_path / "runs"


def submit(storage: Path, name: str = "mine", **settings: Any) -> RunStorage:
    """Write the document of a run with these settings; return its folder."""
    folder = RunStorage.open(str(storage), name)
    config = RunConfig(command=("train.py",), run_name=name, **settings)
    document.write(folder, config, settings, Code(name="code", archive="a.tar.gz"), {})
    return folder


def in_stack(monkeypatch: pytest.MonkeyPatch, *infos: Any) -> None:
    """Let the driver be in a stack, whose description is each of these in turn."""
    answers = itertools.chain(infos, itertools.repeat(infos[-1]))
    monkeypatch.setattr(admission, "read_cluster_info", lambda: next(answers))
    monkeypatch.setattr(admission, "INFO_POLL_SECONDS", 0.0)
    monkeypatch.setattr(admission, "INFO_SECONDS", 0.0 if len(infos) == 1 else 300.0)
    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, "/ray/cluster-info")


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line of the output, which is an error."""
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("ray-on-ecs: ")


@pytest.fixture
def large(storage: Path) -> Path:
    """The current folder, with files of 2 GiB, one of which is ignored."""
    folder = Path.cwd() / "data"
    folder.mkdir()
    Path(".gitignore").write_text("*.bin\n")
    for name, size in {"large.tar": 2**31, "ignored.bin": 2**31, "small.txt": 10}.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    return folder.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "SCRIPT: there is no file 'nowhere.py' in "),
        (["--working-dir", "nowhere", "x.py"], "--working-dir: 'nowhere' is not a folder"),
        (["--requirements", "nowhere.txt", "train.py"], "--requirements: 'nowhere.txt' can't be read"),
        (["--input", "data=nowhere", "train.py"], "--input: data=nowhere can't be read"),
    ],
    ids=["script", "working dir", "requirements", "input"],
)
def test_wrong_path_is_one_line_before_the_start(
    storage: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["run", "--local", *arguments]) == 2
    assert error_line(capsys).startswith(message)
    assert not [path for path in storage.glob("*") if path.name != ".code"]


def test_finished_run_is_refused(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (storage / "first").mkdir(parents=True)
    (storage / "first" / "result.json").write_text("{}")
    assert command(["run", "--local", "--run-name", "first", "train.py"]) == 2
    assert error_line(capsys).startswith("--run-name: run 'first' is finished, results in ")


def test_too_much_code_is_linked_on_this_machine(large: Path, storage: Path) -> None:
    said: list[str] = []
    config = RunConfig(command=("train.py",))
    stored = archive.store(config, RunStorage.open(str(storage), "mine"), said.append, is_here=True)
    assert (stored.copies, stored.links) == ({}, {"data/large.tar": str(large / "data" / "large.tar")})
    assert said[1:] == ["data/large.tar (2.0 GiB) is linked, not copied: a script that writes it changes your file"]


def test_too_much_code_is_one_line(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ON_ECS_CLUSTER", "head")
    assert command(["run", "--num-workers", "1", "train.py"]) == 2
    out, err = capsys.readouterr()
    line = f"ray-on-ecs: --working-dir: {large} has 2.0 GiB, and code is at most 1.0 GiB; the largest are data/ "
    assert out == ""
    assert err.splitlines()[-1].startswith(line)


def test_interrupted_run_without_files_starts_anew(storage: Path) -> None:
    with pytest.raises(Interrupted) as caught, admission.admit(submit(storage, "cut").uri):
        raise KeyboardInterrupt
    again = "the same command with --run-name cut starts from the beginning"
    assert str(caught.value) == f"stopped; nothing is stored yet, so {again}"


@pytest.mark.parametrize(("resubmissions", "is_refused"), [(None, True), ("0", True), ("1", False), ("3", False)])
@pytest.mark.parametrize("info", ["none", "no prices"])
def test_run_that_the_head_submits_again_needs_no_price(
    storage: Path, monkeypatch: pytest.MonkeyPatch, resubmissions: str | None, is_refused: bool, info: str
) -> None:
    monkeypatch.setattr(admission, "read_cluster_info", lambda: None if info == "none" else stack_with())
    monkeypatch.setattr(admission, "INFO_SECONDS", 0.0)
    metadata = {"resubmissions": resubmissions} if resubmissions else {}
    monkeypatch.setenv(JOB_VARIABLE, json.dumps({"metadata": metadata}))
    uri = submit(storage, driver=True, max_usd=5.0).uri
    with pytest.raises(UsageError) if is_refused else nullcontext(), admission.admit(uri):
        pass


def stack_with(**changed: Any) -> Any:
    """A stack with two pools, the first of which a test changes."""
    group = {"zones": ["us-west-2a"], "types": ["g5.xlarge"], "gpu": "A10G", "units": 1, "max": 4, "default_nodes": 2}
    h100 = {**group, "pool": "h100", "gpu": "H100", "units": 8}
    groups = {"workers": {**group, "pool": "default", **changed}}
    return {"groups": groups if changed.get("gpu") == "" else {**groups, "h100-workers": h100}, "prices": None}


@pytest.mark.parametrize(
    ("given", "info", "line"),
    [
        ({"gpu": "L4"}, stack_with(), "--gpu: 'L4' is not a GPU of this stack"),
        ({"pool": "a100"}, stack_with(), "--pool: 'a100' is not a pool of this stack"),
        ({"num_workers": 33}, stack_with(), "--num-workers: 33 are more than a pool of the stack can hold"),
        (
            {"require_efa": True},
            stack_with(efa=4, units=8, default_nodes=1),
            "--require-efa: one node of pool default holds 8 workers",
        ),
        ({"gpu": "H100"}, None, "--gpu: the stack's pools can't be read (/ray/cluster-info)"),
    ],
)
def test_run_without_its_pool_is_refused_at_admission(
    storage: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], info: Any, line: str
) -> None:
    in_stack(monkeypatch, info)
    folder = submit(storage, **given)
    with pytest.raises((UsageError, ResourceError)) as refused, admission.admit(folder.uri):
        pass
    assert str(refused.value).startswith(line)
    status = folder.read_json("status.json") or {}
    assert (status["state"], status["error"]) == ("failed", str(refused.value))


def test_pools_need_a_stack(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE, raising=False)
    uri = submit(storage, pool="h100").uri
    with pytest.raises(UsageError, match="--pool: this cluster has no pools"), admission.admit(uri):
        pass


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--gpu", "H100"], "--gpu: this machine has no pools; leave it out"),
        (["--pool", "h100"], "--pool: this machine has no pools; leave it out"),
        (["--require-efa"], "--require-efa: this machine has no pools with EFA; leave it out"),
        (["--gpu", "H100", "--pool", "h100"], "--pool: can't be given with --gpu"),
        (["--gpu", "H100", "--device", "cpu"], "--gpu: can't be given with --device cpu"),
        (["--gpu", "H100,"], "--gpu: 'H100,' has an empty name"),
        (["--gpu", ""], "--gpu: '' has an empty name"),
        (["--pool", " "], "--pool: ' ' has an empty name"),
        (["--driver", "--gpu", "H100"], "--gpu: leave it out; a Ray program chooses its nodes itself, by accelerator_"),
        (
            ["--driver", "--pool", "a"],
            "--pool: leave it out; a Ray program chooses its nodes itself, by a label select",
        ),
    ],
)
def test_pools_that_cannot_be_meant_are_refused(
    storage: Path, flags: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["run", "--local", *flags, "train.py"]) == 2
    assert error_line(capsys).startswith(line)


def test_document_has_pool_and_network_beside_the_command(storage: Path) -> None:
    folder = RunStorage.open(str(storage), "mine")
    config = RunConfig(command=("train.py",), run_name="mine", gpu="H100")
    digest = document.write(folder, config, ("gpu",), Code(name="code", archive="a.tar.gz"), {})
    first = document.RunDocument.read(folder.uri, {}, digest)
    assert first.config.gpu_names == ("H100",)
    first.note(pool={"name": "h100", "zone": "us-west-2c"})
    first.note(network={"transport": "EFA"})
    kept = {"pool": {"name": "h100", "zone": "us-west-2c"}, "network": {"transport": "EFA"}}
    assert folder.read_json("run.json") == {**first.content, **kept}
    again = document.RunDocument.read(folder.uri, {}, digest)
    assert again.content == first.content, "a driver that is started again has the same document"
    again.note(pool={"name": "a100", "zone": "us-west-2a"})
    assert folder.read_json("run.json")["pool"]["name"] == "a100"


@pytest.mark.parametrize(
    ("given", "info", "workers"),
    [
        ({}, stack_with(default_nodes=2), 2),
        ({}, stack_with(gpu=""), None),  # a stack without GPUs
        ({}, None, None),  # one whose description can't be read
        ({"num_workers": "1:4"}, stack_with(), "1:4"),
        ({"driver": True}, stack_with(), None),
        ({"device": "cpu"}, stack_with(), None),
        ({"gpu": "A10G"}, stack_with(), 2),
        ({"pool": "h100"}, stack_with(), 16),
        ({"gpu": "H100,A10G"}, stack_with(), 2),
    ],
)
def test_run_without_a_number_of_workers_has_the_stacks(
    storage: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], info: Any, workers: Any
) -> None:
    in_stack(monkeypatch, info)
    monkeypatch.delenv(LOCAL_VARIABLE, raising=False)
    with admission.admit(submit(storage, "default", **given).uri) as admitted:
        assert admitted.document.config.num_workers == workers


def test_every_run_of_a_stack_waits_for_its_pools(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_stack(monkeypatch, None, None, stack_with())
    with admission.admit(submit(storage, device="cpu").uri) as admitted:
        assert admitted.kinds == ["workers"]
        assert admitted.info == stack_with()


@pytest.mark.parametrize(
    ("name", "value", "flags"), [("GPU", "H100", []), ("POOL", "h100", []), ("GPU", "H100", ["--device", "cpu"])]
)
def test_pools_of_the_environment_do_not_hold_on_this_machine(
    storage: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, flags: list[str]
) -> None:
    monkeypatch.setenv(f"RAY_ON_ECS_{name}", value)
    Path("train.py").write_text("print('trained')")
    monkeypatch.delenv("RAY_ADDRESS")
    assert command(["run", "--local", "--num-workers", "1", *flags, "train.py"]) == 0
