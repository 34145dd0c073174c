"""Stand-ins for the dashboard and the GCS of a Ray head, which accept one token."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from typing import Any, cast

import grpc
import pytest

from ray_on_ecs.aws import client
from ray_on_ecs.node import api, ports, process
from tests import aws
from tests.serving import serving

TOKEN = "right"
GROUP = "workers-group"


class Head(HTTPServer):
    """Answers to TOKEN with `answer`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: object = {"ray_version": version("ray")}
        self.failing = False


class Handler(BaseHTTPRequestHandler):
    """Answers as Ray does: 403 to another token."""

    def do_GET(self) -> None:
        head = cast(Head, self.server)
        given = self.headers.get("Authorization")
        self.send_response(500 if head.failing else 200 if given == f"Bearer {TOKEN}" else 403)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.end_headers()
        self.wfile.write(json.dumps(head.answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the tests say what went wrong."""


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with serving(Head()) as server:
        monkeypatch.setattr(ports, "DASHBOARD", server.server_port)
        yield server


class Gcs(grpc.GenericRpcHandler):
    """Answers to TOKEN, as Ray does, unless it is to answer with an error."""

    def __init__(self) -> None:
        self.error: grpc.StatusCode | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != api.CHECK:
            return None
        given = dict(handler_call_details.invocation_metadata).get("authorization")
        error = grpc.StatusCode.UNAUTHENTICATED if given != f"Bearer {TOKEN}" else self.error

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if error:
                context.abort(error, "as the test wants it")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def gcs_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gcs]:
    """The GCS of this node."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(ports, "default_address", lambda: "127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        server, answering = grpc.server(pool), Gcs()
        server.add_generic_rpc_handlers([answering])
        monkeypatch.setattr(ports, "GCS", server.add_insecure_port("127.0.0.1:0"))
        server.start()
        yield answering
        server.stop(None).wait()


@pytest.fixture
def ray_arguments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of `ray start` on a node that is started; Ray is not."""
    arguments: list[str] = []
    monkeypatch.setattr(process, "ray_start", lambda given, **_: arguments.extend(given) or 0)
    return arguments


@pytest.fixture
def in_aws(aws_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a node in the AWS of the tests."""
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cloudwatch(in_aws: None) -> Any:
    """The head's client of the AWS that the environment names."""
    return client("cloudwatch")


@pytest.fixture
def autoscaling(aws_server: str, in_aws: None) -> Iterator[Any]:
    """EC2 Auto Scaling with a group without instances."""
    service = aws.client("autoscaling", aws_server)
    service.create_launch_configuration(LaunchConfigurationName=GROUP, ImageId="ami-1", InstanceType="g5.xlarge")
    service.create_auto_scaling_group(
        AutoScalingGroupName=GROUP,
        LaunchConfigurationName=GROUP,
        MinSize=0,
        MaxSize=20,
        DesiredCapacity=0,
        AvailabilityZones=["us-east-1a"],
        NewInstancesProtectedFromScaleIn=True,
    )
    yield service
    service.delete_auto_scaling_group(AutoScalingGroupName=GROUP, ForceDelete=True)
    service.delete_launch_configuration(LaunchConfigurationName=GROUP)


class Driver:
    """A CUDA driver with so many GPUs, or whose start fails with an error."""

    def __init__(self, gpus: int = 0, error: int = 0) -> None:
        self._gpus, self._error = gpus, error

    def cuInit(self, flags: int) -> int:
        return self._error

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._gpus
        return 0
