"""Plain values of a training's state: those that a checkpoint loads without running code.

Numbers, text, lists, dicts, tensors and NumPy's arrays are plain, and so is what `torch.load` accepts besides.
https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
"""

from __future__ import annotations

import io
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ray_on_ecs.checkpoint import plain_pickle
from ray_on_ecs.errors import one_line

LEAVES = frozenset((float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
# PyTorch does not load an integer of more bytes.
MAX_INTEGER = 2 ** (8 * 255 - 1)
WAY_OUT = (
    "store numbers, text, lists, dicts, tensors and arrays of numbers, or set Checkpointer(trust_pickle=True) if you "
    "trust all who can write to the folder"
)


def plain(value: Any, key: str = "") -> Any:
    """Return a value that can be loaded: containers are copied, and NumPy's numbers become Python's.

    Args:
        value: A value of a state.
        key: Its name for the error.

    Raises:
        ValueError: It has a value that could not be loaded, or not be saved.
    """
    try:
        return _plain(value, key, {})
    except RecursionError as cause:
        raise ValueError(f"{key or 'the state'}: it is nested too deeply to be saved") from cause


def _plain(value: Any, key: str, copies: dict[int, Any]) -> Any:
    """Copy a value; `copies` are those of containers by ID, as a container may be in another one twice."""
    kind = type(value)
    if kind in LEAVES or _is_integer(value) or _is_tensor(value):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if kind in (dict, OrderedDict):
        copy = copies[id(value)] = kind()
        if kind is OrderedDict:  # that of a module has the versions of its parts
            vars(copy).update(_plain(vars(value), key, copies))
        if _has_leaves(value) and _has_leaves(value.values()):
            copy.update(value)
        else:
            for name, each in value.items():
                copy[_plain(name, key, copies)] = _plain(each, f"{key}.{name}".lstrip("."), copies)
        return copy
    if kind is list:
        copy = copies[id(value)] = []
        copy.extend(value if _has_leaves(value) else _all(value, key, copies))
        return copy
    if kind in (tuple, set):
        return value if _has_leaves(value) else kind(_all(value, key, copies))
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic) and value.dtype.char in f"{plain_pickle.NUMBERS}U":
        return _plain(value.item(), key, copies)
    if not (numpy and kind is numpy.ndarray and value.dtype.char in plain_pickle.NUMBERS):
        _check(value, key)
    return value


def _all(values: Iterable[Any], key: str, copies: dict[int, Any]) -> list[Any]:
    return [_plain(each, f"{key}.{number}", copies) for number, each in enumerate(values)]


def _has_leaves(values: Collection[Any]) -> bool:
    """Return True if all values are leaves; in C, as the states of samplers are long lists."""
    kinds = set(map(type, values))
    numbers = values if kinds == {int} else [value for value in values if type(value) is int]
    return kinds <= {*LEAVES, int} and (not numbers or (_is_integer(min(numbers)) and _is_integer(max(numbers))))


def _is_integer(value: Any) -> bool:
    return type(value) is int and -MAX_INTEGER <= value < MAX_INTEGER


def _is_tensor(value: Any) -> bool:
    return type(value) in (Tensor, Parameter) and not vars(value)


def _check(value: Any, key: str) -> None:
    """Raise ValueError unless PyTorch can save and load a value without running code."""
    kind = type(value)
    name = f"{key}: a value of class {kind.__module__}.{kind.__qualname__}"
    if kind.__name__ == "ndarray":
        name = f"{key}: an array of {value.dtype}"
    packed = io.BytesIO()
    try:
        torch.save(value, packed)
    except Exception as cause:  # a class's own method raises anything
        raise ValueError(f"{name} can't be saved ({one_line(cause)}); leave it out of the state") from cause
    packed.seek(0)
    try:
        plain_pickle.load_saved(packed)
    except ValueError as cause:
        raise ValueError(f"{name} can't be loaded without running code; {WAY_OUT}") from cause
