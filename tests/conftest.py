"""Fixtures of all tests: an AWS, the environment variables that lead to it, and readable names of test cases."""

import json
import os
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from tests.aws import BUCKET, client, environment, moto_server
from tests.flaky_s3 import flaky_proxy

# The tests run on CPUs, several ranks at a time, also on a machine with a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Folders whose tests take minutes, and the marker that keeps them out of `make test`.
SLOW = {"containers": "container", "faults": "fault"}
# Fractions of the requests to S3, and the number that pass after a failure, which exceeds the concurrent clients.
DROPPED, LOST, SPARED = 0.05, 0.05, 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if mark := SLOW.get(item.path.parent.name):
            item.add_marker(mark)


class Lanes(LoadScopeScheduling):
    """Runs the tests with Ray one after another in one of pytest's processes, and the others in any free process.

    (`--dist loadgroup` would do this with a marker, but xdist 3.8 loses the marker under pytest 9.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return "Ray" if nodeid.startswith("tests/commands/") else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    return Lanes(config, log)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a test case after its value if pytest would number it and the value fits on a line."""
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
    with moto_server() as url:
        yield url


@pytest.fixture(scope="session")
def aws_variables(aws_server: str) -> Iterator[dict[str, str]]:
    """Environment variables that lead AWS clients to the AWS of the tests.

    Its S3 drops requests, and responses to executed requests. A client that repeats its requests succeeds.
    """
    with flaky_proxy(aws_server, DROPPED, LOST, spared=SPARED) as proxy:
        yield environment(proxy.url)


@pytest.fixture(scope="session")
def s3_client(aws_server: str) -> Any:
    s3 = client("s3", aws_server)
    s3.create_bucket(Bucket=BUCKET)
    return s3


@pytest.fixture(scope="session")
def price_variables(aws_server: str, aws_variables: dict[str, str]) -> dict[str, str]:
    """`aws_variables`, and the name of a parameter with the price of a worker: a dollar a second."""
    workers = {
        "group": "no-group-of-the-tests",
        "types": ["g5.xlarge"],
        "zones": [{"zone": "us-east-1a", "subnet_id": "subnet-0123", "placement_group": None}],
        "spot": False,
        "spread": False,
        "prices": {"g5.xlarge": 3600},
        "head_usd": None,
        "scaling": {"workers": {"min": 0, "max": 2, "idle_minutes": 30}},
        "gpus": 1,
    }
    client("ssm", aws_server).put_parameter(Name="workers", Type="String", Value=json.dumps(workers))
    return {**aws_variables, CLUSTER_INFO_VARIABLE: "workers"}


@pytest.fixture(scope="session")
def cloudwatch_client(aws_server: str) -> Any:
    return client("cloudwatch", aws_server)
