"""The packages of a requirements file, from wheels on the disk: no index is needed."""

import subprocess
import tempfile
import zipfile
from pathlib import Path

import pytest

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import packages


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with a wheel."""
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting.py", "import torch\nHELLO = f'hello {torch.__name__}'\n")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\nRequires-Dist: torch\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return tmp_path


def test_they_are_added_to_what_is_installed_once_for_a_file(folder: Path) -> None:
    requirements = "--no-index\n./greeting-1.0-py3-none-any.whl\n"
    python = packages.python_with(requirements, folder)
    said = subprocess.run([python, "-c", "import greeting; print(greeting.HELLO)"], capture_output=True, text=True)
    assert said.stdout == "hello torch\n", said.stderr
    (folder / "greeting-1.0-py3-none-any.whl").unlink()
    assert packages.python_with(requirements, folder) == python, "nothing is installed again"


def test_a_long_installation_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    monkeypatch.setattr(packages, "NEWS_SECONDS", 0.01)
    monkeypatch.setattr(packages, "print", lambda line, **_: "Downloading" in line and told.touch(), raising=False)
    downloads = f"echo Downloading; until [ -e {told} ]; do sleep 0.01; done; echo ERROR: no such version; exit 3"
    status, said = packages._run(["sh", "-c", downloads], tmp_path)
    assert (status, said) == (3, ["Downloading", "ERROR: no such version"])


def test_what_pip_refuses_is_one_line(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--requirements: pip can't install them .*no-such-package") as caught:
        packages.python_with("--no-index\nno-such-package\n", folder)
    assert "\n" not in str(caught.value)


def test_without_a_file_it_is_this_interpreter(folder: Path) -> None:
    assert packages.python_with(None, folder) == packages.sys.executable
