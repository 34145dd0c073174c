"""Export of the weights as safetensors in Hugging Face's layout, written by all ranks.

https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePosixPath

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.modules import plain_name
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.storage.run_storage import RunStorage

# Size of a file; each rank holds one file in memory.
FILE_BYTES = 2 * 10**9


def export_weights(
    module: nn.Module,
    storage: RunStorage,
    name: str,
    ranks: Collectives,
    file_bytes: int = FILE_BYTES,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a module's state_dict with this metadata; all ranks must call it.

    The floating-point parameters get the data type; integers, complex numbers and buffers keep theirs.

    The files are written in rounds of one file per rank: all ranks gather the tensors of the round, and each keeps the
    tensors of its file. Several files are named `model-00001-of-00003.safetensors` and so on, and get an index. A file
    has at most `file_bytes`, unless a single tensor is larger. All ranks raise OSError if one could not be written.
    """
    tensors = _without_aliases(module)
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    dtypes = {
        key: dtype if dtype and key in parameters and tensor.is_floating_point() else tensor.dtype
        for key, tensor in tensors.items()
    }
    sizes = {key: tensor.numel() * dtypes[key].itemsize for key, tensor in tensors.items()}
    files = _divide(sizes, file_bytes)
    names = [name]
    if len(files) > 1:
        path = PurePosixPath(name)
        names = [f"{path.stem}-{number:05d}-of-{len(files):05d}{path.suffix}" for number in range(1, len(files) + 1)]
    fault: str | None = None
    for first in range(0, len(files), ranks.world_size):
        content: dict[str, Tensor] = {}
        for rank, keys in enumerate(files[first : first + ranks.world_size]):
            for key in keys:
                sdk.alive()
                tensor = tensors[key]
                if isinstance(tensor, DTensor):
                    tensor = tensor.full_tensor()  # a collective: on every rank, for every file
                if rank == ranks.rank:
                    # A copy, as buffers on a CPU may share their memory, which safetensors refuses.
                    content[plain_name(key)] = tensor.detach().to("cpu", dtype=dtypes[key], copy=True).contiguous()
        if content and fault is None:
            serialize = partial(_serialize, content, metadata or {})
            fault = _write(storage, names[first + ranks.rank], serialize)
    if ranks.rank == 0 and len(files) > 1 and fault is None:
        weight_map: dict[str, str] = {}
        for file_name, keys in zip(names, files, strict=True):
            weight_map |= {plain_name(key): file_name for key in keys}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        fault = _write(storage, f"{name}.index.json", lambda: json.dumps(index, indent=2).encode())
    fault = ranks.first(fault)
    if fault:
        raise OSError(f"the weights could not be written to {storage.uri}/{name}: {fault}")


def _serialize(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a file. It is reproducible: safetensors writes its metadata in random order."""
    content = save(tensors, metadata={**metadata, "format": "pt"})
    if not metadata:
        return content
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, content[end:]])


def _without_aliases(module: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors of a state_dict, with only the first name of tied weights, as safetensors requires."""
    tied: set[int] = set()
    tensors: dict[str, Tensor] = {}
    parameters = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or parameters.get(name) in tied:
            continue
        if name in parameters:
            tied.add(parameters[name])
        tensors[name] = value
    return tensors


def _divide(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Return the names of the tensors in each file, in order."""
    files: list[list[str]] = [[]]
    file_size = 0
    for name, size in sizes.items():
        if files[-1] and file_size + size > file_bytes:
            files.append([])
            file_size = 0
        files[-1].append(name)
        file_size += size
    return files


def _write(storage: RunStorage, name: str, serialize: Callable[[], bytes]) -> str | None:
    """Write a file; returns the reason if that fails, as all ranks have to raise it."""
    try:
        storage.write(name, serialize())
    except Exception as cause:
        return short_reason(cause)
    return None
