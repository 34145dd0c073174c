"""State of a training: flat tensors shared by all ranks, and one pickled value per rank.

Keys of weights and optimizer tensors contain the parameters' names, so that any number of ranks can load them. Other
state, such as schedulers, samplers and random generators, is each rank's own value.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ray_on_ecs.checkpoint import dcp, plain_pickle
from ray_on_ecs.checkpoint.dcp import Reader
from ray_on_ecs.checkpoint.modules import plain_name, unwrapped

MODEL, OPTIMIZER = "model", "optimizer"
RANKS = "ranks"


class TrainingState:
    """Objects of a training on one rank; the arguments are those of `Checkpointer`.

    Attributes:
        module: The module without DDP and torch.compile.

    Raises:
        TypeError: An object has no state, or FSDP1 shards the module.
        ValueError: The optimizer has a parameter that no module has.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any],
        rank: int,
        world_size: int,
        *,
        saves_frozen: bool = True,
        trusts_pickle: bool = False,
    ) -> None:
        self._trusts_pickle = trusts_pickle
        self._rank = rank
        self._world_size = world_size
        self.module = unwrapped(model)
        objects: dict[str, Any] = {MODEL: model}
        if optimizer is not None:
            objects[OPTIMIZER] = optimizer
        objects |= {f"state.{name}": value for name, value in extra.items()}
        self._modules: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._others: dict[str, Any] = {}
        for prefix, value in objects.items():
            if isinstance(value, nn.Module):
                module = unwrapped(value)
                if any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules()):
                    raise TypeError(
                        f"{prefix}: FullyShardedDataParallel is not supported; shard it by fully_shard (FSDP2)"
                    )
                self._modules[prefix] = module
            elif isinstance(value, Optimizer):
                self._optimizers[prefix] = value
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                self._others[prefix] = value
            else:
                raise TypeError(f"{prefix}: a {type(value).__name__} has no state_dict and load_state_dict")
        self._frozen: set[str] = set()
        self._names: dict[int, str] = {}
        for prefix, module in self._modules.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad and not saves_frozen:
                    self._frozen.add(_key(prefix, name))
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), _key(prefix, name))
        for prefix, value in self._optimizers.items():
            for parameter in _parameters(value):
                if id(parameter) not in self._names:
                    raise ValueError(
                        f"{prefix}: a parameter of shape {tuple(parameter.shape)} belongs neither to the model nor to "
                        "a module in state; add its module to state"
                    )

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of all modules by key, without copies; DTensors under FSDP2."""
        return {key: value for key, value in self._module_entries() if isinstance(value, Tensor)}

    def is_finite(self) -> bool:
        """Return True if all parameters of this rank are finite. Buffers don't count: masks may hold infinities."""
        checks: list[Tensor] = []
        for module in self._modules.values():
            for parameter in filter(Tensor.is_floating_point, module.parameters()):
                weight = parameter.detach()
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                checks.append(local.isfinite().all())
        if not checks:
            return True
        # One reduction, so that the GPU is synchronized once.
        return bool(torch.stack([check.to(checks[0].device) for check in checks]).all())

    def collect(self) -> dict[str, Any]:
        """Return this rank's state for a planner, without copies of tensors; raises like `plain_values`."""
        return {**self.tensors(), f"{RANKS}.{self._rank}": plain_pickle.pack(self.plain_values())}

    def plain_values(self) -> dict[str, Any]:
        """Return everything but tensors, as a checkpoint has it; ValueError for a value that could not be loaded."""
        values = self.values()
        return values if self._trusts_pickle else {kind: plain_pickle.plain(each) for kind, each in values.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all modules and optimizers by key, without copies."""
        tensors = self.weights()
        for prefix, optimizer in self._optimizers.items():
            for parameter, state in optimizer.state.items():
                name = self._names[id(parameter)]
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        tensors[f"{prefix}.{name}.{key}"] = value
        return tensors

    def values(self) -> dict[str, Any]:
        """Return the rest of the state, which differs between the ranks."""
        optimizers: dict[str, Any] = {}
        for prefix, optimizer in self._optimizers.items():
            numbers: dict[str, dict[str, Any]] = {}
            for parameter, state in optimizer.state.items():
                name = self._names[id(parameter)]
                numbers[name] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            class_name = type(optimizer).__name__
            optimizers[prefix] = {"class": class_name, "groups": self._groups(optimizer), "values": numbers}
        buffers = self._buffers() if self._world_size > 1 else ()  # a single rank's are among the tensors
        return {
            "modules": {key: value for key, value in self._module_entries() if not isinstance(value, Tensor)},
            "buffers": {key: buffer.cpu() for key, buffer in buffers},
            "optimizers": optimizers,
            "state": {prefix: value.state_dict() for prefix, value in self._others.items()},
            "random": self.random(),
        }

    def random(self) -> dict[str, Any]:
        """Return the states of the random generators: PyTorch's, also on the model's devices, Python's and NumPy's."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in self._devices()]
        if numpy := sys.modules.get("numpy"):  # a script that has not imported it does not depend on its state
            state["numpy"] = numpy.random.get_state()
        return state

    def restore_random(self, state: Mapping[str, Any]) -> None:
        """Restore the random generators to a state."""
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        for device, cuda_state in zip(self._devices(), state["cuda"], strict=False):
            torch.cuda.set_rng_state(cuda_state, device)
        if "numpy" in state:
            import numpy as np

            np.random.set_state(state["numpy"])

    def restore(self, reader: Reader, world_size: int) -> None:
        """Restore a checkpoint that `world_size` ranks have saved, without collectives.

        Raises:
            ValueError: It has another model, another optimizer or other objects.
        """
        saved = reader.read_metadata().state_dict_metadata
        is_same_world_size = world_size == self._world_size
        tensors = self.targets(saved)
        rank_key = f"{RANKS}.{self._rank if is_same_world_size else 0}"
        packed: dict[str, Any] = {rank_key: b""}
        dcp.load(packed, reader)
        values = plain_pickle.unpack(packed[rank_key], is_trusted=self._trusts_pickle)
        self._check_values(values, is_same_world_size)  # before anything is changed
        dcp.load(tensors, reader)
        self.apply(tensors, values)
        if is_same_world_size:
            for key, buffer in self._buffers():
                buffer.copy_(values["buffers"].get(key, buffer))
            self.restore_random(values["random"])

    def targets(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors to load a checkpoint into, by its metadata; ValueError if it has another model.

        They are the modules' tensors, and new ones for the optimizers.
        """
        tensors: dict[str, Any] = self.weights()
        self._check_weights(saved, tensors, self._modules)
        parameters: dict[str, Tensor] = {}
        for prefix, optimizer in self._optimizers.items():
            for parameter in _parameters(optimizer):
                parameters[f"{prefix}.{self._names[id(parameter)]}"] = parameter
        for key, entry in saved.items():
            parameter = parameters.get(key.rpartition(".")[0])
            if parameter is None or not isinstance(entry, TensorStorageMetadata):
                continue
            if entry.size == parameter.shape:  # sharded like the parameter
                tensors[key] = torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
            else:
                tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return tensors

    def apply(self, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Load tensors and values into the objects."""
        for prefix, module in self._modules.items():
            _load_module(prefix, module, {**tensors, **values["modules"]})
        for prefix, optimizer in self._optimizers.items():
            self._load_optimizer(prefix, optimizer, values["optimizers"][prefix], tensors)
        for prefix, value in self._others.items():
            value.load_state_dict(values["state"][prefix])

    def load_model(self, reader: Reader) -> None:
        """Load only the model's weights; ValueError if the checkpoint has another model."""
        weights: dict[str, Any] = {key: value for key, value in self.weights().items() if key.startswith(f"{MODEL}.")}
        self._check_weights(reader.read_metadata().state_dict_metadata, weights, [MODEL])
        dcp.load(weights, reader)
        _load_module(MODEL, self.module, weights)

    def _devices(self) -> list[torch.device]:
        """Return the CUDA devices of the model, in order."""
        if not torch.cuda.is_available():
            return []
        devices = {parameter.device for parameter in self.module.parameters() if parameter.is_cuda}
        return sorted(devices, key=lambda device: device.index or 0)

    def _module_entries(self) -> Iterator[tuple[str, Any]]:
        """Yield the entries of the modules' state_dicts by key, without frozen parameters if they are not saved."""
        for prefix, module in self._modules.items():
            for name, value in module.state_dict().items():
                key = _key(prefix, name)
                if key not in self._frozen:
                    yield key, value

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers, whose values may differ between the ranks, as in batch normalization."""
        saved = self.weights().keys()
        for prefix, module in self._modules.items():
            for name, buffer in module.named_buffers():
                key = _key(prefix, name)
                if key in saved and not isinstance(buffer, DTensor):
                    yield key, buffer

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return an optimizer's parameter groups, with names in place of the parameters."""
        groups = []
        for group in optimizer.param_groups:
            names = [self._names[id(parameter)] for parameter in group["params"]]
            groups.append({**group, "params": names})
        return groups

    def _load_optimizer(
        self, prefix: str, optimizer: Optimizer, saved: dict[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in saved["values"].items()}
        for full_key, tensor in tensors.items():
            if full_key.startswith(f"{prefix}."):
                name, _, key = full_key.removeprefix(f"{prefix}.").rpartition(".")
                state.setdefault(name, {})[key] = tensor
        # Optimizer.load_state_dict takes the parameters' numbers, in the order of the groups.
        numbers: dict[str, int] = {}
        groups = []
        for group in saved["groups"]:
            for name in group["params"]:
                numbers.setdefault(name, len(numbers))
            groups.append({**group, "params": [numbers[name] for name in group["params"]]})
        numbered = {numbers[name]: values for name, values in state.items()}
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        # load_state_dict has cast the state to the dtype of the parameters.
        for parameter, loaded in optimizer.state.items():
            for key, value in state.get(self._names[id(parameter)], {}).items():
                if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)

    def _check_weights(self, saved: Mapping[str, Any], own: Mapping[str, Tensor], prefixes: Iterable[str]) -> None:
        """Raise ValueError unless a checkpoint has exactly these weights of the modules."""
        saved_forms: dict[str, str] = {}
        for key, entry in saved.items():
            if isinstance(entry, TensorStorageMetadata):
                saved_forms[key] = f"{entry.properties.dtype} {tuple(entry.size)}"
        for key, tensor in own.items():
            form = f"{tensor.dtype} {tuple(tensor.shape)}"
            if saved_forms.get(key) != form:
                raise ValueError(f"{key} is {form}, and in the checkpoint {saved_forms.get(key, 'it is missing')}")
        modules = tuple(f"{prefix}." for prefix in prefixes)
        for key in saved_forms:
            if key.startswith(modules) and key not in own:
                raise ValueError(f"the checkpoint has {key}, and the model has not")

    def _check_values(self, saved: Mapping[str, Any], is_same_world_size: bool) -> None:
        """Raise ValueError unless a checkpoint has the same optimizers and objects, and these ranks can load them."""
        for kind, own in (("state", self._others), ("optimizers", self._optimizers)):
            if saved[kind].keys() != own.keys():
                listed = [", ".join(sorted(names)) or "nothing" for names in (saved[kind], own)]
                raise ValueError(f"the checkpoint has the {kind} {listed[0]}, and this script {listed[1]}")
        for prefix, optimizer in self._optimizers.items():
            class_name = type(optimizer).__name__
            saved_optimizer = saved["optimizers"][prefix]
            if class_name != saved_optimizer["class"]:
                raise ValueError(f"{prefix} was of class {saved_optimizer['class']}, and is of class {class_name} now")
            saved_names = [group["params"] for group in saved_optimizer["groups"]]
            if saved_names != [group["params"] for group in self._groups(optimizer)]:
                raise ValueError(f"{prefix} has other parameter groups than the checkpoint")
        if is_same_world_size:
            return
        for prefix, value in self._others.items():
            if any(base.__name__ == "StatefulDataLoader" for base in type(value).__mro__):
                raise ValueError(f"{prefix} is a StatefulDataLoader, which can't resume on another number of ranks")


def _key(prefix: str, name: str) -> str:
    return f"{prefix}.{plain_name(name)}"


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _load_module(prefix: str, module: nn.Module, entries: Mapping[str, Any]) -> None:
    """Load a module's state_dict; entries that are missing, such as unsaved frozen parameters, keep their values."""
    own = module.state_dict()
    module.load_state_dict({name: entries.get(_key(prefix, name), value) for name, value in own.items()})
