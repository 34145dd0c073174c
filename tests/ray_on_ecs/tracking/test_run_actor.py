"""The clients of a run's actor when Ray does not answer; see test_ray_private.py for a Ray that does."""

from typing import Any

import pytest
from ray.exceptions import GetTimeoutError
from ray_on_ecs.tracking.run_actor import Progress, RunClient, create_run_actor

from ray_on_ecs.tracking import run_actor


class Actor:
    """Takes reports."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.report = type("Method", (), {"remote": self.reports.append})


@pytest.mark.parametrize("error", [GetTimeoutError("the GCS is away"), ValueError("there is none of this name")])
def test_worker_looks_again_for_a_missing_actor(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    actor, errors = Actor(), [error]

    def get_actor(name: str) -> Actor:
        assert name == "run-1"
        if errors:
            raise errors.pop()
        return actor

    monkeypatch.setattr(run_actor.ray, "get_actor", get_actor)
    client, progress = RunClient("run-1"), Progress("group", 1)
    client.report(progress)
    assert not actor.reports
    client.report(progress)
    assert actor.reports == [progress]


def test_driver_finds_actor_after_a_lost_response(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [GetTimeoutError("no answer"), ValueError("the name is taken")]
    actor = Actor()

    def create(name: str) -> Any:
        raise answers.pop(0)

    monkeypatch.setattr(run_actor, "_create", create)
    monkeypatch.setattr(run_actor.ray, "get_actor", lambda name: actor)
    client, progress = create_run_actor(), Progress("group", 1)
    client.report(progress)
    assert not actor.reports
    client.report(progress)
    assert actor.reports == [progress]
