"""EFA devices of a worker: one line of its log."""

import os
from pathlib import Path

import pytest

from ray_on_ecs.node import efa


def report(folder: Path, capsys: pytest.CaptureFixture[str], *, library: bool = True) -> str:
    """Log of a worker with these devices, with or without libfabric."""

    def load(name: str) -> None:
        if not library:
            raise OSError(f"{name}: cannot open shared object file")

    efa.report(folder, load)
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Folder with two devices, and others of the RDMA subsystem."""
    for name in ("uverbs0", "uverbs1", "rdma_cm"):
        (tmp_path / name).touch()
    return tmp_path


def test_devices_are_counted(devices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "EFA: 2 devices" in report(devices, capsys).splitlines()[-1]


@pytest.mark.parametrize("library", [True, False])
def test_without_devices_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], library: bool) -> None:
    assert report(tmp_path, capsys, library=library) == report(tmp_path / "absent", capsys, library=library) == ""


def test_missing_library_is_said(devices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "EFA: 2 devices, but libfabric.so.1 is missing in the image (" in report(devices, capsys, library=False)


def test_devices_of_another_user_are_said(
    devices: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "uverbs1")
    assert f"EFA: 2 devices, of which user {os.getuid()} can't open uverbs1; " in report(devices, capsys)
