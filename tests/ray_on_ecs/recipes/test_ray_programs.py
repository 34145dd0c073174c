"""Options, workers and weights of a program on Ray Train."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem

from ray_on_ecs.recipes import ray_programs
from ray_on_ecs.recipes.options import Options

DEFAULTS: dict[str, Any] = {"num_workers": None, "use_gpu": None}


@pytest.fixture
def buckets(s3: Any) -> None:
    for name in ("stack-storage-bucket-1a2b3c", "runs"):
        s3.create_bucket(Bucket=name)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("stack-storage-bucket-1a2b3c", "s3://stack-storage-bucket-1a2b3c"),
        ("s3://runs", "s3://runs"),
        ("s3://runs/of/me/", "s3://runs/of/me"),
        ("./results", "{here}/results"),
        ("/results", "/results"),
        ("file:///results", "file:///results"),
        ("existing", "{here}/existing"),
    ],
)
@pytest.mark.usefixtures("buckets")
def test_a_bucket_or_folder_becomes_a_storage_path(
    given: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "existing").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ray_programs.storage_path(given) == path.format(here=tmp_path)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("Results", "'Results' is neither a bucket nor a folder; write a folder as ./Results"),
        ("runs/of/me", "'runs/of/me': write s3://runs/of/me or ./runs/of/me"),
        ("missing-bucket", "s3://missing-bucket: this bucket does not exist"),
        ("gopher://runs", "gopher://runs: Unrecognized filesystem type"),
    ],
)
@pytest.mark.usefixtures("buckets")
def test_other_storage_is_refused(given: str, line: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        ray_programs.storage_path(given)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("cluster", "stack", "given", "chosen"),
    [
        ({"GPU": 4.0, "CPU": 8.0}, "", {}, (4, True)),
        ({"CPU": 8.0}, "", {}, (2, False)),
        ({"CPU": 8.0}, "", {"on_cpus": 1}, (1, False)),
        ({"CPU": 1.0}, "", {}, (1, False)),
        ({}, "0", {}, (2, False)),  # a stack without GPUs whose instances have not started
        ({}, "0", {"num_workers": 3}, (3, False)),
        ({"GPU": 4.0, "CPU": 8.0}, "0", {}, (2, False)),  # --device cpu
        ({"GPU": 4.0, "CPU": 8.0}, "0", {"use_gpu": True, "num_workers": 3}, (3, True)),
        ({"CPU": 1.0}, "0", {}, (1, False)),
        ({}, "8", {}, (8, True)),  # a stack whose instances have not started
        ({"GPU": 4.0, "CPU": 16.0}, "8", {}, (8, True)),
        ({}, "8", {"num_workers": 2}, (2, True)),
        ({"GPU": 4.0, "CPU": 8.0}, "", {"use_gpu": False, "num_workers": 3}, (3, False)),
        ({}, "", {"use_gpu": True, "num_workers": 3}, (3, True)),
    ],
)
def test_workers_follow_the_gpus(
    cluster: dict[str, float],
    stack: str,
    given: dict[str, Any],
    chosen: tuple[int, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_programs.sys, "platform", "linux")
    monkeypatch.setenv("STACK_GPUS", stack)
    workers = ray_programs.choose_workers(cluster, **DEFAULTS | given)
    assert (workers["num_workers"], workers["use_gpu"]) == chosen


def test_gpu_of_apple_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_programs.sys, "platform", "darwin")
    workers = ray_programs.choose_workers({"GPU": 1.0, "CPU": 8.0}, None, None)
    assert workers == {"num_workers": 2, "use_gpu": False}


def test_folder_is_absolute_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUN_URI", raising=False)
    given = ("data", "digits", "s3://bucket/data")
    assert [*map(ray_programs.for_workers, given)] == [str(tmp_path / "data"), *given[1:]]
    monkeypatch.setenv("RUN_URI", "s3://bucket/runs/first")
    assert ray_programs.for_workers("data") == "data"


@pytest.mark.parametrize("given", [{}, {"use_gpu": True}])
def test_cluster_without_workers_may_get_some(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        ray_programs.choose_workers({}, **DEFAULTS | given)
    assert end.value.code == 1, "the runner starts the program again"
    assert "--num-workers N waits for them" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "a b"])
def test_name_is_that_of_a_folder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ray_programs.add_options(Options("")).parse_args([f"--name={name}"])
    assert "argument --name: " in capsys.readouterr().err


@pytest.mark.parametrize("is_run", [True, False])
def test_weights_are_exported_into_the_folder(is_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("run", "ray", "ray/checkpoint"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ray" / "checkpoint" / "model.safetensors").write_bytes(b"weights")
    disk = LocalFileSystem()
    checkpoint = SimpleNamespace(path=f"{tmp_path}/ray/checkpoint", filesystem=disk)
    if is_run:
        monkeypatch.setenv("RUN_URI", f"{tmp_path}/run")
    else:
        monkeypatch.delenv("RUN_URI", raising=False)
    ray_programs.export(SimpleNamespace(path=f"{tmp_path}/ray", filesystem=disk), checkpoint, "best.safetensors")
    assert (tmp_path / ("run" if is_run else "ray") / "best.safetensors").read_bytes() == b"weights"
