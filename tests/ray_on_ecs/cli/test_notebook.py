"""The page through which the browser gets the notebook's token."""

import stat
from pathlib import Path

import pytest

from ray_on_ecs.cli import notebook


def test_token_is_in_a_page_of_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with notebook._page("http://127.0.0.1:1/lab?token=abc") as address:
        page = Path(address.removeprefix("file://"))
        assert "abc" not in address
        assert "0; url=http://127.0.0.1:1/lab?token=abc" in page.read_text()
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
        assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700
    assert not page.exists()
