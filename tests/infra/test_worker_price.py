"""The parameter with a worker's price: in the clear, and there whether or not AWS has said one."""

from __future__ import annotations

import json

import pytest

from infra.prices import Price
from infra.worker_price import WorkerPrice, WorkerPriceArgs
from tests.infra.fake_aws import Cloud


@pytest.mark.parametrize("price", [Price(instance_type="g5.xlarge", hourly_usd=1.006), None])
def test_runs_find_the_price_or_that_there_is_none(cloud: Cloud, price: Price | None) -> None:
    made = cloud.run(lambda: WorkerPrice("worker-price", WorkerPriceArgs(price=price)))
    parameter = cloud.resources["worker-price-parameter"].inputs
    assert parameter["type"] == "String", "no key is needed to read it"
    expected = {"instance_type": "g5.xlarge", "hourly_usd": 1.006} if price else None
    assert json.loads(parameter["value"]["value"]) == expected, "the SDK makes a secret of any parameter's value"
    assert cloud.value(made.parameter.name) == "worker-price-parameter"
