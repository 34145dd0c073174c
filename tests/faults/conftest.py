"""Faults take minutes, since clusters are killed and come back: `make test-faults` runs what is here."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.fault)
            item.add_marker(pytest.mark.timeout(900))
