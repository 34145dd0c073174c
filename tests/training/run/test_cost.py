"""What a run has cost, by the price that the stack leaves in a parameter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.aws import client
from training.run.cost import PARAMETER_VARIABLE, cost_line, cost_of

NAME = "price-of-the-tests"


@pytest.fixture
def put_price(
    aws_server: str, aws_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Any]]:
    """Puts a value into the parameter, which is not there before."""
    for name, value in {**aws_variables, PARAMETER_VARIABLE: NAME}.items():
        monkeypatch.setenv(name, value)
    ssm = client("ssm", aws_server)
    yield lambda value: ssm.put_parameter(Name=NAME, Type="String", Value=value)
    ssm.delete_parameters(Names=[NAME])


def test_it_is_the_hours_by_the_price(put_price: Callable[[str], Any]) -> None:
    put_price('{"instance_type": "g5.xlarge", "hourly_usd": 1.006}')
    cost = cost_of(0.5)
    assert cost == {"usd": 0.503, "instance_hours": 0.5, "instance_type": "g5.xlarge", "hourly_usd": 1.006}
    assert cost_line(cost) == ", 0.50 USD for 0.50 h of g5.xlarge"


@pytest.mark.parametrize("value", ["null", "no JSON", None])
def test_without_a_price_it_is_not_known(put_price: Callable[[str], Any], value: str | None) -> None:
    if value is not None:
        put_price(value)
    assert cost_of(0.5) is None
    assert cost_line(None) == ""


def test_without_a_stack_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARAMETER_VARIABLE, raising=False)
    assert cost_of(0.5) is None
