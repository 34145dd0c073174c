"""The parameter with a worker's price: in the clear, and there whether or not AWS has said one."""

from __future__ import annotations

import json

import pytest

from infra.worker_price import WorkerPrice, WorkerPriceArgs
from tests.infra.fake_aws import Cloud, node_spec


@pytest.mark.parametrize("usd", [1.006, None])
def test_runs_find_the_price_or_that_there_is_none(cloud: Cloud, usd: float | None) -> None:
    worker = node_spec("g5.xlarge", gpus=1, usd=usd)
    made = cloud.run(lambda: WorkerPrice("worker-price", WorkerPriceArgs(worker=worker)))
    parameter = cloud.resources["worker-price-parameter"].inputs
    assert parameter["type"] == "String", "no key is needed to read it"
    expected = {"instance_type": "g5.xlarge", "hourly_usd": 1.006} if usd else None
    assert json.loads(parameter["value"]["value"]) == expected, "the SDK makes a secret of any parameter's value"
    assert cloud.value(made.parameter.name) == "worker-price-parameter"
