"""Line of a worker about its instance's local disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, LOCAL_DISKS_FILE
from ray_on_ecs.node.labels import local_disks


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"local disks: Docker's files are on /dev/md127\n", "local disks: Docker's files are on /dev/md127"),
        (b"", ""),
        (b"\xff", ""),
        (None, ""),
    ],
    ids=["line", "empty", "not text", "absent"],
)
def test_worker_has_the_line_of_its_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, line: str
) -> None:
    monkeypatch.setenv(INSTANCE_FILE_VARIABLE, str(tmp_path / "instance.json"))
    if content is not None:
        (tmp_path / LOCAL_DISKS_FILE).write_bytes(content)
    assert local_disks() == line


def test_worker_outside_an_instance_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSTANCE_FILE_VARIABLE, raising=False)
    assert not local_disks()
