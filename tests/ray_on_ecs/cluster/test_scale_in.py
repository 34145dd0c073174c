"""Scale-in of idle workers, and each of the states in which AWS does not scale in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ray_on_ecs.cluster.aws_status import Service
from ray_on_ecs.cluster.scale_in import Facts, ScaleIn, describe, in_words
from ray_on_ecs.starting import states
from ray_on_ecs.starting.deployments import in_progress
from ray_on_ecs.starting.states import Phase

BEGUN = datetime(2026, 2, 28, 11, 58, tzinfo=UTC)
ALARM = {"StateValue": "ALARM", "ActionsEnabled": True, "StateUpdatedTimestamp": BEGUN}
TARGET = {"SuspendedState": {"DynamicScalingInSuspended": False}}
NAMES = {"region": "us-west-2", "group": "g", "alarm": "ray-workers-idle", "resource": "service/ray/workers"}
STOP = "idle workers stop after 30 minutes"


def deployed(*of_running: int, state: str = "IN_PROGRESS", begun: datetime = BEGUN) -> Any:
    statuses = ["PRIMARY", *["ACTIVE"] * len(of_running)]
    found = [
        {"status": status, "rolloutState": state, "createdAt": begun, "runningCount": running}
        for status, running in zip(statuses, (2, *of_running), strict=False)
    ]
    return in_progress({"deployments": found})


def line(**changed: Any) -> str:
    limits = {"pool": "default", "min": 0, "max": 8, "idle_minutes": 30}
    changed["scale"] = limits | changed.get("scale", {})
    facts: dict[str, Any] = {
        "kind": "workers",
        "service": Service(8, 8, None),
        "alarm": ALARM,
        "target": TARGET,
        "names": NAMES,
    }
    text = describe(Facts(**facts | changed))
    return f"{text.line} | {text.fix}" if text else ""


@pytest.mark.parametrize(("minutes", "old_tasks", "is_said"), [(1, 0, False), (11, 0, True), (1, 2, True)])
def test_deployment_that_waits_for_nothing_ends_soon(minutes: int, old_tasks: int, is_said: bool) -> None:
    begun = datetime.now(UTC) - timedelta(minutes=minutes)
    text = line(service=Service(8, 8, None, deployed(*filter(None, [old_tasks]), begun=begun)))
    assert ("a deployment is in progress" in text) is is_said
    assert "scaling in" not in text, "ECS does not scale in during a deployment"


def test_active_alarm_is_scaling_in() -> None:
    assert line() == "scaling in workers since 11:58 UTC | "
    assert line(alarm={**ALARM, "StateUpdatedTimestamp": None}) == "scaling in workers | "


@pytest.mark.parametrize("state", ["OK", "INSUFFICIENT_DATA", "A_NEW_ONE"])
def test_other_states_of_the_alarm_wait(state: str) -> None:
    assert line(alarm={**ALARM, "StateValue": state}) == f"{STOP} | "


@pytest.mark.parametrize("unknown", ["alarm", "target", "service"])
def test_unknown_answer_is_no_hindrance(unknown: str) -> None:
    assert "keep running" not in line(**{unknown: None})


# Each with the active alarm, and what it says instead of "scaling in".
HINDRANCES: dict[str, tuple[dict[str, Any], str]] = {
    "deployment": (
        {"service": Service(8, 8, None, deployed(2))},
        "idle workers keep running: a deployment is in progress since 2026-02-28 11:58 UTC: it waits for the runs on 2 "
        "tasks of the earlier version, which are protected; ECS does not scale in before its end | ",
    ),
    "deployment of new tasks": (
        {"service": Service(8, 8, None, deployed())},
        "idle workers keep running: a deployment is in progress since 2026-02-28 11:58 UTC; ECS does not scale in befo",
    ),
    "disabled actions": (
        {"alarm": {**ALARM, "ActionsEnabled": False}},
        "idle workers keep running: the actions of alarm ray-workers-idle are disabled | aws cloudwatch enable-alarm-a",
    ),
    "no alarm": ({"alarm": {}}, "idle workers keep running: alarm ray-workers-idle is missing | pulumi up"),
    "no target": ({"target": {}}, "idle workers keep running: the service has no scalable target | pulumi up"),
    "suspended target": (
        {"target": {"SuspendedState": {"DynamicScalingInSuspended": True}}},
        "idle workers keep running: its scale-in is suspended in Application Auto Scaling | aws application-autoscali",
    ),
    "suspended group": ({"suspended": ["Terminate"]}, "idle workers keep running: the process Terminate of their Au"),
    "minimum": ({"scale": {"min": 8, "max": 9, "idle_minutes": 30}}, "8 workers keep running (minWorkers) | "),
    "fixed number": ({"scale": {"min": 8, "max": 8, "idle_minutes": 30}}, "all 8 workers keep running (minWorkers) | "),
    "never": (
        {"scale": {"min": 0, "max": 8, "idle_minutes": 0}},
        "idle workers keep running (idleTimeoutMinutes is 0)",
    ),
}


@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_hindered_scale_in_is_never_called_scaling_in(hindrance: str) -> None:
    changed, says = HINDRANCES[hindrance]
    assert line(**changed).startswith(says)


def test_idle_workers_have_their_cost_while_they_are_kept() -> None:
    idle = "6 idle workers cost 6.04 USD an hour"
    assert f"before its end; {idle} meanwhile" in line(service=Service(8, 8, None, deployed(2)), idle=idle)


@pytest.mark.parametrize("state", [*states.ROLLOUTS, "A_NEW_ONE"])
def test_deployment_of_each_state(state: str) -> None:
    assert (deployed(1, state=state) is not None) is (states.ROLLOUTS.get(state) is Phase.STARTING)


def test_kind_without_nodes_is_named() -> None:
    assert line(scale={"max": 0}).startswith("no workers are configured (maxWorkers is 0)")
    assert line(kind="cpu-workers", scale={"max": 0, "pool": "cpu"}) == ""
    text = line(kind="h100-workers", scale={"max": 0, "pool": "h100"})
    assert text.startswith("no h100-workers are configured (workerPools.h100.max is 0)")


@pytest.mark.parametrize(
    ("pool", "key"), [("default", "minWorkers"), ("cpu", "minCpuWorkers"), ("h100", "workerPools.h100.min")]
)
def test_minimum_is_named_by_its_key(pool: str, key: str) -> None:
    service = Service(1, 1, None)
    assert line(scale={"pool": pool, "min": 1}, service=service).startswith(f"1 workers keep running ({key})")
    assert line(scale={"pool": pool, "min": 8}).startswith(f"all 8 workers keep running ({key})")
    assert f", down to 1 ({key})" in line(scale={"pool": pool, "min": 1}, alarm=None)


LINES = {
    "workers": "idle workers stop after 30 minutes",
    "workers-b": "idle workers-b stop after 30 minutes",
    "h100-workers": "all 2 h100-workers keep running (workerPools.h100.min)",
    "l4-workers-c": "idle l4-workers-c stop after 30 minutes",
}
SAID = {
    ("workers",): "idle workers stop after 30 minutes",
    ("workers", "workers-b"): "idle workers and workers-b stop after 30 minutes",
    tuple(LINES): "idle workers, workers-b and l4-workers-c stop after 30 minutes; "
    "all 2 h100-workers keep running (workerPools.h100.min)",
    (): "",
}


@pytest.mark.parametrize("kinds", SAID)
def test_same_line_of_several_kinds_is_said_once(kinds: tuple[str, ...]) -> None:
    assert in_words({kind: ScaleIn(LINES[kind]) for kind in kinds}) == SAID[kinds]
