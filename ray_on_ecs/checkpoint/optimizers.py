"""States of optimizers by the names of their parameters, so that any number of ranks can load them.

A tensor of a parameter has the key `PREFIX.PARAMETER.KEY`; all else that `state_dict` holds is a value of each rank.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# Names of parameters that a line lists.
LISTED = 3


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order of their numbers in `state_dict`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def group_names(prefix: str, optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters, by their IDs; ValueError if a parameter has no name."""
    for parameter in parameters(optimizer):
        if id(parameter) not in names:
            raise ValueError(
                f"{prefix}: a parameter of shape {tuple(parameter.shape)} belongs neither to the model nor to a module "
                "in state; add its module to state, or give the optimizer the parameters of the module that replaced it"
            )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def split(prefix: str, optimizer: Optimizer, names: Mapping[int, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an optimizer's tensors by key, without copies, and its other values; ValueError if PyTorch loses one."""
    named_groups = group_names(prefix, optimizer, names)
    in_order = [name for group in named_groups for name in group]
    if type(optimizer).state_dict is Optimizer.state_dict:
        _check_keys(prefix, optimizer)
    own = optimizer.state_dict()
    values: dict[str, Any] = {"class": type(optimizer).__name__, "values": {}}
    if not _is_standard(own, len(in_order)):
        return {}, {**values, "groups": [{"params": group} for group in named_groups], "whole": own}
    tensors: dict[str, Tensor] = {}
    others: dict[Any, Any] = {}
    entries = [entry for entry in own["state"].values() if isinstance(entry, dict)]
    uses = Counter(id(value) for entry in entries for value in entry.values() if isinstance(value, Tensor))
    for number, entry in own["state"].items():
        if not _is_number(number, len(in_order)):
            others[number] = entry
        elif not isinstance(entry, dict):
            values["values"][in_order[number]] = entry
        else:
            rest = values["values"][in_order[number]] = {}
            for key, value in entry.items():
                # A tensor that several parameters share stays one in the pickle of a rank's values.
                is_own = isinstance(value, DTensor) or (isinstance(value, Tensor) and uses[id(value)] == 1)
                if is_own and isinstance(key, str) and "." not in key:
                    tensors[f"{prefix}.{in_order[number]}.{key}"] = value
                else:
                    rest[key] = value
    groups = zip(own["param_groups"], named_groups, strict=True)
    values["groups"] = [{**group, "params": own_names} for group, own_names in groups]
    more = {key: value for key, value in own.items() if key not in ("state", "param_groups")}
    return tensors, {**values, "others": others, "more": more}


def load(
    prefix: str, optimizer: Optimizer, saved: Mapping[str, Any], tensors: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """Load the values of `split` and the tensors of all objects; the groups have the same parameters."""
    if "whole" in saved:
        optimizer.load_state_dict(saved["whole"])
        return
    entries: dict[str, Any] = {
        name: dict(entry) if isinstance(entry, dict) else entry for name, entry in saved["values"].items()
    }
    for full_key, tensor in tensors.items():
        if full_key.startswith(f"{prefix}."):
            name, _, key = full_key.removeprefix(f"{prefix}.").rpartition(".")
            entries.setdefault(name, {})[key] = tensor
    numbers = {name: number for number, name in enumerate(chain(*group_names(prefix, optimizer, names)))}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["groups"]]
    state = {numbers[name]: entry for name, entry in entries.items()} | saved["others"]
    castable = {number: _castable(entry) for number, entry in state.items()}
    optimizer.load_state_dict({"state": castable, "param_groups": groups, **saved["more"]})
    own = parameters(optimizer)
    for number, entry in state.items():
        key = own[number] if _is_number(number, len(own)) else number
        if key in optimizer.state:
            optimizer.state[key] = _as_saved(optimizer.state[key], entry)


def difference(prefix: str, saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> str | None:
    """Return a line about the first group that has other parameters than in the checkpoint, or None."""
    for number, (before, now) in enumerate(zip_longest(saved, own, fillvalue=())):
        if list(before) == list(now):
            continue
        sides = {"the checkpoint": [name for name in before if name not in now]}
        sides["this script"] = [name for name in now if name not in before]
        parts = [f"only {side} has {_listed(names)} there" for side, names in sides.items() if names]
        return (
            f"{prefix}: parameter group {number} differs: {', '.join(parts) or 'its parameters have another order'}; "
            "make the groups of the saved step before resume: ray_on_ecs.saved_progress() returns its step and epoch"
        )
    return None


def _check_keys(prefix: str, optimizer: Optimizer) -> None:
    """Raise ValueError for a key of the state that `state_dict` loses."""
    own = parameters(optimizer)
    known = set(map(id, own))
    for key in optimizer.state:
        if isinstance(key, Tensor) and id(key) not in known:
            raise ValueError(
                f"{prefix}: its state has an entry of a tensor of shape {tuple(key.shape)} that is in none of its "
                "parameter groups; delete the entry, or add the tensor to a group"
            )
        if _is_number(key, len(own)):
            raise ValueError(
                f"{prefix}.state[{key!r}]: PyTorch's state_dict takes this number for a parameter; use text as the key"
            )


def _is_standard(own: Any, count: int) -> bool:
    """Return True for a state_dict in PyTorch's form, which numbers the parameters."""
    if not (isinstance(own, dict) and isinstance(own.get("state"), dict) and isinstance(own.get("param_groups"), list)):
        return False
    groups = own["param_groups"]
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return False
    return [number for group in groups for number in group["params"]] == list(range(count))


def _is_number(key: Any, count: int) -> bool:
    return isinstance(key, int) and 0 <= key < count


def _castable(value: Any) -> Any:
    """Return a state that `load_state_dict` can cast; it breaks text, arrays and other iterables, which become None."""
    if isinstance(value, Tensor) or not isinstance(value, Iterable):
        return value
    if type(value) in (dict, OrderedDict):
        return {key: _castable(each) for key, each in value.items()}
    return type(value)(map(_castable, value)) if type(value) in (list, tuple, set) else None


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return a loaded state with the dtypes that it was saved with: `load_state_dict` casts to the parameter's."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _as_saved(each, saved.get(key)) for key, each in loaded.items()}
    if type(saved) in (list, tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(map(_as_saved, loaded, saved))
    return saved if loaded is None else loaded


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
