"""The image and a cluster of its containers, made once; each test finds the cluster whole."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.image import IMAGE
from tests.containers.cluster import ROOT, Cluster
from tests.containers.engine import Engine

S3_IMAGE = "ray-on-ecs-s3"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.container)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def engine() -> Engine:
    command = os.environ.get("CONTAINER_ENGINE", "docker")
    return Engine(command, {"RAY_AUTH_TOKEN": secrets.token_hex(32)})


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The image that `make image` has built."""
    engine.run("image", "inspect", IMAGE)
    return IMAGE


@pytest.fixture(scope="session")
def made(engine: Engine, image: str) -> Iterator[Cluster]:
    engine.run("build", "--tag", S3_IMAGE, str(ROOT / "docker" / "s3"), timeout=600)
    with engine.network(f"ray-{secrets.token_hex(3)}") as network:
        cluster = Cluster(engine, image, network)
        try:
            cluster.start_storage(S3_IMAGE)
            yield cluster
        finally:
            cluster.close()


@pytest.fixture
def cluster(made: Cluster) -> Iterator[Cluster]:
    """A head and two workers that are well, and a new head where a run of this test is left."""
    made.settle()
    yield made
    if any(run.is_alive() for run in made.runs):
        made.engine.remove(made.head)
    made.runs.clear()
