"""What the tests of the components share."""

import pulumi
import pytest

from tests.infra.fake_aws import Cloud


@pytest.fixture
def cloud() -> Cloud:
    """An empty account."""
    return Cloud()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine is told to warn of."""
    told: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", told.append)
    return told
