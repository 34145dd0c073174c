"""What the tests of the components share."""

import pytest

from tests.infra.fake_aws import Cloud


@pytest.fixture
def cloud() -> Cloud:
    """An empty account."""
    return Cloud()
