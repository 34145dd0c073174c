"""Reclaim: all ranks learn at the same step that a node of one of them is being reclaimed."""

import time
from pathlib import Path

import pytest

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint import collectives
from ray_on_ecs.checkpoint.collectives import Reclaim
from tests.training.ranks import Ranks

STEPS, ANNOUNCED = 40, 10
STEP_SECONDS = 0.02


def first_near(rank: int, ranks: int, folder: Path, told: int | None) -> int | None:
    """Take steps, in the middle of which one rank is told; return the step after which this one stops, or None."""
    own = folder / str(rank)
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "POLL_SECONDS", 3 * STEP_SECONDS)
        patch.setenv(sdk.FOLDER_VARIABLE, str(own))
        reclaim = Reclaim()
        for step in range(STEPS):
            time.sleep(STEP_SECONDS * (1 + rank))
            if step == ANNOUNCED and rank == told:
                (own / sdk.DEADLINE).write_text(str(time.time() + 60))
            if reclaim.is_near():
                return step
    return None


@pytest.mark.parametrize("told", [0, 1])
def test_ranks_agree_on_a_notice(on_ranks: Ranks, tmp_path: Path, told: int) -> None:
    first, second = on_ranks(2, first_near, tmp_path, told)
    assert first == second
    assert first is not None
    assert ANNOUNCED <= first < STEPS
    assert all((tmp_path / str(rank) / sdk.CHECKPOINTER).exists() for rank in range(2)), "they get SIGTERM late"


def test_nothing_is_near_without_a_notice(on_ranks: Ranks, tmp_path: Path) -> None:
    assert on_ranks(2, first_near, tmp_path, None) == [None, None]


def test_single_process_has_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sdk.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(collectives, "POLL_SECONDS", 0.0)
    reclaim = Reclaim()
    assert not any(reclaim.is_near() for _ in range(3))
