"""The state of a training: collected as flat tensors and one value of Python's per rank, and put back.

Weights and the optimizer's tensors go by the names of the parameters, so that another number of ranks finds them. All
else, as schedules, samplers and random numbers, is the rank's own value.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ray_on_ecs.checkpoint import dcp, random_state
from ray_on_ecs.checkpoint.dcp import Reader
from ray_on_ecs.checkpoint.modules import plain_name, unwrapped

MODEL, OPTIMIZER = "model", "optimizer"
RANKS = "ranks"


class TrainingState:
    """The objects of a training, on one rank.

    Args:
        model: The module, also under DDP, FSDP2 (`fully_shard`) or torch.compile.
        optimizer: Its optimizer, if there is one.
        extra: More objects with `state_dict` and `load_state_dict`, by name; modules and optimizers may be among them.
        rank: This process among all.
        world_size: The number of processes.
        saves_frozen: Whether parameters without `requires_grad` are part of the state.

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
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self.module = unwrapped(model)
        everything = {MODEL: model} | ({OPTIMIZER: optimizer} if optimizer else {})
        everything |= {f"state.{name}": value for name, value in extra.items()}
        self._modules = {name: unwrapped(each) for name, each in everything.items() if isinstance(each, nn.Module)}
        self._optimizers = {name: each for name, each in everything.items() if isinstance(each, Optimizer)}
        self._others = {
            name: each for name, each in everything.items() if name not in {*self._modules, *self._optimizers}
        }
        for name, each in self._others.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(f"{name}: a {type(each).__name__} has no state_dict and load_state_dict")
        for name, each in self._modules.items():
            if any(isinstance(part, FullyShardedDataParallel) for part in each.modules()):
                raise TypeError(f"{name}: FullyShardedDataParallel is not supported; shard it by fully_shard (FSDP2)")
        parameters = [
            (_full(prefix, name), parameter)
            for prefix, module in self._modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        ]
        self._left_out = {name for name, each in parameters if not (each.requires_grad or saves_frozen)}
        self._names = {
            id(parameter): _full(prefix, name)
            for prefix, module in reversed(self._modules.items())
            for name, parameter in module.named_parameters()
        }
        for name, each in self._optimizers.items():
            if missing := [p for group in each.param_groups for p in group["params"] if id(p) not in self._names]:
                raise ValueError(
                    f"{name}: a parameter of shape {tuple(missing[0].shape)} belongs neither to the model nor to a "
                    "module in state; add its module to state"
                )

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of all modules by name, without copies; DTensors where the ranks have shards."""
        return {name: value for name, value in self._entries() if isinstance(value, Tensor)}

    def is_finite(self) -> bool:
        """Return whether all parameters of this rank are finite numbers; a buffer may be a mask of infinities."""
        parameters = [each for module in self._modules.values() for each in module.parameters()]
        weights = [_local(each.detach()) for each in parameters if each.is_floating_point()]
        checks = [weight.isfinite().all() for weight in weights]
        return not checks or bool(torch.stack([check.to(checks[0].device) for check in checks]).all())

    def collect(self) -> dict[str, Any]:
        """Return this rank's state for a planner of torch.distributed.checkpoint, without copies of tensors."""
        return {**self.tensors(), f"{RANKS}.{self._rank}": _pack(self.values())}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all modules and optimizers by name, without copies."""
        return self.weights() | {
            f"{prefix}.{self._names[id(parameter)]}.{key}": value
            for prefix, optimizer in self._optimizers.items()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def values(self) -> dict[str, Any]:
        """Return the rest of the state, which each rank has for itself."""
        return {
            "modules": {name: value for name, value in self._entries() if not isinstance(value, Tensor)},
            "buffers": {name: buffer.cpu() for name, buffer in self._buffers()} if self._world_size > 1 else {},
            "optimizers": {
                prefix: {
                    "class": type(optimizer).__name__,
                    "groups": self._groups(optimizer),
                    "values": {
                        self._names[id(parameter)]: {k: v for k, v in state.items() if not isinstance(v, Tensor)}
                        for parameter, state in optimizer.state.items()
                    },
                }
                for prefix, optimizer in self._optimizers.items()
            },
            "state": {name: each.state_dict() for name, each in self._others.items()},
            "random": self.random(),
        }

    def random(self) -> dict[str, Any]:
        """Return the states of the random number generators, those of the model's devices included."""
        return random_state.capture(self._devices())

    def restore_random(self, state: Mapping[str, Any]) -> None:
        """Set the random number generators to a state."""
        random_state.restore(dict(state), self._devices())

    def restore(self, reader: Reader, world_size: int) -> None:
        """Continue where a checkpoint was taken; each rank reads what it needs by itself.

        Args:
            reader: Reads the checkpoint.
            world_size: The number of ranks that saved it.

        Raises:
            ValueError: It is of another model, optimizer or other objects.
        """
        saved = reader.read_metadata().state_dict_metadata
        is_same = world_size == self._world_size
        tensors = self.targets(saved)
        key = f"{RANKS}.{self._rank if is_same else 0}"
        found: dict[str, Any] = {key: b""}
        dcp.load(found, reader)
        values = _unpack(found[key])
        self._check_values(values, is_same)
        dcp.load(tensors, reader)
        self.apply(tensors, values)
        if is_same:
            for name, buffer in self._buffers():
                buffer.copy_(values["buffers"].get(name, buffer))
            self.restore_random(values["random"])

    def targets(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors to load a checkpoint into: the modules' own, and new ones for the optimizers.

        Args:
            saved: The checkpoint's metadata by name.

        Raises:
            ValueError: It is of another model.
        """
        tensors: dict[str, Any] = self.weights()
        self._check_weights(saved, tensors, self._modules)
        for prefix in self._optimizers:
            tensors |= self._targets(prefix, saved)
        return tensors

    def apply(self, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Put loaded tensors and values into the objects."""
        for prefix, module in self._modules.items():
            known = {**tensors, **values["modules"]}
            own = module.state_dict()
            module.load_state_dict({name: known.get(_full(prefix, name), value) for name, value in own.items()})
        for prefix, optimizer in self._optimizers.items():
            own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}
            self._load_optimizer(prefix, optimizer, values["optimizers"][prefix], own)
        for name, each in self._others.items():
            each.load_state_dict(values["state"][name])

    def load_model(self, reader: Reader) -> None:
        """Load the weights of the model alone.

        Raises:
            ValueError: They are of another model.
        """
        loaded: dict[str, Any] = {name: value for name, value in self.weights().items() if name.startswith(f"{MODEL}.")}
        self._check_weights(reader.read_metadata().state_dict_metadata, loaded, [MODEL])
        dcp.load(loaded, reader)
        own = self.module.state_dict()
        self.module.load_state_dict({name: loaded.get(_full(MODEL, name), value) for name, value in own.items()})

    def _devices(self) -> list[torch.device]:
        """Return the CUDA devices of the model, in order."""
        found = {parameter.device for parameter in self.module.parameters() if parameter.is_cuda}
        return sorted(found if torch.cuda.is_available() else (), key=lambda device: device.index or 0)

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for prefix, module in self._modules.items():
            for name, value in module.state_dict().items():
                if (full := _full(prefix, name)) not in self._left_out:
                    yield full, value

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of a state_dict, whose values may differ between the ranks."""
        stored = self.weights().keys()
        for prefix, module in self._modules.items():
            for name, buffer in module.named_buffers():
                if (full := _full(prefix, name)) in stored and not isinstance(buffer, DTensor):
                    yield full, buffer

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        return [
            {**group, "params": [self._names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]

    def _targets(self, prefix: str, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a tensor for each of an optimizer's in a checkpoint: a parameter without gradients has none there."""
        targets: dict[str, Tensor] = {}
        parameters = {
            f"{prefix}.{self._names[id(parameter)]}": parameter
            for group in self._optimizers[prefix].param_groups
            for parameter in group["params"]
        }
        for name, entry in saved.items():
            parameter = parameters.get(name.rpartition(".")[0])
            if parameter is None or not isinstance(entry, TensorStorageMetadata):
                continue
            if entry.size == parameter.shape:
                targets[name] = torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
            else:
                targets[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return targets

    def _load_optimizer(
        self, prefix: str, optimizer: Optimizer, saved: dict[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in saved["values"].items()}
        for full, tensor in tensors.items():
            name, _, key = full.removeprefix(f"{prefix}.").rpartition(".")
            state.setdefault(name, {})[key] = tensor
        names = [name for group in saved["groups"] for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["groups"]]
        numbered = {numbers[name]: each for name, each in state.items()}
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        # PyTorch has cast them to the dtype of the parameters.
        for parameter, loaded in optimizer.state.items():
            for key, value in state.get(self._names[id(parameter)], {}).items():
                if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)

    def _check_weights(self, saved: Mapping[str, Any], own: Mapping[str, Tensor], prefixes: Iterable[str]) -> None:
        """Raise ValueError unless a checkpoint has these weights and no other ones of the same modules."""
        found = {name: each for name, each in saved.items() if isinstance(each, TensorStorageMetadata)}
        theirs = {name: f"{each.properties.dtype} {tuple(each.size)}" for name, each in found.items()}
        mine = {name: f"{each.dtype} {tuple(each.shape)}" for name, each in own.items()}
        for name, form in mine.items():
            if theirs.get(name) != form:
                raise ValueError(f"{name} is {form}, and in the checkpoint {theirs.get(name, 'it is missing')}")
        heads = tuple(f"{prefix}." for prefix in prefixes)
        if unknown := [name for name in theirs if name.startswith(heads) and name not in mine]:
            raise ValueError(f"the checkpoint has {unknown[0]}, and the model has not")

    def _check_values(self, own: Mapping[str, Any], is_same: bool) -> None:
        """Raise ValueError unless a checkpoint has the same other objects, which these ranks can load."""
        for kind, mine in (("state", self._others), ("optimizers", self._optimizers)):
            if own[kind].keys() != mine.keys():
                raise ValueError(f"the checkpoint has the {kind} {_listed(own[kind])}, and this script {_listed(mine)}")
        for prefix, optimizer in self._optimizers.items():
            if (name := type(optimizer).__name__) != (before := own["optimizers"][prefix]["class"]):
                raise ValueError(f"{prefix} was of class {before}, and is of class {name} now")
            theirs = [group["params"] for group in own["optimizers"][prefix]["groups"]]
            if theirs != [group["params"] for group in self._groups(optimizer)]:
                raise ValueError(f"{prefix} has other groups of parameters than the checkpoint")
        for name, each in self._others.items():
            if not is_same and any(kind.__name__ == "StatefulDataLoader" for kind in type(each).__mro__):
                raise ValueError(f"{name} is a StatefulDataLoader, which can't go on with another number of ranks")


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{plain_name(name)}"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _pack(value: Any) -> bytes:
    """Return a value as the bytes of torch.save, which a planner does not take apart."""
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def _unpack(packed: bytes) -> Any:
    """Return the value again; a script's own state may be of any class."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
