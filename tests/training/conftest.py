from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.training.ranks import Ranks


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Ranks]:
    """Calls a function on several ranks."""
    from tests.training.ranks import Ranks

    with Ranks() as ranks:
        yield ranks


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, aws_variables: dict[str, str], s3_client: Any) -> Any:
    """A boto3 client of the S3 that the training finds in its environment."""
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)
    return s3_client
