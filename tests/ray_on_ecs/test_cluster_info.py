"""Cache of a run's reads: an answer for a minute, and the last one while AWS has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ray_on_ecs import cluster_info
from ray_on_ecs.cluster_info import READ_SECONDS, RETRY_SECONDS, read_cluster_info
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE

DOCUMENT: dict[str, Any] = dict.fromkeys(cluster_info.ClusterInfo.__required_keys__, 1)
Wait = Callable[[float], None]


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


def test_a_run_reads_once_in_a_minute(parameter: Parameter, wait: Wait) -> None:
    for _ in range(60):
        assert read_cluster_info() == DOCUMENT
        wait(10)
    assert parameter.reads == 10


def test_an_update_is_seen_within_a_minute(parameter: Parameter, wait: Wait) -> None:
    read_cluster_info()
    parameter.text = json.dumps({**DOCUMENT, "gpus": 8})
    wait(READ_SECONDS)
    assert (read_cluster_info() or {})["gpus"] == 8


@pytest.mark.parametrize("text", [None, "", "{", "null", '{"gpus": 1}'])
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
    parameter.text = json.dumps({**DOCUMENT, "gpus": 8})
    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, "another")
    assert (read_cluster_info() or {})["gpus"] == 8
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE)
    assert read_cluster_info() is None
