"""The health check tells a healthy node from another one, and no request leaks the token."""

import socket
from pathlib import Path

import grpc
import pytest

from ray_on_ecs.node import api, gpus, health, ports
from tests.ray_on_ecs.node.conftest import Driver, Gcs, Head
from tests.vanishing import goes_when_listed

TOKENS = pytest.mark.parametrize(("token", "status"), [("right", 0), ("wrong", 1)])


@TOKENS
def test_a_worker_is_healthy_if_its_agent_answers(
    head: Head, monkeypatch: pytest.MonkeyPatch, token: str, status: int
) -> None:
    monkeypatch.setattr(ports, "AGENT", head.server_port)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setattr("sys.argv", ["ray-health", "worker"])
    assert health.main() == status


@TOKENS
def test_a_head_is_healthy_if_its_gcs_answers(
    gcs_server: Gcs, monkeypatch: pytest.MonkeyPatch, token: str, status: int
) -> None:
    monkeypatch.setattr(ports, "DASHBOARD", 9)  # where nothing answers
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setattr("sys.argv", ["ray-health", "head"])
    assert health.main() == status


@pytest.mark.parametrize("error", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
def test_a_head_whose_gcs_fails_is_ill(
    gcs_server: Gcs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: grpc.StatusCode
) -> None:
    gcs_server.error = error
    monkeypatch.setattr("sys.argv", ["ray-health", "head"])
    assert health.main() == 1
    text = f"ray-health: the Ray head doesn't answer at 127.0.0.1:{ports.GCS} ({error.name}, as the test wants it)"
    assert capsys.readouterr().err.startswith(text)


def test_silent_gcs_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="DEADLINE_EXCEEDED"):
        api.check_gcs(f"127.0.0.1:{silent.getsockname()[1]}", 0.3)


def test_no_proxy_reads_the_token(head: Head, gcs_server: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert api.ask(f"http://127.0.0.1:{head.server_port}/api/version") == head.answer
    api.check_gcs(ports.own_gcs())


def test_the_health_check_knows_two_kinds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ray-health", "heads"])
    with pytest.raises(SystemExit) as ended:
        health.main()
    assert ended.value.code == 2
    assert "invalid choice: 'heads'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("driver", "fault"),
    [
        (Driver(gpus=4), ""),
        (Driver(gpus=8), ""),
        (Driver(gpus=3), "ray-health: the task requested 4 GPUs and has 3\n"),
        (Driver(error=100), "ray-health: the CUDA driver does not start: cuInit returns 100\n"),
        (None, "ray-health: the CUDA driver is missing: "),
    ],
    ids=["all GPUs", "more GPUs", "a missing GPU", "GPUs taken from the container", "a missing driver"],
)
def test_worker_is_healthy_only_with_its_gpus(
    head: Head,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: Driver | None,
    fault: str,
) -> None:
    monkeypatch.setattr(ports, "AGENT", head.server_port)
    if driver:
        monkeypatch.setattr(gpus, "load_driver", lambda: driver)
    monkeypatch.setattr("sys.argv", ["ray-health", "worker", "--num-gpus=4"])
    assert health.main() == (1 if fault else 0)
    output = capsys.readouterr().err
    assert output.startswith(fault) if fault else not output


def test_worker_with_a_gpu_process_is_healthy(
    head: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ports, "AGENT", head.server_port)
    monkeypatch.setattr(gpus, "load_driver", lambda: Driver(error=100))
    monkeypatch.setattr(gpus, "are_in_use", lambda: True)
    monkeypatch.setattr("sys.argv", ["ray-health", "worker", "--num-gpus=4"])
    assert health.main() == 0
    assert "cuInit returns 100; a process still uses a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("targets", "is_used"),
    [((), False), (("/dev/null", "/dev/nvidiactl", "/dev/nvidia-uvm"), False), (("/dev/null", "/dev/nvidia0"), True)],
)
def test_open_device_file_means_gpu_in_use(tmp_path: Path, targets: tuple[str, ...], is_used: bool) -> None:
    files = tmp_path / "12" / "fd"
    files.mkdir(parents=True)
    for number, target in enumerate(targets):
        (files / str(number)).symlink_to(target)
    assert gpus.are_in_use(tmp_path) == is_used


def test_process_that_ends_meanwhile_has_no_gpu_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "7" / "fd").mkdir(parents=True)
    goes_when_listed(monkeypatch, tmp_path / "7" / "fd")
    assert not gpus.are_in_use(tmp_path)
    assert not (tmp_path / "7" / "fd").exists()
