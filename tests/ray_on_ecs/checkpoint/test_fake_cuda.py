"""A training on CUDA with tensors that have a device and no numbers: one on the wrong device is an error here, too."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ray_on_ecs.checkpoint.dcp import StagingPlanner
from ray_on_ecs.checkpoint.state import TrainingState

CUDA = torch.device("cuda", 0)
# Without `capturable` a step reads a number from a tensor, and these have none.
SGD, ADAMW = partial(torch.optim.SGD, momentum=0.9), partial(torch.optim.AdamW, capturable=True)


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes more than a second

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


class Training:
    """A network with batch statistics and an optimizer."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        with CUDA:
            self.norm = nn.BatchNorm1d(8)
            self.model = nn.Sequential(nn.Linear(4, 8), self.norm, nn.Linear(8, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.state = TrainingState(self.model, self.optimizer, {}, 0, 1)

    def step(self) -> None:
        self.model(torch.ones(3, 4, device=CUDA))
        for parameter in self.model.parameters():  # a backward pass needs threads of a real device
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("optimizer", "key"), [(SGD, "momentum_buffer"), (ADAMW, "exp_avg")], ids=["SGD", "AdamW"])
def test_a_state_goes_through_host_memory_and_back(fake_cuda: None, optimizer: Any, key: str) -> None:
    first = Training(optimizer)
    first.step()
    tensors, values = first.state.tensors_and_values()
    planner = StagingPlanner()
    planner.set_up_planner(tensors, is_coordinator=True)
    [plan], metadata = planner.create_global_plan([planner.create_local_plan()])
    planner.finish_plan(plan)
    staged = [planner.resolve_data(item) for item in plan.items]
    assert len(staged) == len(tensors) > len(first.state.weights()) > 0
    assert {each.device.type for each in staged if isinstance(each, torch.Tensor)} == {"cpu"}

    resumed = Training(optimizer)
    targets = resumed.state.targets(metadata.state_dict_metadata)
    assert targets.keys() == tensors.keys()
    resumed.state.apply(targets, values)
    for state in resumed.optimizer.state.values():
        assert {each.device for each in state.values()} == {CUDA}
        assert key in state
    assert {each.device for each in resumed.model.state_dict().values()} == {CUDA}
    resumed.step()


def test_a_tensor_on_the_wrong_device_is_seen(fake_cuda: None) -> None:
    training = Training(SGD)
    training.norm.running_mean = torch.zeros(8)
    with pytest.raises(RuntimeError, match="device"):
        training.step()
