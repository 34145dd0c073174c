"""Stacks that py-spy reads, wherever it is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ray_on_ecs.run import stacks

PY_SPY = Path(sys.executable).with_name("py-spy")


@pytest.mark.parametrize("place", ["beside Python", "on PATH", "in neither"])
def test_py_spy_is_found_where_it_is_installed(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {each: tmp_path / each for each in ("beside Python", "on PATH", "in neither")}
    for folder in folders.values():
        folder.mkdir()
    (folders[place] / "py-spy").symlink_to(PY_SPY)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folders["on PATH"]), os.defpath]))
    script = "import time; print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        monkeypatch.setattr(sys, "executable", str(folders["beside Python"] / "python"))
        found = next(each for each in stacks.read(os.getpid()) if each.pid == child.pid)
        child.kill()
    if place == "in neither":
        assert found.fault == "py-spy is not installed; pip install py-spy"
    else:
        assert found.threads or found.fault == stacks.NO_RIGHTS
