"""Pickles of plain data: numbers, text, containers, tensors, arrays, and PyTorch's descriptions of a checkpoint.

Every process that reaches the store of a training or writes to the folder of its checkpoints can put a pickle there.
Python's `pickle.loads` would run the code in it; this refuses all classes and functions but those listed here, and
those that `torch.load` accepts in saved values. A value of another class is refused before it is saved.
https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only
"""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable
from enum import Enum
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.serialization import _get_layout, get_unsafe_globals_in_checkpoint

from ray_on_ecs.errors import one_line

ALLOWED = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    planner.BytesIOWriteData,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
    _StorageInfo,
    _StoragePrefix,
    WriteResult,
    _get_layout,
    torch.Size,
    OrderedDict,
)


def _path(*parts: str) -> Path:
    return Path(*parts)


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration in place of `getattr`, by which Python 3.11.2 pickles it."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"{kind!r} is not an enumeration")
    return kind[name]


# Type codes of NumPy's numbers.
NUMBERS = "?bBhHiIlLqQefdFD"
LEAVES = frozenset((float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
# PyTorch does not load an integer of more bytes.
MAX_INTEGER = 2 ** (8 * 255 - 1)
WAY_OUT = (
    "store numbers, text, lists, dicts, tensors and arrays of numbers, or set Checkpointer(trust_pickle=True) if you "
    "trust all who can write to the folder"
)

_BY_NAME: dict[tuple[str, str], Any] = {(each.__module__, each.__qualname__): each for each in ALLOWED}
# A function: a pickle can set attributes of the classes above, which may disturb later checkpoints of this process, and
# must not change paths, which all use. The module of the class depends on the version of Python.
_BY_NAME |= {(module, "PosixPath"): _path for module in ("pathlib", "pathlib._local")}
_BY_NAME["builtins", "getattr"] = _member


def dumps(value: object) -> bytes:
    """Return the pickle of a value."""
    return pickle.dumps(value)


def loads(data: bytes) -> Any:
    """Return the value of a pickle; raises like `load`."""
    return load(BytesIO(data))


def load(file: IO[bytes]) -> Any:
    """Return the value of a pickle in a file; ValueError if it is not one, or has a class that is not listed here."""
    try:
        return _Unpickler(file).load()
    except OSError:
        raise
    except Exception as cause:  # bytes that are not a pickle raise nearly anything
        raise ValueError(f"a pickle can't be read: {cause}") from cause


def load_saved(file: IO[bytes]) -> Any:
    """Return the value that `torch.save` has written: tensors, arrays, and the data that PyTorch's own loading accepts.

    ValueError if it has a value of another class, or is damaged.
    """
    try:
        with torch.serialization.safe_globals(_classes_of_numpy()):
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as cause:
        raise ValueError(f"a value can't be read: {_reason(file) or one_line(cause)}") from cause


def pack(value: Any) -> bytes:
    """Return the bytes of torch.save, as one value that a planner does not flatten."""
    packed = BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def unpack(packed: bytes, *, is_trusted: bool) -> Any:
    """Return the value of `pack`; ValueError for a class that only a trusted checkpoint may have."""
    try:
        return load_saved(BytesIO(packed))
    except ValueError as cause:
        if not is_trusted:
            raise ValueError(f"{cause}, and loading that may run code; {WAY_OUT}") from cause
    try:  # the user has set trust_pickle
        return torch.load(BytesIO(packed), map_location="cpu", weights_only=False)  # nosec B614
    except Exception as cause:  # a class that has gone or changed raises anything
        raise ValueError(f"a value can't be read: {type(cause).__name__}: {one_line(cause)}") from cause


def plain(value: Any, key: str = "") -> Any:
    """Return a value that can be loaded: containers are copied, and NumPy's numbers become Python's.

    ValueError with the key of a value that could not be saved or loaded.
    """
    try:
        return _plain(value, key, {})
    except RecursionError as cause:
        raise ValueError(f"{key or 'the state'}: it is nested too deeply to be saved") from cause


@cache
def _classes_of_numpy() -> list[Any]:
    """Return the classes of an array of numbers, by the names of NumPy 1 and 2; none without NumPy."""
    try:
        import numpy as np
    except ImportError:
        return []
    reconstruct = np.empty(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((reconstruct, name) for name in names), np.ndarray, np.dtype, *{type(np.dtype(code)) for code in NUMBERS}]


def _reason(file: IO[bytes]) -> str:
    """Return the classes that PyTorch does not load from a file; empty if it has none, or is damaged."""
    try:
        file.seek(0)
        with torch.serialization.safe_globals(_classes_of_numpy()):
            return ", ".join(get_unsafe_globals_in_checkpoint(file))
    except Exception:
        return ""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _BY_NAME:
            return _BY_NAME[module, name]
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def _plain(value: Any, key: str, copies: dict[int, Any]) -> Any:
    """Copy a value; `copies` are those of containers by ID, as a container may be in another one twice."""
    kind = type(value)
    if kind in LEAVES or _is_integer(value) or (kind in (Tensor, Parameter) and not vars(value)):
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
    if numpy and isinstance(value, numpy.generic) and value.dtype.char in f"{NUMBERS}U":
        return _plain(value.item(), key, copies)
    if not (numpy and kind is numpy.ndarray and value.dtype.char in NUMBERS):
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


def _check(value: Any, key: str) -> None:
    """Raise ValueError unless PyTorch can save and load a value without running code."""
    kind = type(value)
    if kind is DTensor:
        raise ValueError(
            f"{key}: a sharded tensor in a list, a dict or the state of another object can't be divided among other "
            "ranks; keep it in the optimizer's state of its parameter, under a name without dots"
        )
    name = f"{key}: a value of class {kind.__module__}.{kind.__qualname__}"
    if kind.__name__ == "ndarray":
        name = f"{key}: an array of {value.dtype}"
    packed = BytesIO()
    try:
        torch.save(value, packed)
    except Exception as cause:  # a class's own method raises anything
        raise ValueError(f"{name} can't be saved ({one_line(cause)}); leave it out of the state") from cause
    packed.seek(0)
    try:
        load_saved(packed)
    except ValueError as cause:
        raise ValueError(f"{name} can't be loaded without running code; {WAY_OUT}") from cause
