"""A command refuses GPUs and pools that the cluster does not have, as far as its machine knows."""

from __future__ import annotations

from typing import Any

import pytest

from ray_on_ecs.cluster import clusters
from ray_on_ecs.cluster.clusters import BucketCluster, ComposeCluster, HeadCluster, LocalCluster, StackCluster
from ray_on_ecs.config import RunConfig
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.errors import HeadUnavailable, UsageError
from ray_on_ecs.jobs.documents import HeadState
from tests.worker_pools import node_group, workers

INFO: Any = workers(h100_workers=node_group("h100", "p5.48xlarge", units=8, max=2))


def config(**settings: Any) -> RunConfig:
    return RunConfig(command=("train.py",), **settings)


class Remote(BucketCluster):
    """A cluster whose bucket has this state of the head."""

    def __init__(self, state: Any) -> None:
        super().__init__("s3://the-bucket")
        self._given_state = state

    def jobs(self, say: Any = None) -> Any:
        return self

    def state(self) -> Any:
        if isinstance(self._given_state, Exception):
            raise self._given_state
        return self._given_state, 1.0


class OfStack(Remote, StackCluster):
    """A stack's cluster whose bucket has this state of the head."""


@pytest.mark.parametrize("how", ["stack", "head", "bucket"])
def test_unknown_names_are_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv(CLUSTER_INFO_VARIABLE, "/ray/cluster-info")
    monkeypatch.setattr(clusters, "read_cluster_info", lambda: INFO)
    cluster = {
        "stack": lambda: OfStack(HeadState(ray=INFO)),
        "head": HeadCluster,
        "bucket": lambda: Remote(HeadState(ray=INFO)),
    }[how]()
    for settings in ({}, {"gpu": "h100"}, {"pool": "h100"}, {"device": "cpu"}):
        cluster.check_settings(config(**settings))
    for settings, line in {
        ("gpu", "A100"): r"--gpu: 'A100' is not a GPU of this stack; .*it has h100 \(2 x p5.48xlarge",
        ("pool", "a100"): r"--pool: 'a100' is not a pool of this stack; .*it has h100 \(2 x p5.48xlarge",
    }.items():
        with pytest.raises(UsageError, match=line):
            cluster.check_settings(config(**dict([settings])))


@pytest.mark.parametrize(
    "state",
    [
        HeadUnavailable("no head has written it yet"),
        HeadState(),
        HeadState(ray={"groups": None}),
        HeadState(ray={"groups": {}}),
        HeadState(ray={"groups": ["h100"]}),
        HeadState(ray={"groups": {"h100": "8 x H100"}}),
    ],
)
def test_state_of_another_head_refuses_nothing(state: Any) -> None:
    Remote(state).check_settings(config(gpu="A100"))


@pytest.mark.parametrize("name", ["gpu", "pool"])
@pytest.mark.parametrize("kind", [LocalCluster, ComposeCluster, HeadCluster])
def test_pools_of_the_environment_do_not_hold_without_a_stack(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: Any
) -> None:
    monkeypatch.delenv(CLUSTER_INFO_VARIABLE, raising=False)
    monkeypatch.setenv(f"RAY_ON_ECS_{name.upper()}", "H100")
    assert kind().check_settings(config(**{name: "H100"})) == config()
    with pytest.raises(UsageError, match=f"--{name}: .* has no pools; leave it out"):
        kind().check_settings(config(**{name: "A100"}))
