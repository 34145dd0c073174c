"""Sharded states: a training that is no recipe of ours, under FSDP2, is saved and resumed like any other."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ray_on_ecs.checkpoint import dcp
from ray_on_ecs.checkpoint.manager import CheckpointManager
from ray_on_ecs.checkpoint.trainer import TrainerState
from ray_on_ecs.tracking.storage import RunStorage
from tests.training.ranks import Ranks
from training.engine.config import TrainingConfig

STEPS = 4
FULL = StateDictOptions(full_state_dict=True)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))


class ShardedTrainer:
    """A perceptron under FSDP2 with AdamW, whose ranks learn from samples of their own."""

    def __init__(self, rank: int, ranks: int) -> None:
        torch.manual_seed(0)
        self.steps_per_epoch = STEPS
        self.data_summary = {"test_samples": 0}
        self.device = torch.device("cpu")
        self.rank = rank
        self.world_size = ranks
        self.history: list[dict[str, float]] = []
        self.model: nn.Module = perceptron()
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (*self.model.children(), self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = 0
        self.samples = torch.Generator().manual_seed(rank)

    @property
    def epoch(self) -> int:
        return len(self.history)

    @property
    def in_epoch(self) -> bool:
        return self.step > STEPS * self.epoch

    def run_epoch(self, on_step: Any = None, on_test: Any = None) -> Any:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 64, generator=self.samples)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
        self.history.append({"score": float(self.epoch)})
        return self.history[-1]

    def state_dict(self) -> TrainerState:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "progress": {"history": self.history, "step": self.step},
            "ranks": [{"samples": self.samples.get_state()}],
        }

    def load_state_dict(self, state: TrainerState) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.history = state["progress"]["history"]
        self.step = state["progress"]["step"]
        if len(state["ranks"]) == 1:
            self.samples.set_state(state["ranks"][0]["samples"])


def whole(trainer: ShardedTrainer) -> dict[str, Any]:
    """Return the whole state that the ranks have shards of; every rank must call it."""
    optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer, options=FULL)["state"]
    return copy.deepcopy({"model": get_model_state_dict(trainer.model, options=FULL), "optimizer": optimizer})


def train(rank: int, ranks: int, folder: str, epochs: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Train so many epochs; returns the whole state as it was resumed and at the end, and the bytes that were read."""
    read: list[int] = []
    slice_file = dcp.Reader._slice_file

    def count(self: dcp.Reader, file: Any, sinfo: Any) -> Any:
        read.append(sinfo.length)
        return slice_file(self, file, sinfo)

    dcp.Reader._slice_file = count  # this process is the test's own
    try:
        trainer = ShardedTrainer(rank, ranks)
        storage = RunStorage.open(folder, "sharded")
        with CheckpointManager(trainer, storage, TrainingConfig(), score="score") as checkpoints:
            checkpoints.resume()
            size = sum(read)
            resumed = whole(trainer) if trainer.step else {}  # a fresh optimizer counts the look at it as a step
            while trainer.epoch < epochs:
                trainer.run_epoch()
                checkpoints.save()
        return resumed, whole(trainer), size
    finally:
        dcp.Reader._slice_file = slice_file


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("after", [1, 3])
def test_shards_of_two_ranks_are_loaded_on_another_number(on_ranks: Ranks, tmp_path: Path, after: int) -> None:
    _, saved, _ = on_ranks(2, train, str(tmp_path), 1)[0]
    resumed, ended, _ = on_ranks(after, train, str(tmp_path), 2)[0]
    assert_same(resumed, saved)
    assert int(ended["optimizer"]["0.weight"]["step"]) == 2 * STEPS, "it continues"


def test_as_many_ranks_continue_bit_for_bit_and_read_only_their_shards(on_ranks: Ranks, tmp_path: Path) -> None:
    _, uninterrupted, _ = on_ranks(2, train, str(tmp_path / "uninterrupted"), 2)[0]
    on_ranks(2, train, str(tmp_path), 1)
    answers = on_ranks(2, train, str(tmp_path), 2)
    assert_same(answers[0][1], uninterrupted)
    size = sum(each.stat().st_size for each in tmp_path.glob("sharded/checkpoint_00000004/*.distcp"))
    for _, _, read in answers:
        assert 0 < read < 0.7 * size, "a rank has read shards of the other's"


def test_the_weights_of_shards_are_exported_whole(on_ranks: Ranks, tmp_path: Path) -> None:
    _, saved, _ = on_ranks(2, train, str(tmp_path), 1)[0]
    weights = torch.load(tmp_path / "sharded" / "model.pt", weights_only=True)
    assert_same(weights, saved["model"])
    perceptron().load_state_dict(weights)
