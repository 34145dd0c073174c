"""The folder that Ray uploads: it holds the user's under a name that can't be imported."""

from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private.runtime_env.packaging import create_package

from ray_on_ecs.errors import UsageError
from ray_on_ecs.run import upload


def test_the_user_s_files_are_below_a_folder_that_can_not_be_imported(tmp_path: Path) -> None:
    code, package = tmp_path / "code", tmp_path / "package.zip"
    (code / "data").mkdir(parents=True)
    for name in ("queue.py", "train.py", "data/big.bin"):
        (code / name).write_text(name)
    (code / ".gitignore").write_text("*.bin\n")
    with upload.runtime_env(code) as runtime_env:
        around = Path(runtime_env["working_dir"])
        create_package(str(around), package, True, excludes=runtime_env["excludes"])
    assert not upload.FOLDER.isidentifier()
    files = {name for name in ZipFile(package).namelist() if not name.endswith("/")}
    assert files == {f"{upload.FOLDER}/{name}" for name in ("queue.py", "train.py", ".gitignore")}
    assert not around.exists()


def test_a_folder_that_is_too_large_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("pass")
    line = r"--working-dir: .* can be uploaded; the largest are train.py"
    with pytest.raises(UsageError, match=line), upload.runtime_env(tmp_path):
        raise ValueError("Package size (600 MiB) exceeds the maximum size of 512 MiB")
    monkeypatch.setattr(upload, "MAX_BYTES", 3)
    with pytest.raises(UsageError, match=line):
        upload.check(tmp_path)
