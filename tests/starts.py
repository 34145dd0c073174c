"""A start of a script on a worker, for tests of its variables and its launchers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.environment import ScriptEnvironment
from ray_on_ecs.run.group import Peer, WorkerRank
from ray_on_ecs.run.launcher import Start
from ray_on_ecs.storage.run_storage import RunStorage


def start_of(
    folder: Path, *, nodes: Sequence[int] = (0,), store: tuple[str, int] | None = None, **changed: Any
) -> Start:
    """Return a start of a worker, whose peers are on these nodes."""
    config = RunConfig(command=("train.py",), num_workers="4:6", max_restarts=3)
    environment = ScriptEnvironment(
        config=config,
        storage=RunStorage.open(str(folder), "mine"),
        run_id="0123abcd",
        folder=folder,
        python="python",
        secrets={},
        inputs={},
        git={},
        cluster="",
    )
    given: dict[str, Any] = {"config": config, "rank": WorkerRank(), "number": 0, "threads": 5}
    peers = [Peer("ab"[node], number + 1, node, store=store) for number, node in enumerate(nodes)]
    return Start(peers=peers, environment=environment, exchange=folder, **given | changed)
