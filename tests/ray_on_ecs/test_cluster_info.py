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

DOCUMENT: dict[str, Any] = {
    "cluster": "ray",
    "groups": {
        "workers": node_group("default", "g5.12xlarge", units=4, efa=4, spot=True),
        "workers-b": node_group("default", "g5.12xlarge", units=4, zone="us-west-2b"),
        "h100-workers": node_group("h100", "p5.48xlarge", reservation={"id": "cr-0123456789abcdef0", "is_block": True}),
    },
    "prices": {"g5.12xlarge": 5.7},
    "head_usd": 0.1,
    "network_gbits": {"g5.12xlarge": 40.0},
}
Wait = Callable[[float], None]


# Content


def test_the_document_is_the_cluster_info() -> None:
    assert parse_cluster_info(json.dumps(DOCUMENT)) == DOCUMENT


def test_values_that_a_stack_lacks_are_not_missing() -> None:
    document = {**DOCUMENT, "prices": None, "head_usd": None, "network_gbits": {}}
    assert parse_cluster_info(json.dumps(document)) == document


@pytest.mark.parametrize("key", [*DOCUMENT])
def test_a_document_without_a_key_is_not_complete(key: str) -> None:
    document = {name: value for name, value in DOCUMENT.items() if name != key}
    assert parse_cluster_info(json.dumps(document)) is None


@pytest.mark.parametrize("key", sorted(NodeGroup.__required_keys__))
def test_a_node_group_without_a_key_is_not_complete(key: str) -> None:
    group = {name: value for name, value in DOCUMENT["groups"]["h100-workers"].items() if name != key}
    document = {**DOCUMENT, "groups": {**DOCUMENT["groups"], "h100-workers": group}}
    assert parse_cluster_info(json.dumps(document)) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "1", '"text"', '{"groups": {}}',
     *(json.dumps({**DOCUMENT, "groups": groups}) for groups in (None, ["h100"], {"h100-workers": None}))],
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
        assert read_cluster_info() == DOCUMENT
        wait(10)
    assert parameter.reads == 10


def test_an_update_is_seen_within_a_minute(parameter: Parameter, wait: Wait) -> None:
    read_cluster_info()
    parameter.text = json.dumps({**DOCUMENT, "head_usd": 0.5})
    wait(READ_SECONDS)
    assert head_usd() == 0.5


@pytest.mark.parametrize("text", [None, "", "{", "null", '{"groups": {}}'])
def test_a_failed_read_keeps_the_last_answer(text: str | None, parameter: Parameter, wait: Wait) -> None:
    read_cluster_info()
    parameter.text = text
    for _ in range(3):
        wait(READ_SECONDS)
        assert read_cluster_info() == DOCUMENT
    assert parameter.reads == 4


def test_a_first_read_that_fails_is_repeated_soon(parameter: Parameter, wait: Wait) -> None:
    parameter.text = None
    assert [read_cluster_info(), read_cluster_info(), parameter.reads] == [None, None, 1]
    parameter.text = json.dumps(DOCUMENT)
    wait(RETRY_SECONDS)
    assert read_cluster_info() == DOCUMENT


def test_each_cluster_has_its_own_answer(parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    read_cluster_info()
    parameter.text = json.dumps({**DOCUMENT, "head_usd": 0.5})
    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, "another")
    assert head_usd() == 0.5
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE)
    assert read_cluster_info() is None
