from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.training.ranks import Ranks


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Ranks]:
    """Calls a function on several ranks."""
    from tests.training.ranks import Ranks

    with Ranks() as ranks:
        yield ranks
