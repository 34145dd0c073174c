"""`ray-on-ecs compare`: tables and a picture of runs of recipes and scripts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli.compare import draw, read
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.clusters import LocalCluster
from ray_on_ecs.cluster.history import find_run
from tests.ray_on_ecs.cli.folders import Folders, epoch_metrics


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """A storage path with two runs of the recipe and two of scripts."""
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    found = Folders(str(tmp_path / "results"))
    found.recipe("slow", lr=0.1)
    found.recipe("fast", lr=0.3)
    found.script("script-a")
    found.script("script-b", command=["train.py", "--lr", "2"], env=["A=1"])
    return found


@pytest.fixture
def compared(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(*names: str) -> dict[str, Any]:
        assert main(["compare", "--local", "--json", *names]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def figure(*names: str) -> Any:
    return draw([read(find_run(LocalCluster(), name)) for name in names])


def test_settings_that_differ_are_listed_and_equal_ones_counted(folders: Folders, compared: Callable[..., Any]) -> None:
    found = compared("slow", "fast")
    assert found["settings"] == {"lr": {"slow": 0.1, "fast": 0.3}}
    assert found["equal_settings"] == 5


def test_outcomes_have_the_final_and_the_best_metrics(folders: Folders, compared: Callable[..., Any]) -> None:
    history = [epoch_metrics(epoch, 0.1) for epoch in range(5)]
    history[4] |= {"test_accuracy": 0.5, "test_loss": 9.0}
    folders.of("slow").write_lines("metrics.jsonl", history)
    rows = {row: cells["slow"] for row, cells in compared("slow", "fast")["outcomes"].items()}
    assert rows["final test accuracy"] == 0.5
    assert rows["best test accuracy"] == history[3]["test_accuracy"]
    assert rows["best test loss"] == history[3]["test_loss"]
    assert rows["final train loss"] == history[4]["train_loss"]
    assert rows["training seconds"] == 10.0
    assert rows["samples/s"] == 1002.0
    assert rows["workers"] == 2
    assert rows["cost in USD"] == 0.5
    assert not [row for row in rows if row.endswith(("train seconds", "samples"))], "neither is a quality"


def test_the_picture_has_a_subplot_for_each_quality_and_a_colour_for_each_run(folders: Folders) -> None:
    loss, accuracy = figure("slow", "fast").axes
    assert [loss.get_title(), accuracy.get_title()] == ["loss", "accuracy"]
    looks = {line.get_label(): (line.get_linestyle(), line.get_color()) for line in loss.get_lines()}
    assert set(looks) == {f"{run}: {part} loss" for run in ("slow", "fast") for part in ("train", "test")}
    assert looks["slow: train loss"][0] == "--"
    assert looks["slow: test loss"][0] == "-"
    assert looks["slow: train loss"][1] == looks["slow: test loss"][1] != looks["fast: test loss"][1]
    line = next(each for each in loss.get_lines() if each.get_label() == "slow: train loss")
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5], "epochs are counted from 1 in pictures"
    assert line.get_ydata()[0] == pytest.approx(epoch_metrics(0)["train_loss"])
    drawn = figure("slow", "fast")
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["slow", "fast"]
    assert [text.get_text() for text in drawn.axes[0].get_legend().get_texts()] == ["train", "test"]


def test_scripts_are_compared_by_what_they_have_logged(folders: Folders, compared: Callable[..., Any]) -> None:
    found = compared("script-a", "script-b")
    assert set(found["settings"]) == {"command", "env"}
    assert found["outcomes"]["final val loss"]["script-a"] == pytest.approx(1.1 / 20)
    drawn = figure("script-a", "script-b")
    assert [axes.get_title() for axes in drawn.axes] == ["loss", "lr"]
    loss, val_loss = drawn.axes[0].get_lines()[:2]
    assert list(loss.get_xdata())[:2] == [10, 20]
    assert (loss.get_linestyle(), val_loss.get_linestyle()) == ("--", "-"), "beside val_loss it is that of the training"


def test_there_is_a_subplot_for_each_metric_and_no_empty_one(folders: Folders) -> None:
    names = [f"metric_{index}" for index in range(5)]
    for run in ("script-a", "script-b"):
        folders.of(run).write_lines("metrics.jsonl", [{"step": 1, "time": "", **dict.fromkeys(names, 1.0)}])
    assert [axes.get_title() for axes in figure("script-a", "script-b").axes] == [
        each.replace("_", " ") for each in names
    ]


def test_a_recipe_and_a_script_are_compared_by_what_they_have_in_common(
    folders: Folders, compared: Callable[..., Any]
) -> None:
    found = compared("slow", "script-a")
    assert found["settings"]["kind"] == {"slow": "recipe", "script-a": "script"}
    assert "seed" not in found["settings"]
    assert found["outcomes"]["final test loss"]["script-a"] == pytest.approx(1.1 / 20), "it calls it val_loss"
    [loss] = figure("slow", "script-a").axes
    assert loss.get_xlabel() == "step"
    steps = {line.get_label(): list(line.get_xdata()) for line in loss.get_lines()}
    assert steps["slow: test loss"] == [10, 20, 30, 40, 50]


def test_the_tables_are_printed_and_the_picture_is_written(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--local", "slow", "fast", "--picture", "pictures/both.svg"]) == 0
    printed = capsys.readouterr().out
    assert "5 settings are equal" in printed
    assert "pictures/both.svg" in printed
    assert "</svg>" in Path("pictures/both.svg").read_text()
    assert main(["compare", "--local", "slow", "fast"]) == 0
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_metrics_give_no_picture(folders: Folders, compared: Callable[..., Any]) -> None:
    for name in ("new", "newer"):
        folders.status(name, "waiting", loss=None)
    found = compared("new", "newer")
    assert found["picture"] is None
    assert found["outcomes"]["state"] == {"new": "waiting", "newer": "waiting"}
    assert compared("new", "slow")["picture"] == "compare.png"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slow"], "two runs"),
        (["slow", "slow"], "two runs"),
        (["slow", "fats"], "did you mean fast?"),
        (["slow", "fast", "--picture", "x.txt"], "--picture"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    folders: Folders, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["compare", "--local", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_broken_document_is_named(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.of("fast").write("metrics.jsonl", "{\n")
    assert main(["compare", "--local", "slow", "fast"]) == 2
    assert "fast" in capsys.readouterr().err
