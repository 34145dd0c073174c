"""examples/ddp_snapshot.py on one rank; tests/commands/test_launch.py runs it on two workers."""

import os
import runpy
import socket
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_snapshot.py"


def test_snapshot_continues_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(epochs: int) -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in rank.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr("sys.argv", ["ddp_snapshot.py", "--epochs", str(epochs)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capfd.readouterr().out.splitlines()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    whole = train(4)
    whole_weights = torch.load("snapshot.pt")["network"]
    Path("snapshot.pt").unlink()
    assert train(2) == whole[:2]
    assert train(4) == ["rank 0: resuming at epoch 2", *whole[2:]]
    torch.testing.assert_close(torch.load("snapshot.pt")["network"], whole_weights, rtol=0, atol=0)
