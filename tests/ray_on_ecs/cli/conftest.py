"""A laptop with a separate stack."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_on_ecs.cli.account import Laptop, laptop


@pytest.fixture
def stack(aws_server: str, tmp_path: Path) -> Iterator[Laptop]:
    with laptop(aws_server, tmp_path) as made:
        yield made
