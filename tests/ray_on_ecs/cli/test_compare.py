"""`ray-on-ecs compare`: the table and the picture of runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli import compare
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.clusters import LocalCluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.storage import layout
from tests.ray_on_ecs.cli.folders import Folders


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """A storage path with three runs, which log a loss, a val_loss and an lr."""
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    folders = Folders(str(tmp_path / "results"))
    folders.script("short", records=10)
    folders.script("long", command=["train.py", "--lr", "2"], env=["A=1"])
    folders.script("same")
    return folders


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn and not written, which takes half a second."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)


@pytest.fixture
def compared(unrendered: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(*names: str) -> dict[str, Any]:
        assert main(["compare", "--local", "--json", *names]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def draw(*names: str) -> Any:
    return compare.draw([compare.read(find_run(LocalCluster(), name)) for name in names])


def test_settings_that_differ(folders: Folders, compared: Callable[..., Any]) -> None:
    assert compared("short", "long")["settings"] == {
        "command": {"short": ["train.py", "--lr", "1"], "long": ["train.py", "--lr", "2"]},
        "env": {"short": [], "long": ["A=1"]},
    }
    assert compared("short", "same")["settings"] == {}


def test_code_differs_by_its_digest(folders: Folders, compared: Callable[..., Any]) -> None:
    for name, digits in {"short": "0123456789abcdef", "long": "0123456789abcdef", "same": "fedcba9876543210"}.items():
        folders.script(name, code=f"s3://bucket/runs/.code/{digits * 4}.tar.gz={name}")
    assert compared("short", "long")["settings"] == {}
    assert compared("short", "same")["settings"] == {"code": {"short": "0123456789ab", "same": "fedcba987654"}}


def test_outcomes_of_finished_runs(folders: Folders, compared: Callable[..., Any]) -> None:
    rows = compared("short", "long")["outcomes"]
    assert rows["state"] == {"short": "finished", "long": "finished"}
    assert rows["steps"] == {"short": 100, "long": 200}
    assert rows["duration"] == {"short": 14.5, "long": 14.5}
    assert rows["cost in USD"] == {"short": 0.5, "long": 0.5}
    assert rows["last loss"] == {"short": 1 / 10, "long": 1 / 20}
    assert list(rows)[4:] == ["last loss", "last val_loss", "last lr"]


def test_workers_instances_and_outcome_from_status(folders: Folders, compared: Callable[..., Any]) -> None:
    instances = [{"instance_type": "g5.xlarge", "market": "spot", "hours": 2.0, "hourly_usd": 0.5}]
    times = {"started": "2026-01-01T10:00:00.000+00:00", "updated": "2026-01-01T12:00:30.000+00:00"}
    folders.status("new", "training", workers=4, step=25, cost_usd=1.0, instances=instances, **times)
    result = compared("short", "new")
    assert result["settings"]["workers"] == {"short": 2, "new": 4}
    assert result["settings"]["instances"] == {"short": None, "new": "g5.xlarge spot"}
    rows = {row: values["new"] for row, values in result["outcomes"].items()}
    assert rows["state"] == "training"
    assert rows["steps"] == 25
    assert rows["duration"] == 7230.0
    assert rows["cost in USD"] == 1.0
    assert rows["last loss"] is None


def test_ray_program_without_hardware(folders: Folders, compared: Callable[..., Any]) -> None:
    storage = folders.of("long")
    storage.write_json(layout.RESULT, {**storage.read_json(layout.RESULT), "hardware": None, "cost": None})
    result = compared("short", "long")
    assert result["settings"]["workers"] == {"short": 2, "long": None}
    assert result["outcomes"]["cost in USD"] == {"short": 0.5, "long": None}


def test_curves_by_step(folders: Folders) -> None:
    figure = draw("short", "long")
    assert [axes.get_title() for axes in figure.axes] == ["loss", "val_loss", "lr"]
    short, long = figure.axes[0].get_lines()
    assert list(short.get_xdata()) == list(range(10, 101, 10))
    assert list(long.get_ydata()) == [1 / number for number in range(1, 21)]
    assert short.get_color() != long.get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["short", "long"]


def test_null_values_are_not_points(folders: Folders, compared: Callable[..., Any]) -> None:
    records = [{"step": step, "time": "", "loss": loss} for step, loss in ((1, 0.5), (2, 0.25), (3, None))]
    folders.of("short").write_lines(layout.METRICS, records)
    assert compared("short", "long")["outcomes"]["last loss"]["short"] == 0.25
    assert list(draw("short", "long").axes[0].get_lines()[0].get_xdata()) == [1, 2]


def test_metric_of_one_run(folders: Folders) -> None:
    folders.of("short").write_lines(layout.METRICS, [{"step": 1, "time": "", "accuracy": 0.5}])
    figure = draw("short", "long")
    assert [axes.get_title() for axes in figure.axes] == ["accuracy", "loss", "val_loss", "lr"]
    assert [list(line.get_xdata()) for line in figure.axes[0].get_lines()] == [[1], []]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["short", "long"]


def test_picture_has_24_metrics_at_most(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {f"layer_{number}": 1.0 for number in range(30)}
    folders.of("short").write_lines(layout.METRICS, [{"step": 1, "time": "", **metrics}])
    assert len(draw("short", "long").axes) == 24
    assert "24 of 33" in capsys.readouterr().err


def test_eleventh_run_differs_from_the_first(folders: Folders) -> None:
    names = [f"run-{number}" for number in range(11)]
    for name in names:
        folders.script(name)
    looks = {(line.get_color(), line.get_linestyle()) for line in draw(*names).axes[0].get_lines()}
    assert len(looks) == 11


def test_table_and_picture(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--local", "short", "long", "--picture", "pictures/both.svg"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["run", "short", "long"] in lines
    assert ["command", "train.py", "--lr", "1", "train.py", "--lr", "2"] in lines
    assert ["duration", "0:00:14", "0:00:14"] in lines
    assert ["last", "val_loss", "0.11", "0.055"] in lines
    assert lines[-1] == ["curves:", "pictures/both.svg"]
    assert "</svg>" in Path("pictures/both.svg").read_text()
    assert main(["compare", "--local", "short", "long"]) == 0
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")


def test_rows_in_a_pipe_are_whole(folders: Folders, unrendered: None, capsys: pytest.CaptureFixture[str]) -> None:
    folders.script("wordy", command=["train.py", *map(str, range(50))])
    assert main(["compare", "--local", *["short", "long", "same", "wordy"] * 2]) == 0
    assert f"train.py {' '.join(map(str, range(50)))}" in capsys.readouterr().out


def test_terminal_of_80_columns(
    folders: Folders, unrendered: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TTY_COMPATIBLE": "1", "TERM": "dumb", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    names = [f"image-classifier-20260102-{number}" for number in range(6)]
    for name in names:
        folders.script(name, command=["train.py", "--name", name])
    assert main(["compare", "--local", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[1:] for line in lines if line.startswith("state")] == [["finished"] * 4, ["finished"] * 2]


def test_runs_without_metrics(folders: Folders, compared: Callable[..., Any]) -> None:
    for name in ("new", "newer"):
        folders.status(name, "waiting", step=None, workers=None)
    result = compared("new", "newer")
    assert result["picture"] is None
    assert result["outcomes"]["state"] == {"new": "waiting", "newer": "waiting"}
    assert "steps" not in result["outcomes"]
    assert not Path("compare.png").exists()
    assert compared("new", "short")["picture"] == "compare.png"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["short"], "two runs"),
        (["short", "short"], "two runs"),
        (["short", "lnog"], "did you mean long?"),
        (["short", "long", "--picture", "x.txt"], "--picture"),
        (["short", "long", "--picture", "results/short"], "--picture"),
    ],
)
def test_refusals(folders: Folders, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    assert main(["compare", "--local", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (layout.METRICS, "{\n"),
        (layout.METRICS, '{"epoch": 1, "loss": 0.5}\n'),
        (layout.SETTINGS, "[1]"),
        (layout.RESULT, "{"),
        (layout.RESULT, '{"hardware": {}}'),
        (layout.STATUS, '{"instances": [{}]}'),
    ],
)
def test_broken_documents(folders: Folders, capsys: pytest.CaptureFixture[str], document: str, text: str) -> None:
    folders.of("broken-run").write(document, text)
    assert main(["compare", "--local", "short", "broken-run"]) == 2
    error = capsys.readouterr().err
    assert "broken-run" in error
    assert len(error.splitlines()) == 1
