"""Baseline bandwidth of instance types, from EC2's description to the parameter that a run reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infra.config import lookups
from infra.definitions.sizing import network_gbits
from tests.infra.fake_aws import Cloud, node_spec
from tests.infra.test_cluster_info import facts

GBITS = {
    "g4dn.xlarge": 5.0,
    "g5.xlarge": 2.5,
    "g5.48xlarge": 100.0,
    "g6e.xlarge": 2.5,
    "g6e.24xlarge": 200.0,  # each of its two cards has it whole
    "g6e.48xlarge": 400.0,
    "p4d.24xlarge": 400.0,
    "p5.48xlarge": 3200.0,
    "p5en.48xlarge": 3200.0,
    "p6-b300.48xlarge": 6400.0,
    "m5.xlarge": 1.25,
}


@pytest.mark.parametrize(("name", "gbits"), GBITS.items())
def test_bandwidth_of_a_type_is_looked_up(cloud: Cloud, name: str, gbits: float) -> None:
    def look_up() -> Any:
        questions = lookups.instance_types("workerInstanceTypes", [name], "us-west-2", ["on-demand"])
        return lookups.described(questions, lookups.ask_all(questions))

    [found] = cloud.run(look_up)
    assert found.network_gbits == gbits


@pytest.mark.parametrize(
    ("performance", "gbits"), [("High", 0.0), ("Moderate", 0.0), ("", 0.0), ("Up to 5 Gigabit", 0.0)]
)
def test_type_without_a_known_baseline_has_none(performance: str, gbits: float) -> None:
    assert network_gbits([], performance) == gbits


def test_run_finds_the_bandwidth_of_each_type(cloud: Cloud) -> None:
    worker, head = node_spec("g5.xlarge", gpus=1), node_spec("m5.xlarge", 1)
    worker, head = (
        replace(node, instances=(replace(node.instances[0], network_gbits=gbits),))
        for node, gbits in ((worker, 2.5), (head, 1.25))
    )
    assert facts(cloud, worker, head)["network_gbits"] == {"g5.xlarge": 2.5}
