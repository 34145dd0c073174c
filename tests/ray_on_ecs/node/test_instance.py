"""A worker's node is labelled with the kind of its instance, and joins without labels where that is not known."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray._private.label_utils import parse_node_labels_string

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE
from ray_on_ecs.node import labels, worker
from tests.lazy import Lazy

COMMAND_NAME = "ray-worker"

ray_cluster = Lazy("ray_on_ecs.run.ray_cluster")
SPOT = {"instance_type": "g5.xlarge", "zone": "us-west-2a", "market": "spot"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(SPOT))
    monkeypatch.setenv(INSTANCE_FILE_VARIABLE, str(path))
    return path


def as_ray_reads_them() -> dict[str, str]:
    """The labels of a node that is started with our flags."""
    [flag] = labels.flags()
    name, _, value = flag.partition("=")
    assert name == "--labels"
    return parse_node_labels_string(value)


@pytest.mark.usefixtures("file")
def test_labels_are_type_zone_and_market() -> None:
    assert as_ray_reads_them() == {
        "code": labels.fingerprint(),
        "instance-type": "g5.xlarge",
        "ray.io/availability-zone": "us-west-2a",
        "ray.io/market-type": "spot",
    }


@pytest.mark.usefixtures("file")
def test_runs_read_the_labels_of_workers() -> None:
    assert ray_cluster.instance_kind(as_ray_reads_them()) == ("g5.xlarge", "spot", "workers"), (
        "or the run's cost would be another one's"
    )


@pytest.mark.usefixtures("file")
def test_ray_starts_with_the_labels(monkeypatch: pytest.MonkeyPatch, ray_arguments: list[str]) -> None:
    monkeypatch.setenv("RAY_HEAD_HOST", "127.0.0.1")
    monkeypatch.setenv(worker.RECONNECT, worker.RECONNECT_SECONDS)  # so that what the code sets is taken back
    monkeypatch.setattr("sys.argv", ["ray-worker", "--num-cpus=4"])
    monkeypatch.setattr(worker, "join_blocker", lambda host: None)
    monkeypatch.setattr(worker.notice, "start", lambda *_: None)  # its thread would go on after the test
    assert worker.start() == 0
    assert ray_arguments[2:] == [*labels.flags(), "--num-cpus=4"]


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ({"launched": "2026-01-01T00:00:00Z", "booted": "1767225630"}, {"launched": "1767225600.000"}),
        ({"launched": "", "booted": "1767225630"}, {}),
        ({"launched": "<html>", "booted": None}, {"booted": None}),
    ],
    ids=["both", "no launch", "neither"],
)
def test_labels_have_the_times_that_are_known(
    file: Path, capsys: pytest.CaptureFixture[str], times: dict[str, Any], found: dict[str, Any]
) -> None:
    file.write_text(json.dumps({**SPOT, **times}))
    expected = {name: value for name, value in {"booted": "1767225630.000", **found}.items() if value}
    kind = {"instance-type": "g5.xlarge", "ray.io/availability-zone": "us-west-2a", "ray.io/market-type": "spot"}
    assert as_ray_reads_them() == {"code": labels.fingerprint(), **kind, **expected}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '{"instance_type": "g5.xlarge"}',
    ],
)
def test_broken_instance_file_costs_one_line(text: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert labels.of_instance() == {}
    line = capsys.readouterr().err
    assert line.startswith(f"ray-worker: INSTANCE_FILE: {file} ")
    assert line.count("\n") == 1


def test_missing_instance_file_costs_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.unlink()
    assert labels.of_instance() == {}
    file.mkdir()  # what a container's engine mounts where there is no file
    assert labels.of_instance() == {}
    assert capsys.readouterr().err.count("this node gets no instance labels\n") == 2


def test_without_a_file_nothing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(INSTANCE_FILE_VARIABLE, raising=False)
    assert labels.of_instance() == {}
    assert capsys.readouterr().err == ""
