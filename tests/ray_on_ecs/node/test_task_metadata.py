"""Pull of a node's image, from answers of the ECS agent's metadata endpoint: whole, half, and of other programs."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ray_on_ecs.node import api, labels, task_metadata
from ray_on_ecs.node.task_metadata import METADATA_VARIABLE, pull_of, read_pull
from tests.serving import serving

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


class Agent(BaseHTTPRequestHandler):
    """The ECS agent's endpoint."""

    status, body = 200, b""

    def do_GET(self) -> None:
        """Answer for the task."""
        found = self.path == "/v4/1234/task"
        self.send_response(self.status if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(self.body if found else b"")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def of_agent(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes) -> dict[str, float]:
    monkeypatch.setattr(Agent, "status", status)
    monkeypatch.setattr(Agent, "body", body)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Agent)) as server:
        monkeypatch.setenv(METADATA_VARIABLE, f"http://127.0.0.1:{server.server_port}/v4/1234")
        return read_pull()


def test_agent_is_asked_for_the_task(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert of_agent(monkeypatch, 200, json.dumps(TASK).encode()) == {
        name: pytest.approx(seconds) for name, seconds in PULL.items()
    }
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, b"x"), (404, b""), (429, b"{}"), (403, b""), (200, b"{"), (200, b"\xff"), (200, b"")],
    ids=["an error", "no such path", "throttled", "refused", "half an answer", "not text", "nothing"],
)
def test_agent_that_fails_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, body: bytes
) -> None:
    assert of_agent(monkeypatch, status, body) == {}
    assert capsys.readouterr().err.count("\n") == 1


def test_agent_that_is_away_costs_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(api, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setenv(METADATA_VARIABLE, "http://127.0.0.1:9/v4/1234")
    assert read_pull() == {}
    assert capsys.readouterr().err.startswith("ray-worker: ECS's agent does not tell when the image was pulled (")


def test_nothing_is_asked_outside_ecs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(METADATA_VARIABLE, raising=False)
    assert read_pull() == {}
    assert capsys.readouterr().err == ""


def test_pull_is_in_the_labels_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_metadata, "read_pull", lambda: PULL)
    assert labels.flags()[0].endswith(",pulling=1767225890.434,pulled=1767226080.657")
