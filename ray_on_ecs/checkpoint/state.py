"""State of a training: flat tensors shared by all ranks, and one pickled value per rank.

Keys of weights and optimizer tensors contain the parameters' names, so that any number of ranks can load them. Other
state, such as schedulers, samplers and random generators, is each rank's own value.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ray_on_ecs.checkpoint import dcp, optimizers, plain_pickle
from ray_on_ecs.checkpoint.dcp import Reader
from ray_on_ecs.checkpoint.modules import checksums, key_of, named_parameters, resize, unwrapped
from ray_on_ecs.errors import one_line

MODEL, OPTIMIZER = "model", "optimizer"
RANKS = "ranks"
EXTRA = "_extra_state"  # the last part of the key of a module's `get_extra_state`


class TrainingState:
    """Objects of a training on one rank; the arguments are those of `Checkpointer`.

    TypeError if an object has no state, or FSDP1 shards a module; ValueError if the optimizer has a parameter that no
    module has, or two keys could be equal.
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
        self.module = unwrapped(model)  # without DDP and torch.compile
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
        for prefix in objects:
            if outer := next((each for each in objects if prefix.startswith(f"{each}.")), None):
                raise ValueError(f"{prefix}: the name begins with {outer!r} and a dot; take another name")
        for prefix, value in self._optimizers.items():
            optimizers.group_names(prefix, value, self._names())
        self._saves_frozen = saves_frozen
        self._untouched: dict[str, int] = {}
        self._first_forms = _forms(dict(self._module_entries()))
        self.leave_out_frozen()

    def leave_out_frozen(self, saved: Collection[str] = ()) -> None:
        """Unless frozen parameters are saved, leave out those of the model that are not in a checkpoint, by its keys.

        The script loads them. One that has another checksum later, or is no longer frozen, is saved from then on.
        """
        self._untouched = {}
        if not self._saves_frozen:
            parameters = named_parameters(MODEL, self.module)
            frozen = {key: each for key, each in parameters if not each.requires_grad and key not in saved}
            self._untouched = checksums(frozen)

    @property
    def left_out(self) -> int:
        """The number of parameters that the next checkpoint lacks; the same on all ranks."""
        return len(self._untouched)

    def touched(self) -> list[str]:
        """Return the keys of parameters that were left out, and are trained now or have changed on this rank."""
        own = {key: each for key, each in named_parameters(MODEL, self.module) if key in self._untouched}
        now, forms = checksums(own), _forms(own)
        return [
            key
            for key, each in own.items()
            if each.requires_grad
            or now.get(key) != self._untouched[key]
            or forms.get(key) != self._first_forms.get(key)
        ]

    def include(self, keys: Iterable[str]) -> None:
        """Save parameters that were left out."""
        for key in keys:
            self._untouched.pop(key, None)

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors of all modules by key, without copies; DTensors under FSDP2."""
        return {key: value for key, value in self._module_entries() if _is_weight(key, value)}

    def is_finite(self) -> bool:
        """Return True if all parameters that this rank saves are finite.

        Buffers don't count: masks may hold infinities.
        """
        checks: list[Tensor] = []
        for key, parameter in (each for module in self._modules.items() for each in named_parameters(*module)):
            has_fractions = parameter.is_floating_point() or parameter.is_complex()
            # float4 has neither NaN nor infinities.
            if not has_fractions or "float4" in str(parameter.dtype) or key in self._untouched:
                continue
            weight = parameter.detach()
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            # Most types of float8 have no isfinite.
            checks.append((local.float() if local.itemsize == 1 else local).isfinite().all())
        if not checks:
            return True
        # One reduction, so that the GPU is synchronized once.
        return bool(torch.stack([check.to(checks[0].device) for check in checks]).all())

    def collect(self) -> dict[str, Any]:
        """Return this rank's state for a planner, without copies of tensors; raises like `plain_values`."""
        tensors, values = self.tensors_and_values()
        if lazy := next((key for key, tensor in tensors.items() if is_lazy(tensor)), None):
            raise ValueError(f"{lazy} has no values yet; call the module once before the first save")
        return {**tensors, f"{RANKS}.{self._rank}": plain_pickle.pack(self._plain(values))}

    def plain_values(self) -> dict[str, Any]:
        """Return everything but tensors, as a checkpoint has it; ValueError for a value that could not be loaded."""
        return self._plain(self.tensors_and_values()[1])

    def tensors_and_values(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of all modules and optimizers by key, without copies, and the rest of the state."""
        entries = dict(self._module_entries())
        names = self._names()
        tensors: dict[str, Tensor] = {key: value for key, value in entries.items() if _is_weight(key, value)}
        values: dict[str, Any] = {}
        for prefix, optimizer in self._optimizers.items():
            own, values[prefix] = optimizers.split(prefix, optimizer, names)
            tensors |= own
        buffers = self._buffers() if self._world_size > 1 else ()  # a single rank's are among the tensors
        return tensors, {
            "modules": {key: value for key, value in entries.items() if not _is_weight(key, value)},
            "buffers": {key: buffer.cpu() for key, buffer in buffers},
            "changed": self._changed(_forms(entries)),
            "left_out": sorted(self._untouched),
            "optimizers": values,
            "state": {prefix: value.state_dict() for prefix, value in self._others.items()},
            "classes": {prefix: type(value).__name__ for prefix, value in self._others.items()},
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
        """Restore a checkpoint of `world_size` ranks, without collectives; ValueError if it does not fit."""
        saved = reader.read_metadata().state_dict_metadata
        is_same_world_size = world_size == self._world_size
        rank_key = f"{RANKS}.{self._rank if is_same_world_size else 0}"
        packed: dict[str, Any] = {rank_key: b""}
        dcp.load(packed, reader)
        values = plain_pickle.unpack(packed[rank_key], is_trusted=self._trusts_pickle)
        self.leave_out_frozen(saved)
        self._check_values(values, is_same_world_size)  # before anything is changed
        for prefix, module in self._modules.items():
            resize(prefix, module, saved, values["changed"])
        tensors = self.targets(saved, () if self._saves_frozen else values["left_out"])
        dcp.load(tensors, reader)
        self.apply(tensors, values)
        if is_same_world_size:
            for key, buffer in self._buffers():
                before = values["buffers"].get(key, buffer)
                if buffer.shape != before.shape or buffer.dtype != before.dtype:
                    buffer.data = before.to(buffer.device)
                buffer.copy_(before)
            self.restore_random(values["random"])

    def targets(self, saved: Mapping[str, Any], left_out: Collection[str] = ()) -> dict[str, Any]:
        """Return the tensors to load a checkpoint into, by its metadata; ValueError if it has another model.

        They are the modules' tensors, without those that the checkpoint leaves out, and new ones for the optimizers.
        """
        tensors: dict[str, Any] = {
            key: tensor for key, tensor in self.weights().items() if key in saved or key not in left_out
        }
        self._check_weights(saved, tensors, self._modules)
        names = self._names()
        parameters: dict[str, Tensor] = {}
        for prefix, optimizer in self._optimizers.items():
            parameters |= {f"{prefix}.{names[id(each)]}": each for each in optimizers.parameters(optimizer)}
        modules = tuple(f"{prefix}." for prefix in self._modules)
        for key, entry in saved.items():
            if key in tensors or not isinstance(entry, TensorStorageMetadata):
                continue
            parameter = parameters.get(key.rpartition(".")[0])
            if parameter is not None and entry.size == parameter.shape:  # sharded like the parameter
                tensors[key] = torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
            elif parameter is not None or (key.startswith(modules) and _is_extra(key)):
                tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return tensors

    def apply(self, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Load tensors and values into the objects; ValueError if one of them refuses its state."""
        names = self._names()
        for prefix, module in self._modules.items():
            with _refusal(prefix):
                _load_module(prefix, module, tensors, values["modules"])
        for prefix, optimizer in self._optimizers.items():
            with _refusal(prefix):
                optimizers.load(prefix, optimizer, values["optimizers"][prefix], tensors, names)
        for prefix, value in self._others.items():
            with _refusal(prefix):
                value.load_state_dict(values["state"][prefix])

    def load_model(self, reader: Reader) -> None:
        """Load only the model's weights; ValueError if the checkpoint has another model."""
        weights: dict[str, Any] = {key: value for key, value in self.weights().items() if key.startswith(f"{MODEL}.")}
        self._check_weights(reader.read_metadata().state_dict_metadata, weights, [MODEL])
        dcp.load(weights, reader)
        _load_module(MODEL, self.module, weights, {})

    def _devices(self) -> list[torch.device]:
        """Return the CUDA devices of the model, in order."""
        if not torch.cuda.is_available():
            return []
        devices = {parameter.device for parameter in self.module.parameters() if parameter.is_cuda}
        return sorted(devices, key=lambda device: device.index or 0)

    def _module_entries(self) -> Iterator[tuple[str, Any]]:
        """Yield the entries of the modules' state_dicts by key, without those that are left out."""
        for prefix, module in self._modules.items():
            for name, value in module.state_dict().items():
                key = key_of(prefix, name)
                if key not in self._untouched:
                    yield key, value

    def _plain(self, values: dict[str, Any]) -> dict[str, Any]:
        return values if self._trusts_pickle else {kind: plain_pickle.plain(each) for kind, each in values.items()}

    def _names(self) -> dict[int, str]:
        """Return the keys of the parameters by their IDs; a script may replace modules between two saves."""
        names: dict[int, str] = {}
        for prefix, module in self._modules.items():
            for key, parameter in named_parameters(prefix, module):
                names.setdefault(id(parameter), key)
        return names

    def _changed(self, forms: Mapping[str, str]) -> list[str]:
        """Return the keys of tensors with another form than at first, and of buffers that are new or gone."""
        first = self._first_forms
        changed = [key for key in {**first, **forms} if forms.get(key) != first.get(key) and key not in self._untouched]
        if not changed:
            return []
        parameters = {key for each in self._modules.items() for key, _ in named_parameters(*each)}
        return [key for key in changed if key not in parameters or (key in forms and key in self._first_forms)]

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers, whose values may differ between the ranks, as in batch normalization."""
        saved = self.weights().keys()
        for prefix, module in self._modules.items():
            for name, buffer in module.named_buffers():
                key = key_of(prefix, name)
                if key in saved and not isinstance(buffer, DTensor):
                    yield key, buffer

    def _check_weights(self, saved: Mapping[str, Any], own: Mapping[str, Tensor], prefixes: Iterable[str]) -> None:
        """Raise ValueError unless a checkpoint has exactly these weights of the modules."""
        saved_forms: dict[str, str] = {}
        for key, entry in saved.items():
            if isinstance(entry, TensorStorageMetadata):
                saved_forms[key] = f"{entry.properties.dtype} {tuple(entry.size)}"
        for key, tensor in own.items():
            form = "without values" if is_lazy(tensor) else f"{tensor.dtype} {tuple(tensor.shape)}"
            if saved_forms.get(key) != form:
                missing = (
                    "it is missing" if self._saves_frozen else "it is missing; save_frozen=False may have left it out"
                )
                raise ValueError(f"{key} is {form}, and in the checkpoint {saved_forms.get(key, missing)}")
        modules = tuple(f"{prefix}." for prefix in prefixes)
        for key in saved_forms:
            if key.startswith(modules) and key not in own and not _is_extra(key):
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
            saved_groups = [group["params"] for group in saved_optimizer["groups"]]
            own_groups = optimizers.group_names(prefix, optimizer, self._names())
            if line := optimizers.difference(prefix, saved_groups, own_groups):
                raise ValueError(line)
        for prefix, value in self._others.items():
            class_name, before = type(value).__name__, saved["classes"][prefix]
            if before != class_name:
                raise ValueError(f"{prefix} was of class {before}, and is of class {class_name} now")
        if is_same_world_size:
            return
        for prefix, value in self._others.items():
            if any(base.__name__ == "StatefulDataLoader" for base in type(value).__mro__):
                raise ValueError(f"{prefix} is a StatefulDataLoader, which can't resume on another number of ranks")


def _forms(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the forms of parameters and persistent buffers by key; sharded ones don't change theirs."""
    weights = {
        key: value for key, value in entries.items() if _is_weight(key, value) and not isinstance(value, DTensor)
    }
    return {key: "" if is_lazy(each) else f"{each.dtype} {tuple(each.shape)}" for key, each in weights.items()}


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA


def _is_weight(key: str, value: Any) -> bool:
    """Return True for a parameter or buffer. An extra state is a value also if it is a tensor: its size may change."""
    return isinstance(value, Tensor) and not _is_extra(key)


@contextmanager
def _refusal(prefix: str) -> Generator[None]:
    """Name the object whose load_state_dict fails, unless memory or the storage is the reason."""
    try:
        yield
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as cause:
        reason = one_line(cause).rstrip(".")
        raise ValueError(f"{prefix}.load_state_dict: {type(cause).__name__}: {reason}") from cause


def _load_module(prefix: str, module: nn.Module, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Load a module's state_dict; entries that are missing, such as unsaved frozen parameters, keep their values."""
    own = module.state_dict()
    entries = {**tensors, **values}
    known = {key_of(prefix, name) for name in own}
    state = {name: entries.get(key_of(prefix, name), value) for name, value in own.items()}
    new = {key: value for key, value in values.items() if key.startswith(f"{prefix}.") and key not in known}
    module.load_state_dict({**state, **{key.removeprefix(f"{prefix}."): value for key, value in new.items()}})
