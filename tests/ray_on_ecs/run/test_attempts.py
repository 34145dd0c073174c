"""The startup limit of the workers of an attempt."""

from contextlib import nullcontext
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from ray_on_ecs.config import LOCAL_VARIABLE, RunConfig
from ray_on_ecs.errors import ResourceError
from tests.lazy import Lazy

attempts, ray_cluster = Lazy("ray_on_ecs.run.attempts"), Lazy("ray_on_ecs.run.ray_cluster")


class Cluster:
    """A cluster with or without places for workers, and its clock."""

    now = 0.0
    places = True

    def passes(self, watch: Any, seconds: float, *, has_begun: bool = False) -> bool:
        """Let time pass, and return whether the watch was over at any time."""
        end, is_over = self.now + seconds, False
        while self.now < end:
            self.now += attempts.LOOK_SECONDS
            is_over |= watch.is_over(has_begun=has_begun)
        return is_over


def watch_of(cluster: Cluster) -> Any:
    return attempts.BeginWatch(lambda: cluster.places, lambda: cluster.now)


def test_workers_that_do_not_begin_are_ended() -> None:
    cluster = Cluster()
    watch = watch_of(cluster)
    assert not cluster.passes(watch, attempts.BEGIN_SECONDS)
    assert cluster.passes(watch, 3 * attempts.LOOK_SECONDS)
    assert not cluster.passes(watch, attempts.BEGIN_SECONDS)
    assert cluster.passes(watch, 3 * attempts.LOOK_SECONDS)


def test_workers_waiting_for_places_are_not_ended() -> None:
    cluster = Cluster()
    cluster.places = False
    watch = watch_of(cluster)
    assert not cluster.passes(watch, 10 * attempts.BEGIN_SECONDS)
    cluster.places = True
    assert not cluster.passes(watch, attempts.BEGIN_SECONDS)


def test_workers_that_have_begun_are_not_ended() -> None:
    cluster = Cluster()
    assert not cluster.passes(watch_of(cluster), 10 * attempts.BEGIN_SECONDS, has_begun=True)


@pytest.mark.parametrize(("local", "waits"), [("", [0, 60.0]), ("1", [0, 0.0])])
def test_only_clusters_that_nodes_can_join_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, local: str, waits: list[float]
) -> None:
    waited: list[float] = []

    def lacks_room(config: RunConfig, seconds: float) -> NoReturn:
        waited.append(seconds)
        raise ResourceError("no GPU")

    monkeypatch.setattr(ray_cluster, "wait_for_workers", lacks_room)
    monkeypatch.delenv(LOCAL_VARIABLE, raising=False)
    if local:
        monkeypatch.setenv(LOCAL_VARIABLE, local)
    with pytest.raises(ResourceError):
        attempts.wait_for_workers(RunConfig(worker_timeout=60.0), Mock(waiting=nullcontext))
    assert waited == waits
