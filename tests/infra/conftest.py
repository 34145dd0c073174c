"""Shared fixtures of the component tests."""

import pulumi
import pytest

from tests.infra.fake_aws import Cloud


@pytest.fixture
def cloud() -> Cloud:
    """An empty account."""
    return Cloud()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Logged warnings."""
    told: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", told.append)
    return told
