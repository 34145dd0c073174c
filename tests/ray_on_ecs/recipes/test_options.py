"""Options of a training script: their types, and errors of one line under the script's own name."""

import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from ray_on_ecs.recipes import options


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (options.whole(), "3", 3),
        (options.whole(0, 5), "0", 0),
        (options.number(), "1e-3", 1e-3),
        (options.number(above=0), "0.5", 0.5),
        (options.source("digits"), "digits", "digits"),
        (options.source(), "s3://bucket/prefix", "s3://bucket/prefix"),
        (options.source(or_file=True), __file__, __file__),
    ],
)
def test_values_are_converted(convert: options.Callable[[str], object], text: str, value: object) -> None:
    assert convert(text) == value


@pytest.mark.parametrize(
    ("convert", "text", "line"),
    [
        (options.whole(), "0", "0 must be at least 1"),
        (options.whole(), "many", "'many' is not a whole number"),
        (options.whole(0, 5), "6", "6 must be at most 5"),
        (options.number(), "nan", "'nan' is not a number"),
        (options.number(), "-1", "-1 must be at least 0"),
        (options.number(above=0), "0", "0 must be more than 0"),
        (options.number(0, 1), "1.5", "1.5 must be at most 1"),
        (options.source("digits"), "nowhere", "'nowhere' is not digits, a folder, or s3://bucket/prefix"),
        (options.source(), __file__, "py' is not a folder, or s3://bucket/prefix"),
        (options.source("python", or_file=True), "nowhere", "is not python, a folder, a file, or s3://bucket/prefix"),
    ],
)
def test_a_wrong_value_names_the_rule(convert: options.Callable[[str], object], text: str, line: str) -> None:
    with pytest.raises(ArgumentTypeError, match=line):
        convert(text)


def test_a_folder_of_the_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "flowers").mkdir()
    assert options.source()("~/flowers") == str(tmp_path / "flowers")


def test_errors_have_the_name_of_the_copy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/flowers.py"])
    parser = options.Options("Trains on flowers.")
    parser.add_argument("--epochs", type=options.whole())
    parser.add_argument("bucket", nargs="?", type=options.whole())
    for flags in (["--epochs", "0"], ["--epoch", "first"], ["--run-name=first", "1"]):
        with pytest.raises(SystemExit) as end:
            parser.parse_args(flags)
        assert end.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("flowers.py: error: ")
        assert flags[0].partition("=")[0] in line
    assert parser.parse_args(["--epochs=2", "--", "3"]).bucket == 3
    assert parser.parse_known_args(["--epochs=2", "--other=4"])[1] == ["--other=4"]


def test_a_worker_of_ray_raises_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/ray/_private/workers/default_worker.py"])
    with pytest.raises(RuntimeError, match="the images can't be read"):
        options.fail("the images can't be read")
