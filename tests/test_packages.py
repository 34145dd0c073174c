import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = (".css", ".j2", ".js", ".py")
PACKAGES = ("ray_on_ecs", "training")


def test_wheel_has_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"  # the files that docker/Dockerfile copies; a build in place would leave files there
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package)
    for name in ("LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(KINDS)}
    written = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.*")
        if path.suffix in KINDS
    }
    assert packed == written, "the image would lack these modules"
