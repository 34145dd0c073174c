"""What all tests share: an AWS for those that need one, with the environment that leads there, and names of cases."""

from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a test's case by what it holds, where pytest would number it and a line has room."""
    if isinstance(val, dict):
        items = [f"{key}={value}" for key, value in val.items()]
    elif isinstance(val, list | tuple):
        items = [str(item) for item in val]
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
