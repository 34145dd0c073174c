"""A worker joins the head that accepts it, or reports in one line why it can't."""

import re
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import grpc
import pytest

from ray_on_ecs.errors import GpuError, HeadError, StartError
from ray_on_ecs.node import gpus, ports, replacement, worker
from tests.ray_on_ecs.node.conftest import Driver, Gcs, Head

COMMAND_NAME = "ray-worker"


def test_a_head_that_accepts_the_worker_is_joined(head: Head) -> None:
    assert worker.join_blocker("127.0.0.1") is None


def test_a_wrong_token_ends_the_wait_at_once(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with pytest.raises(StartError, match=r"127\.0\.0\.1 refuses the token; give both nodes the same RAY_AUTH_TOKEN"):
        worker.wait_for_head("127.0.0.1", seconds=60)


def test_another_version_ends_the_wait_at_once(head: Head) -> None:
    head.answer = {"ray_version": "0.0.0"}
    with pytest.raises(StartError, match=r"127\.0\.0\.1 runs Ray 0\.0\.0 and this node Ray [1-9]"):
        worker.wait_for_head("127.0.0.1", seconds=60)


def test_worker_waits_for_the_head(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    head.failing = True
    with pytest.raises(HeadError, match=r"127\.0\.0\.1:\d+ does not answer \(500: .*\), after 0 s"):
        worker.wait_for_head("127.0.0.1", seconds=0.2)
    assert "waiting for the head: 127.0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["<html>", {"version": "1"}, []])
def test_another_server_is_no_head(head: Head, answer: object) -> None:
    head.answer = answer
    assert "does not answer" in (worker.join_blocker("127.0.0.1") or "")


def test_a_closed_port_is_named(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(ports, "DASHBOARD", port)
    assert worker.join_blocker("127.0.0.1") == f"127.0.0.1:{port} does not answer ([Errno 111] Connection refused)"


@pytest.mark.parametrize("name", ["nobody.invalid", "nobody..invalid", f"{'x' * 64}.invalid"])
def test_a_name_without_an_address_is_named(name: str) -> None:
    with pytest.raises(HeadError, match=rf"{re.escape(name)} has no address, after 0 s; is the head running"):
        worker.wait_for_head(name, seconds=0)


def test_head_lost_after_its_answer_costs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_HEAD_HOST", "nobody.invalid")
    monkeypatch.setattr("sys.argv", ["ray-worker"])
    monkeypatch.setattr(worker, "join_blocker", lambda host: None)
    with pytest.raises(HeadError, match=r"nobody\.invalid has no address any longer"):
        worker.start()


def test_a_worker_needs_the_name_of_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_HEAD_HOST", raising=False)
    with pytest.raises(StartError, match="RAY_HEAD_HOST is not set"):
        worker.start()


@pytest.mark.parametrize("given", ["soon", "-1", "nan"])
def test_a_wait_is_a_number_of_seconds(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_HEAD_WAIT_S", given)
    with pytest.raises(StartError, match=f"RAY_HEAD_WAIT_S: '{given}' is not a number of seconds"):
        worker.wait_seconds()


def test_work_is_drained_only_with_a_head(gcs_server: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "DASHBOARD", 9)  # where nothing answers
    assert worker.stop_signal("127.0.0.1") is signal.SIGTERM
    gcs_server.error = grpc.StatusCode.UNAVAILABLE
    assert worker.stop_signal("127.0.0.1") is signal.SIGINT


@pytest.mark.parametrize("failure", [None, OSError("ECS's agent doesn't answer")])
def test_stopping_worker_releases_its_task_first(
    gcs_server: Gcs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: OSError | None
) -> None:
    done: list[str] = []

    def release() -> None:
        done.append("released")
        if failure:
            raise failure

    monkeypatch.setattr(worker, "stop_signal", lambda host: done.append("asked the head") or signal.SIGTERM)
    noted = partial(done.append, "noted")
    assert worker.before_stop("127.0.0.1", release, noted) is signal.SIGTERM
    assert done == ["noted", "released", "asked the head"]
    assert ("the release of this task's protection has failed" in capsys.readouterr().err) == bool(failure)


def test_expected_gpus_come_from_the_flag() -> None:
    assert worker.expected_gpus(["--num-cpus=4", "--num-gpus=8"]) == 8
    assert worker.expected_gpus(["--num-gpus", "8", "--num-cpus", "4"]) == 8
    assert worker.expected_gpus(["--num-cpus=4"]) == 0


def test_missing_cuda_driver_is_a_start_error() -> None:
    with pytest.raises(StartError, match=r"the CUDA driver is missing: .*; does the instance have NVIDIA's runtime"):
        gpus.check(1)


@pytest.mark.parametrize(
    ("driver", "fault"),
    [
        (Driver(gpus=1), "the task requested 2 GPUs and has 1"),
        (Driver(error=999), "the CUDA driver does not start: cuInit returns 999"),
        (Driver(gpus=2), "GPU 0 does not compute: "),
    ],
)
def test_a_gpu_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, driver: Driver, fault: str) -> None:
    monkeypatch.setattr(gpus, "load_driver", lambda: driver)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert (gpus.gpu_error(2) or "").startswith(fault)


def test_image_without_gpu_support_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "load_driver", lambda: Driver(gpus=2))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(StartError, match="finds 0 of 2 GPUs; is it a build with CUDA"):
        gpus.gpu_error(2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.ones", unsupported)
    with pytest.raises(StartError, match="has no code for GPU 0: CUDA error: no kernel image"):
        gpus.gpu_error(2)


def unsupported(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")


@pytest.mark.parametrize(("status", "error"), [(gpus.GPU_FAULT, GpuError), (1, StartError), (137, StartError)])
def test_exit_status_distinguishes_gpu_faults(
    monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception]
) -> None:
    monkeypatch.setattr(gpus, "CHECK", ("sh", "-c", f"echo the reason >&2; exit {status}"))
    with pytest.raises(error, match="the reason"):
        gpus.check(1)


def test_check_of_a_hanging_gpu_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "CHECK", (sys.executable, "-c", "import time; time.sleep(60)"))
    with pytest.raises(GpuError, match="one of them hangs"):
        gpus.check(1, seconds=0.2)


def test_second_gpu_check_prevents_a_replacement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "CHECK", ("sh", "-c", f"[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exit 3; }}"))
    monkeypatch.setattr(worker, "RECHECK_SECONDS", 0.0)
    monkeypatch.setattr(replacement, "request", pytest.fail)
    worker.check_gpus(1)
    assert (tmp_path / "once").exists()


def test_a_task_without_gpus_needs_none() -> None:
    gpus.check(0)


def test_address_is_on_the_route_to_head() -> None:
    assert ports.source_address_for("127.0.0.1") == "127.0.0.1"
    assert ports.default_address() != "0.0.0.0"
