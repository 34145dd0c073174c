"""The parameter with a worker's price: in the clear, and there whether or not AWS has said one."""

from __future__ import annotations

import json

import pytest

from infra.definitions.sizing import InstanceType, TaskSize
from infra.references import NodeSpec
from infra.worker_price import WorkerPrice, WorkerPriceArgs
from tests.infra.fake_aws import Cloud


@pytest.mark.parametrize("usd", [1.006, None])
def test_runs_find_the_price_or_that_there_is_none(cloud: Cloud, usd: float | None) -> None:
    instance = InstanceType(name="g5.xlarge", vcpus=4, memory_mib=16384, architectures=("x86_64",), gpus=1)
    task = TaskSize(vcpus=4, memory_mib=14336, gpus=1)
    worker = NodeSpec(key="workerInstanceType", instance=instance, task=task, max_count=2, usd=usd)
    made = cloud.run(lambda: WorkerPrice("worker-price", WorkerPriceArgs(worker=worker)))
    parameter = cloud.resources["worker-price-parameter"].inputs
    assert parameter["type"] == "String", "no key is needed to read it"
    expected = {"instance_type": "g5.xlarge", "hourly_usd": 1.006} if usd else None
    assert json.loads(parameter["value"]["value"]) == expected, "the SDK makes a secret of any parameter's value"
    assert cloud.value(made.parameter.name) == "worker-price-parameter"
