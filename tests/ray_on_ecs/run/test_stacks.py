"""Stacks that py-spy reads, wherever it is installed."""

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from ray_on_ecs.run import stacks

PY_SPY = Path(sys.executable).with_name("py-spy")


PLACES = {"beside Python": "python", "of pip install --user": "user/bin", "on PATH": "path", "elsewhere": "elsewhere"}


@pytest.mark.parametrize("place", PLACES)
def test_py_spy_is_found_where_it_is_installed(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / PLACES[place]).mkdir(parents=True)
    (folder / "py-spy").symlink_to(PY_SPY)
    script = "import time; print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "path"), os.defpath]))
        monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
        monkeypatch.setattr(site, "USER_BASE", None)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python"))
        try:
            found = {each.pid: each for each in stacks.read(os.getpid())}[child.pid]
        finally:
            child.kill()
    if place == "elsewhere":
        assert found.fault == "py-spy is neither beside Python nor on PATH; pip install py-spy"
    else:
        assert found.threads or found.fault == stacks.NO_RIGHTS
