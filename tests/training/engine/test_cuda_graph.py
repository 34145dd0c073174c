"""A step as a CUDA graph: on CPUs with a recorder of operations in its place, and on a GPU where there is one."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.engine import cuda_graph
from training.errors import UsageError
from training.recipes.images import models, trainer
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset
from training.recipes.images.trainer import ImageTrainer

Config = Callable[..., ImageConfig]
CPU = torch.device("cpu")
EPOCHS = 3


class Recording(TorchDispatchMode):
    """What a CUDA graph does, for operations on CPUs.

    It notes each operation with its tensors, leaves all tensors as they were before, and repeats the operations on the
    same tensors later. Numbers that Python had computed stay what they were. Reading a tensor is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation, and run it."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nfor debugging …")
        for storage in _storages((args, kwargs)):
            if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = storage, storage.clone()
        result = func(*args, **(kwargs or {}))
        self.made |= {storage.data_ptr() for storage in _storages(result)} - set(self.before)
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def undo(self) -> None:
        """Leave the tensors that were there before as they were."""
        for storage, content in self.before.values():
            storage.copy_(content)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the operations."""
        for func, args, kwargs, noted in self.operations:
            given = {storage.data_ptr() for storage in _storages((args, kwargs))}
            result = func(*args, **kwargs)
            for old, new in zip(_tensors(noted), _tensors(result), strict=True):
                if old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in _tensors(values)]


def record(step: Callable[[], None]) -> Callable[[], None]:
    with Recording() as recording:
        step()
    recording.undo()
    return recording.replay


def small(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(648, classes),
    )


class Reading(nn.Module):
    """A model that waits for its device in each step."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images) * (1 if images.mean().item() else 2)


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "small", small)
    monkeypatch.setitem(models.MODELS, "reading", lambda channels, classes: Reading(classes))
    monkeypatch.setattr(cuda_graph, "record", record)
    monkeypatch.setattr(trainer, "check_graph", lambda *_: None)


def load(into: ImageTrainer, state: Any) -> None:
    into.model.load_state_dict(state["model"])
    into.load_state_dict(state)


def weights_of(trained: ImageTrainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trained.model.state_dict().items()}


@pytest.mark.parametrize("choice", [{}, {"optimizer": "sgd"}, {"norm_batch": 32}])
def test_it_trains_as_without_a_graph(config: Config, digits: Dataset, choice: dict[str, Any]) -> None:
    settings = config(model="small", epochs=EPOCHS, **choice)
    plain, graphed = (ImageTrainer(replace(settings, cuda_graph=choice), digits, CPU) for choice in ("off", "on"))
    for _ in range(EPOCHS):
        one, other = plain.run_epoch(), graphed.run_epoch()
        for name in ("train_loss", "test_loss", "train_accuracy"):
            assert other[name] == pytest.approx(one[name], rel=1e-4)
        assert other["train_samples"] == one["train_samples"]
    torch.testing.assert_close(weights_of(graphed), weights_of(plain), atol=1e-4, rtol=1e-3)
    groups = [[{**group, "params": []} for group in each.optimizer.param_groups] for each in (plain, graphed)]
    assert groups[1] == groups[0], "a checkpoint of one continues as the other"


def test_a_run_may_continue_with_it_and_without_it(config: Config, digits: Dataset) -> None:
    settings = config(model="small", epochs=EPOCHS)
    uninterrupted = ImageTrainer(settings, digits, CPU)
    for _ in range(EPOCHS):
        uninterrupted.run_epoch()
    state: Any = None
    for choice in ("on", "on", "off"):
        each = ImageTrainer(replace(settings, cuda_graph=choice), digits, CPU)
        if state:
            load(each, state)
        each.run_epoch()
        state = deepcopy(each.state_dict())
    torch.testing.assert_close(weights_of(each), weights_of(uninterrupted), atol=1e-4, rtol=1e-3)


def test_loading_forgets_the_graph(config: Config, digits: Dataset) -> None:
    """The state of the optimizer is in other tensors then."""
    settings = config(model="small", epochs=EPOCHS, cuda_graph="on")
    one = ImageTrainer(settings, digits, CPU)
    other = ImageTrainer(replace(settings, lr=10 * settings.base_lr), digits, CPU)
    one.run_epoch()
    other.run_epoch()
    load(other, deepcopy(one.state_dict()))
    assert one.run_epoch()["train_loss"] == pytest.approx(other.run_epoch()["train_loss"], rel=1e-4)


def test_a_model_that_waits_for_its_device_is_refused(config: Config, digits: Dataset) -> None:
    waits = ImageTrainer(config(model="reading", epochs=1, cuda_graph="on"), digits, CPU)
    with pytest.raises(
        UsageError, match=r"--cuda-graph: 'on' needs a model whose step never waits .* capturing\); leave"
    ):
        waits.run_epoch()


@pytest.mark.parametrize(
    ("device", "world_size", "need"),
    [("cpu", 1, "a GPU, and this runs on cpu"), ("cuda", 2, "a single worker, and there are 2")],
)
def test_where_it_cant_be_it_is_refused(device: str, world_size: int, need: str) -> None:
    with pytest.raises(UsageError, match=f"--cuda-graph: 'on' needs {need}; leave it off"):
        cuda_graph.check_graph(torch.device(device), world_size)


@pytest.mark.parametrize(
    ("choice", "need"),
    [({"fused_optimizer": "off"}, "--fused-optimizer on"), ({"num_workers": "1:2"}, "a single worker, and --num-work")],
)
def test_settings_with_which_it_cant_be_are_refused(config: Config, choice: dict[str, Any], need: str) -> None:
    with pytest.raises(UsageError, match=f"--cuda-graph: 'on' needs {need}"):
        config(cuda_graph="on", **choice)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["small", "resnet18"])
def test_on_a_gpu_it_trains_as_without_a_graph(
    config: Config, digits: Dataset, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(models.MODELS, "small", small)
    settings = config(model=model, epochs=1, batch_size=32, precision="fp32")
    device = torch.device("cuda", 0)
    plain, graphed = (ImageTrainer(replace(settings, cuda_graph=choice), digits, device) for choice in ("off", "on"))
    one, other = plain.run_epoch(), graphed.run_epoch()
    assert other["train_loss"] == pytest.approx(one["train_loss"], rel=0.02)
    assert other["train_samples"] == one["train_samples"]
