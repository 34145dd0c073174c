"""What all tests share: an AWS for those that need one, with the environment that leads there, and names of cases."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from xdist.scheduler import LoadScopeScheduling

from tests.aws import BUCKET

# The folders whose tests take minutes, by the mark that leaves them out of `make test`.
SLOW = {"containers": "container", "faults": "fault"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if mark := SLOW.get(item.path.parent.name):
            item.add_marker(mark)
            item.add_marker(pytest.mark.timeout(1200))


class Lanes(LoadScopeScheduling):
    """The commands one after the other, in one of pytest's processes, and everything else beside them.

    (`--dist loadgroup` would do the same by a mark, but xdist 3.8 loses the mark under pytest 9.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return "commands" if nodeid.startswith("tests/commands/") else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    return Lanes(config, log)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a test's case by what it holds, where pytest would number it and a line has room."""
    if isinstance(val, dict):
        items = [f"{key}={value}" for key, value in val.items()]
    elif isinstance(val, list | tuple):
        items = [str(item) for item in val]
    elif is_dataclass(val):
        items = [str(val)]
    else:
        return None
    name = ",".join(items) or "nothing"
    return name if name.isprintable() and len(name) < 120 else None


@pytest.fixture(scope="session")
def aws_server() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def aws_variables(aws_server: str) -> dict[str, str]:
    """The environment that leads AWS clients to the S3 of the tests."""
    return {
        "AWS_ENDPOINT_URL": aws_server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(scope="session")
def s3_client(aws_server: str) -> Any:
    client = boto3.client(
        "s3", endpoint_url=aws_server, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture(scope="session")
def cloudwatch_client(aws_server: str) -> Any:
    return boto3.client(
        "cloudwatch",
        endpoint_url=aws_server,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
