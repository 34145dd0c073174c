"""`ray-on-ecs open`: the report of a run, copied and in a browser."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_on_ecs.cli.main import main
from tests.ray_on_ecs.cli.folders import Folders


@pytest.fixture
def folders(folders: Folders) -> Folders:
    """A storage path with a run, `first`, without a report."""
    folders.script("first", is_finished=False)
    folders.status("first", "training")
    return folders


def test_missing_report_is_written_only_to_the_copy(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["open", "--local", "--no-browser", "first"]) == 0
    report = Path(capsys.readouterr().out.strip())
    assert report == tmp_path / "runs/first/report.html"
    assert "first" in report.read_text()
    assert not folders.of("first").exists("report.html")


def test_report_is_rendered_here(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.of("first").write("report.html", "<script>of another user</script>")
    folders.of("first").write("curves.png", b"\x89PNG\r\n\x1a\n picture")
    assert main(["open", "--local", "--no-browser", "--json", "first"]) == 0
    shown = json.loads(capsys.readouterr().out)
    page = Path(shown["report"]).read_text()
    assert "script" not in page
    assert "default-src 'none'" in page
    assert Path(shown["curves"]).read_bytes().endswith(b" picture")
    folders.of("first").write("curves.png", "<svg onload='alert(1)'/>")
    assert main(["open", "--local", "--no-browser", "--json", "first"]) == 0
    assert json.loads(capsys.readouterr().out)["curves"] is None
    assert not Path(shown["curves"]).exists()


def test_path_is_printed_without_a_browser(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["open", "--local", "first"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("report.html\n")
    assert sys.platform != "linux" or "a browser was not found" in printed.err


def test_report_is_opened_in_the_browser(folders: Folders, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/opened\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "ray_on_ecs", "open", "--local", "first"]
    subprocess.run(command, env={**os.environ, "BROWSER": f"{browser} %s"}, check=True, capture_output=True)
    assert (tmp_path / "opened").read_text().strip() == (tmp_path / "runs/first/report.html").as_uri()
