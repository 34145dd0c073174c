"""The image and one cluster of its containers for all tests; each test starts with a complete, healthy cluster."""

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.cluster import ROOT, Cluster, Trained, cluster_of
from tests.containers.engine import Engine
from tests.containers.image_layers import IMAGE

S3_IMAGE = "ray-on-ecs-s3"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tests that share a run come first: it is valid until a container is replaced.
    items.sort(key=lambda item: "trained" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def engine() -> Engine:
    command = os.environ.get("CONTAINER_ENGINE", "docker")
    return Engine(command, {"RAY_AUTH_TOKEN": secrets.token_hex(32)})


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The image that `make image` built."""
    engine.run("image", "inspect", IMAGE)
    return IMAGE


@pytest.fixture(scope="session")
def s3_image(engine: Engine) -> str:
    engine.run("build", "--tag", S3_IMAGE, str(ROOT / "docker" / "s3"), timeout=600)
    return S3_IMAGE


@pytest.fixture(scope="session")
def other_network(engine: Engine) -> Iterator[str]:
    with engine.network(f"other-{secrets.token_hex(3)}") as name:
        yield name


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, for every node."""
    folder = tmp_path_factory.mktemp("user") / "code"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="session")
def made(engine: Engine, image: str, s3_image: str, other_network: str, code: Path) -> Iterator[Cluster]:
    with cluster_of(engine, image, s3_image, code) as cluster:
        cluster.start_on_two_networks(other_network)
        yield cluster


@pytest.fixture
def cluster(made: Cluster) -> Cluster:
    """A head and two healthy workers."""
    made.settle()
    return made


@pytest.fixture
def trained(made: Cluster, other_network: str) -> Trained:
    """A finished run on the cluster's current containers, one of which is in two networks."""
    made.start_on_two_networks(other_network)
    made.settle()
    return made.trained()
