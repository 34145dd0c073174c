"""Pull of a node's image, from answers of the ECS agent's metadata endpoint: whole, half, and of other programs."""

from __future__ import annotations

from typing import Any

import pytest

from ray_on_ecs.node import api, labels, task_metadata
from ray_on_ecs.node.task_metadata import METADATA_VARIABLE, pull_of, read_pull

COMMAND_NAME = "ray-worker"

# In the form of "Example task metadata response" in the ECS developer guide, with the agent's container for awsvpc.
PAUSE = {"Name": "~internal~ecs~pause", "CreatedAt": "2026-01-01T00:04:00.1Z", "Type": "CNI_PAUSE"}
WORKER = {
    "Name": "ray-worker",
    "KnownStatus": "CREATED",
    "CreatedAt": "2026-01-01T00:08:01.620912337Z",
    "Type": "NORMAL",
}
TASK = {
    "Cluster": "ray-cluster",
    "TaskARN": "arn:aws:ecs:us-west-2:111122223333:task/ray-cluster/8f03e412",
    "KnownStatus": "NONE",
    "PullStartedAt": "2026-01-01T00:04:50.43438523Z",
    "PullStoppedAt": "2026-01-01T00:08:00.657386646Z",
    "LaunchType": "EC2",
    "Containers": [PAUSE, WORKER],
}
PULL = {"pulling": 1_767_225_890.434385, "pulled": 1_767_226_080.657386}
CREATED = 1_767_226_081.620912
ANSWERS: dict[str, tuple[Any, dict[str, float]]] = {
    "all": (TASK, PULL),
    "an image that was there": (
        {name: value for name, value in TASK.items() if not name.startswith("Pull")},
        {"pulling": CREATED, "pulled": CREATED},
    ),
    "no end": ({**TASK, "PullStoppedAt": None}, {"pulling": PULL["pulling"], "pulled": CREATED}),
    "no begin": ({**TASK, "PullStartedAt": None}, {"pulled": PULL["pulled"]}),
    "Go's zero times": (
        {**TASK, "PullStartedAt": "0001-01-01T00:00:00Z", "PullStoppedAt": "0001-01-01T00:00:00Z"},
        {"pulling": CREATED, "pulled": CREATED},
    ),
    "no containers": ({**TASK, "Containers": None}, PULL),
    "neither": ({"Containers": [PAUSE]}, {}),
    "not created yet": ({"PullStartedAt": TASK["PullStartedAt"], "Containers": [{}]}, {"pulling": PULL["pulling"]}),
    "times of another form": ({"PullStartedAt": "soon", "PullStoppedAt": {}, "Containers": [{"CreatedAt": []}]}, {}),
    "containers of another form": ({**TASK, "Containers": [None, 1, "x", []]}, PULL),
    "an object of containers": ({**TASK, "Containers": {"CreatedAt": "x"}}, PULL),
    "an empty object": ({}, {}),
    "null": (None, {}),
    "a list": ([TASK], {}),
    "a text": ("<html>login</html>", {}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_pull_is_what_the_answer_tells(name: str) -> None:
    task, pull = ANSWERS[name]
    assert pull_of(task) == {label: pytest.approx(seconds) for label, seconds in pull.items()}


def test_agent_is_asked_for_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setenv(METADATA_VARIABLE, "http://169.254.170.2/v4/1234")
    monkeypatch.setattr(api, "ask", lambda url, token: asked.append((url, token)) or TASK)
    assert read_pull() == {name: pytest.approx(seconds) for name, seconds in PULL.items()}
    assert asked == [("http://169.254.170.2/v4/1234/task", "")]


def test_agent_that_is_away_costs_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(api, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setenv(METADATA_VARIABLE, "http://127.0.0.1:9/v4/1234")
    assert read_pull() == {}
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ray-worker: ECS's agent does not tell when the image was pulled (")


def test_nothing_is_asked_outside_ecs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(METADATA_VARIABLE, raising=False)
    assert read_pull() == {}
    assert capsys.readouterr().err == ""


def test_pull_is_in_the_labels_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_metadata, "read_pull", lambda: PULL)
    assert labels.flags()[0].endswith(",pulling=1767225890.434,pulled=1767226080.657")
