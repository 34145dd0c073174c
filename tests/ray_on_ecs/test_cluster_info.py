"""Cluster info: what the parameter may hold, and the cache of reads: the last answer while AWS has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ray_on_ecs import cluster_info
from ray_on_ecs.cluster_info import READ_SECONDS, RETRY_SECONDS, NodeGroup, parse_cluster_info, read_cluster_info
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from tests.worker_pools import node_group

SCALING: dict[str, Any] = {"min": 1, "max": 4, "idle_minutes": 30, "units": 4, "group": "group", "provider": "provider"}
# As a stack without other pools writes it.
DOCUMENT: dict[str, Any] = {
    "cluster": "ray",
    "group": "group",
    "types": ["g5.12xlarge", "g5.24xlarge"],
    "gpus": 4,
    "default_gpus": 8,
    "zones": [{"zone": "us-west-2a", "subnet_id": "subnet-1", "placement_group": None}],
    "spot": True,
    "spread": False,
    "prices": {"g5.12xlarge": 5.7, "g5.24xlarge": 8.2},
    "disk_usd": 0.02,
    "head_usd": 0.1,
    "scaling": {"workers": SCALING, "cpu-workers": {**SCALING, "units": 8}},
}
POOLS: dict[str, Any] = {
    "workers-b": node_group(zone="us-west-2b"),
    "h100-workers": node_group("h100", "p5.48xlarge", units=8),
}
Wait = Callable[[float], None]


def parsed(**changed: Any) -> Any:
    return parse_cluster_info(json.dumps({**DOCUMENT, **changed}))


# Content


def test_the_documents_own_keys_describe_two_kinds() -> None:
    limits = {**SCALING, "zones": ["us-west-2a"], "disk_usd": 0.02}
    own = {"pool": "default", "types": DOCUMENT["types"], "gpu": "A10G", "spot": True, "default_nodes": 2}
    cpu = {"pool": "cpu", "types": [], "gpu": "", "spot": False, "default_nodes": 4, "units": 8}
    assert parsed() == {
        "cluster": "ray",
        "groups": {"workers": {**limits, **own}, "cpu-workers": {**limits, **cpu}},
        "prices": DOCUMENT["prices"],
        "head_usd": 0.1,
    }


def test_cpu_workers_have_types_since_a_version() -> None:
    cpu = {**SCALING, "types": ["m7i.xlarge"]}
    groups = parsed(scaling={"workers": SCALING, "cpu-workers": cpu})["groups"]
    assert groups["cpu-workers"]["types"] == ["m7i.xlarge"]


def test_other_kinds_follow_in_their_order() -> None:
    groups = parsed(pools=POOLS)["groups"]
    assert [*groups] == ["workers", "cpu-workers", "workers-b", "h100-workers"]
    assert groups["h100-workers"] == POOLS["h100-workers"]


@pytest.mark.parametrize(
    ("changed", "group"),
    [
        ({"spread": True, "zones": [{"zone": "a"}, {"zone": "b"}]}, {"zones": ["a", "b"]}),
        ({"zones": [{"zone": "a"}, {"zone": "b"}]}, {"zones": ["a"]}),
        ({"gpu": "RTX PRO Server 6000"}, {"gpu": "RTX PRO Server 6000"}),
        ({"types": ["g5.xlarge", "g6.xlarge"]}, {"gpu": "A10G or L4"}),
        ({"types": ["x9.xlarge"]}, {"gpu": "GPU"}),
        ({"default_gpus": 0}, {"default_nodes": 0}),
    ],
)
def test_variants_of_the_default_pool(changed: dict[str, Any], group: dict[str, Any]) -> None:
    assert group.items() <= parsed(**changed)["groups"]["workers"].items()


@pytest.mark.parametrize("key", [*DOCUMENT])
def test_a_document_without_a_key_is_used_or_not_complete(key: str) -> None:
    document = {name: value for name, value in DOCUMENT.items() if name != key}
    unused = {"cluster", "group", "gpus", "default_gpus", "disk_usd"}
    assert (parse_cluster_info(json.dumps(document)) is not None) == (key in unused)


@pytest.mark.parametrize("key", sorted(NodeGroup.__required_keys__))
def test_a_node_group_without_a_key_is_not_complete(key: str) -> None:
    group = {name: value for name, value in POOLS["h100-workers"].items() if name != key}
    assert parsed(pools={"h100-workers": group}) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "1", '"text"', '{"gpus": 1}', json.dumps({**DOCUMENT, "scaling": None}),
     json.dumps({**DOCUMENT, "pools": ["h100"]}), json.dumps({**DOCUMENT, "pools": {"h100-workers": None}}),
     json.dumps({**DOCUMENT, "zones": ["us-west-2a"]}), json.dumps({**DOCUMENT, "pools": None}),
     json.dumps({**DOCUMENT, "scaling": {"workers": {**SCALING, "units": 0}}})],
)  # fmt: skip
def test_other_content_is_not_used(text: str) -> None:
    assert parse_cluster_info(text) is None


# Reads


class Parameter:
    """The SSM parameter: its value, None while it can't be read, and the number of reads."""

    def __init__(self) -> None:
        self.text: str | None = json.dumps(DOCUMENT)
        self.reads = 0

    def ask(self, service: str, method: str, **given: Any) -> Any:
        self.reads += 1
        return self.text and {"Parameter": {"Value": self.text}}


@pytest.fixture
def parameter(monkeypatch: pytest.MonkeyPatch) -> Parameter:
    made = Parameter()
    monkeypatch.setattr(cluster_info, "ask_aws", made.ask)
    monkeypatch.setattr(cluster_info, "_answers", {})
    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, "parameter")
    return made


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    now = 1000.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(cluster_info.time, "monotonic", lambda: now)
    return pass_by


def head_usd() -> float | None:
    info = read_cluster_info()
    return info and info["head_usd"]


def test_a_run_reads_once_in_a_minute(parameter: Parameter, wait: Wait) -> None:
    for _ in range(60):
        assert read_cluster_info() == parsed()
        wait(10)
    assert parameter.reads == 10


def test_an_update_is_seen_within_a_minute(parameter: Parameter, wait: Wait) -> None:
    read_cluster_info()
    parameter.text = json.dumps({**DOCUMENT, "head_usd": 0.5})
    wait(READ_SECONDS)
    assert head_usd() == 0.5


@pytest.mark.parametrize("text", [None, "", "{", "null", '{"gpus": 1}'])
def test_a_failed_read_keeps_the_last_answer(text: str | None, parameter: Parameter, wait: Wait) -> None:
    read_cluster_info()
    parameter.text = text
    for _ in range(3):
        wait(READ_SECONDS)
        assert read_cluster_info() == parsed()
    assert parameter.reads == 4


def test_a_first_read_that_fails_is_repeated_soon(parameter: Parameter, wait: Wait) -> None:
    parameter.text = None
    assert [read_cluster_info(), read_cluster_info(), parameter.reads] == [None, None, 1]
    parameter.text = json.dumps(DOCUMENT)
    wait(RETRY_SECONDS)
    assert read_cluster_info() == parsed()


def test_each_cluster_has_its_own_answer(parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    read_cluster_info()
    parameter.text = json.dumps({**DOCUMENT, "head_usd": 0.5})
    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, "another")
    assert head_usd() == 0.5
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE)
    assert read_cluster_info() is None


def test_efa_and_bandwidth_are_read_where_they_are_known() -> None:
    scaling = {**DOCUMENT["scaling"], "workers": {**DOCUMENT["scaling"]["workers"], "efa": 4}}
    info = parse_cluster_info(json.dumps({**DOCUMENT, "scaling": scaling, "network_gbits": {"g5.12xlarge": 40.0}}))
    assert info is not None
    assert [group.get("efa", 0) for group in info["groups"].values()] == [4, 0]
    assert info["network_gbits"] == {"g5.12xlarge": 40.0}
