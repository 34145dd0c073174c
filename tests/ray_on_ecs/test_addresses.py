"""A key in the address of a storage is not shown, whichever command, function or variable has it."""

from pathlib import Path

import pytest

from ray_on_ecs.addresses import check_address
from ray_on_ecs.cli.main import main
from ray_on_ecs.errors import UsageError
from ray_on_ecs.storage import filesystem
from ray_on_ecs.storage.run_storage import RunStorage

ADDRESSES = ["s3://AKIA:SECRET@bucket/x", "s3://bucket/x?secret_key=SECRET", "AKIA:SECRET@bucket"]
COMMANDS = [
    *("runs", "logs x", "logs --follow x", "stop x", "stop --all", "fetch x", "open x", "history", "rm x"),
    *(
        "rm --older-than 1",
        "status",
        "doctor",
        "run train.py",
        "run --detach --run-name x train.py",
        "notebook",
        "dashboard",
    ),
]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("words", COMMANDS)
def test_command_does_not_show_the_key_of_the_variable(
    words: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").touch()
    monkeypatch.chdir(code)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", address)
    command, *rest = words.split()
    assert main([command, "--local", *rest]) == (1 if command == "doctor" else 2)
    text = "".join(capfd.readouterr())
    assert "STORAGE_PATH" in text or "--storage-path" in text
    assert "may have a key in its address" in text
    assert "SECRET" not in text


@pytest.mark.parametrize("address", ADDRESSES)
def test_function_does_not_show_the_key_of_an_address(address: str) -> None:
    for door in (
        lambda: RunStorage.open(address, "x"),
        lambda: filesystem.open_filesystem(address),
        lambda: filesystem.fetch(address, "--data"),
        lambda: check_address("--data", address),
    ):
        with pytest.raises(UsageError, match="may have a key in its address") as refused:
            door()
        assert "SECRET" not in str(refused.value)
