"""Ranks of a training: their CPUs, and means over all of them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_on_ecs.recipes import ranks


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu.max": "broken"}, 8),
    ],
)
def test_usable_cpus_are_those_of_the_container(
    files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    assert ranks.usable_cpus(tmp_path) == cpus


def means(rank: int, world_size: int) -> tuple[dict[str, float], dict[str, float], Any]:
    """Rank 0 has one sample, rank 1 three."""
    found = ranks.EpochMeans(torch.device("cpu"), "loss")
    found.add(1 + 2 * rank, loss=torch.tensor(4.0 * rank))
    state = found.state_dict()
    resumed = ranks.EpochMeans(torch.device("cpu"), "loss")
    resumed.load_state_dict(state)
    found.end()
    found.add(1, loss=torch.tensor(2.0))
    return resumed.end("train_"), found.end(), state


def test_means_are_those_of_all_ranks(on_ranks: Any) -> None:
    for resumed, second, state in on_ranks(2, means):
        assert resumed == {"train_loss": 3.0}
        assert second == {"loss": 2.0}, "each epoch begins at 0"
        assert state == {"sums": [12.0, 4.0]}
