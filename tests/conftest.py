"""Fixtures of all tests: an AWS, the environment variables that lead to it, and readable names of test cases."""

import gc
import json
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from socketserver import StreamRequestHandler
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.node import ports
from tests.aws import BUCKET, client, environment, moto_server
from tests.flaky_s3 import flaky_proxy
from tests.worker_pools import node_group, workers

SHARES = 8
# The tests run on CPUs, several ranks at a time, also on a machine with a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Of torch: where something else runs on the machine, threads that wait for each other take a hundred times as long.
os.environ["OMP_NUM_THREADS"] = "1"
# Of the tests' servers, such as moto: the second part of an answer would wait 40 ms for the client's acknowledgement.
StreamRequestHandler.disable_nagle_algorithm = True
# Signals that a shell ignores in its background jobs, and nohup. A handler that does nothing ignores them here, and the
# processes that tests start, which would inherit the shell's choice, end by them.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)

# A share of the ports for each of pytest's processes: two of them that start Ray do not choose the same one.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
ports.FREE = ports.FREE[_worker::SHARES]

# Folders whose tests take long, and the marker that keeps them out of `make test`.
SLOW = {"commands": "ray", "containers": "container", "faults": "fault"}
# Folders whose tests share what takes long to start, such as a Ray head; one process runs all tests of one.
LANES = {
    "tests/commands/": "Ray",
    "tests/ray_on_ecs/checkpoint/": "checkpoints",
    "tests/bench/": "training",
    "tests/training/": "training",
    "tests/ray_on_ecs/cli/": "commands",
    "tests/test_deployer.py": "program",
    "tests/test_program.py": "program",
}
# The longest that CI accepts of a test without such a marker, on a machine that does nothing else.
LIMIT_SECONDS = 30.0
# Fractions of the requests to S3, and the number that pass after a failure, which exceeds the concurrent clients.
DROPPED, LOST, SPARED = 0.05, 0.05, 5


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the tests of a folder whose marker is excluded."""
    excluded = config.getoption("markexpr").split(" and ")
    is_excluded = collection_path.is_dir() and f"not {SLOW.get(collection_path.name)}" in excluded
    return is_excluded or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if mark := SLOW.get(item.path.parent.name):
            item.add_marker(mark)
    lanes = [*LANES.values(), None]
    items.sort(key=lambda item: lanes.index(_lane(item.nodeid)))  # the longest first


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection: the imported modules have a million objects, which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, fail a test that takes too long for `make test`. A busy machine gets more time."""
    report = yield
    limit = LIMIT_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    is_slow = report.passed and report.duration > limit
    if is_slow and "CI" in os.environ and not any(item.get_closest_marker(name) for name in SLOW.values()):
        report.outcome = "failed"
        report.longrepr = f"{report.when} took {report.duration:.0f} s; over {LIMIT_SECONDS:.0f} s it needs a marker"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the minutes of each lane."""
    minutes: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                minutes[_lane(report.nodeid) or "the rest"] += report.duration / 60
    if minutes:
        terminalreporter.write_line("minutes: " + ", ".join(f"{lane} {total:.1f}" for lane, total in minutes.items()))


def _lane(nodeid: str) -> str | None:
    return next((lane for folder, lane in LANES.items() if nodeid.startswith(folder)), None)


class Lanes(LoadScopeScheduling):
    """Runs each lane in one of pytest's processes, and the other tests in any free process.

    (`--dist loadgroup` would do this with a marker, but xdist 3.8 loses the marker under pytest 9.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return _lane(nodeid) or nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes | None:
    config.option.loadscopereorder = False  # by the number of tests
    return Lanes(config, log) if config.getoption("dist") == "load" else None


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
    info = {**workers(workers=node_group(zone="us-east-1a", max=2, default_nodes=0)), "prices": {"g5.xlarge": 3600}}
    client("ssm", aws_server).put_parameter(Name="workers", Type="String", Value=json.dumps(info))
    return {**aws_variables, CLUSTER_INFO_VARIABLE: "workers"}


@pytest.fixture(scope="session")
def cloudwatch_client(aws_server: str) -> Any:
    return client("cloudwatch", aws_server)
