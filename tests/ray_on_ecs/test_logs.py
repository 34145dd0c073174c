"""The log's levels, lines and streams."""

import io
import logging
import re
import subprocess
import sys

import pytest

from ray_on_ecs import logs, secrets

DETAILS = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "
Capture = pytest.CaptureFixture[str]
logger = logging.getLogger("ray_on_ecs.run.driver")


def write_each_level() -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, f"a {logging.getLevelName(level).lower()}")


def lines(capsys: Capture) -> list[str]:
    out, err = capsys.readouterr()
    return [*out.splitlines(), *err.splitlines()]


def test_default_lines_have_the_command_alone(capsys: Capture) -> None:
    logs.set_up("ray-on-ecs")
    write_each_level()
    assert capsys.readouterr() == ("ray-on-ecs: a info\nray-on-ecs: a warning\n", "ray-on-ecs: a error\n")


def test_node_warnings_go_to_standard_error(capsys: Capture) -> None:
    logs.set_up("ray-head", errors_from=logging.WARNING)
    write_each_level()
    assert capsys.readouterr() == ("ray-head: a info\n", "ray-head: a warning\nray-head: a error\n")


def test_debug_lines_have_time_level_and_module(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "debug")
    logs.set_up("ray-on-ecs")
    write_each_level()
    for level, line in zip(("DEBUG", "INFO", "WARNING", "ERROR"), lines(capsys), strict=True):
        expected = rf"{DETAILS}{level} ray_on_ecs\.run\.driver ray-on-ecs: a {level.lower()}"
        assert re.fullmatch(expected, line)


@pytest.mark.parametrize(
    ("value", "levels"),
    [
        (None, ["info", "warning", "error"]),
        ("", ["info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        (" Warning\n", ["warning", "error"]),
        ("ERROR", ["error"]),
    ],
)
def test_level_limits_the_lines(
    value: str | None, levels: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(logs.VARIABLE, value)
    logs.set_up()
    write_each_level()
    assert lines(capsys) == [f"a {level}" for level in levels]


@pytest.mark.parametrize("value", ["verbose", "10", "debug,info", "critical", "on", "\x1b[2J", "é", "%s", "x" * 5000])
def test_wrong_level_is_one_line_and_info(value: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, value)
    logs.set_up("ray-head")
    [line] = lines(capsys)
    assert line.startswith(f"ray-head: RAY_ON_ECS_LOG: {value!r}"[:80])
    assert line.endswith("is not a level; give debug, info, warning or error")
    assert len(line) < 160
    write_each_level()
    assert len(lines(capsys)) == 3
    logs.set_up("ray-head")
    assert lines(capsys) == []


def test_workers_do_not_repeat_a_wrong_level(capsys: Capture) -> None:
    logs.set_up("", {logs.VARIABLE: "verbose"})
    assert lines(capsys) == []


def test_run_has_precedence_over_the_environment(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "debug")
    logs.set_up("", {logs.VARIABLE: "error"})
    write_each_level()
    assert lines(capsys) == ["a error"]


def test_second_set_up_replaces_the_first(capsys: Capture) -> None:
    logs.set_up("ray-head", errors_from=logging.WARNING)
    logs.set_up("ray-on-ecs")
    logger.warning("once")
    assert capsys.readouterr() == ("ray-on-ecs: once\n", "")


def test_secret_in_a_message_is_masked(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.VARIABLE, "debug")
    logs.mask_by(secrets.Masker(["hf_0123456789secret"]))
    logs.set_up()
    logger.debug("token hf_0123456789secret refused")
    [line] = lines(capsys)
    assert line.endswith(f"token {secrets.MASK} refused")


def test_root_logger_is_left_alone(capsys: Capture) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    logs.set_up()
    assert (root.handlers, root.level) == before
    handler = logging.StreamHandler(io.StringIO())
    root.addHandler(handler)
    try:
        logger.error("mine")
    finally:
        root.removeHandler(handler)
    assert handler.stream.getvalue() == ""
    assert lines(capsys) == ["mine"]


@pytest.mark.parametrize("text", ["100 % of {x} %s", "a lone \udcff half", "é"], ids=["percent", "surrogate", "accent"])
def test_any_text_is_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    logs.set_up()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    logger.info(text)
    assert written.getvalue() == text.encode("ascii", "backslashreplace") + b"\n"


def test_closed_stream_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.set_up()
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    logger.info("a lost line")


def test_lines_of_a_child_keep_their_order() -> None:
    program = (
        "import logging, subprocess, sys; from ray_on_ecs import logs; logs.set_up('ray-x', errors_from=30);"
        "logger = logging.getLogger('ray_on_ecs.x'); logger.info('first');"
        "subprocess.run([sys.executable, '-c', 'print(\"script\")']); logger.warning('last'); logger.debug('mine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    assert done.stdout == "ray-x: first\nscript\nray-x: last\n"
