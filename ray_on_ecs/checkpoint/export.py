"""The weights as safetensors, in the layout of Hugging Face's libraries, written by all ranks.

https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint.collectives import Collectives
from ray_on_ecs.checkpoint.modules import plain_name
from ray_on_ecs.filesystem import short_reason
from ray_on_ecs.tracking.storage import RunStorage

# Of one file; each rank has one of them in memory at a time.
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
    """Write a module's state_dict; all ranks must call it.

    Rank r writes every n-th file. For each round of files, all ranks gather the tensors of the round, and each keeps
    those of the file that it writes. Several files are `model-00001-of-00003.safetensors` and so on, with an index.

    Args:
        module: The module, also under FSDP2.
        storage: The folder.
        name: The file's name.
        ranks: All ranks.
        file_bytes: The most bytes of a file, unless a single tensor has more.
        metadata: Strings for the header of each file.
        dtype: Of the parameters in the files, or each its own.

    Raises:
        OSError: A file could not be written; all ranks raise it.
    """
    tensors = _without_aliases(module)
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    sizes = {
        key: tensor.numel() * (dtype if dtype and key in parameters else tensor.dtype).itemsize
        for key, tensor in tensors.items()
    }
    files = _divide(sizes, file_bytes)
    names = _file_names(name, len(files))
    fault: str | None = None
    for first in range(0, len(files), ranks.world_size):
        mine: dict[str, Tensor] = {}
        for number, keys in enumerate(files[first : first + ranks.world_size]):
            for key in keys:
                sdk.alive()
                whole = _whole(tensors[key])  # by all ranks
                if number == ranks.rank:
                    # On a CPU two buffers may share their memory, which a file can't.
                    kind = dtype if key in parameters and whole.is_floating_point() else None
                    mine[plain_name(key)] = whole.detach().to("cpu", dtype=kind, copy=True).contiguous()
        if mine and fault is None:
            fault = _write(storage, names[first + ranks.rank], lambda mine=mine: _serialize(mine, metadata or {}))
    if ranks.rank == 0 and len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {plain_name(key): names[number] for number, keys in enumerate(files) for key in keys},
        }
        fault = fault or _write(storage, f"{name}.index.json", lambda: json.dumps(index, indent=2).encode())
    if found := ranks.first(fault):
        raise OSError(f"the weights could not be written to {storage.uri}/{name}: {found}")


def _serialize(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a file, the same for the same weights: safetensors writes its metadata in random order."""
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
    """Return the tensors of a state_dict; of tied weights the first name alone, as safetensors wants it."""
    tied: set[int] = set()
    tensors: dict[str, Tensor] = {}
    parameters = {name: id(each) for name, each in module.named_parameters(remove_duplicate=False)}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or parameters.get(name) in tied:
            continue
        if name in parameters:
            tied.add(parameters[name])
        tensors[name] = value
    return tensors


def _divide(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Return the names for each file, in order."""
    files: list[list[str]] = [[]]
    size = 0
    for name, number in sizes.items():
        if files[-1] and size + number > file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += number
    return files


def _file_names(name: str, number: int) -> list[str]:
    if number == 1:
        return [name]
    path = PurePosixPath(name)
    return [f"{path.stem}-{each:05d}-of-{number:05d}{path.suffix}" for each in range(1, number + 1)]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _write(storage: RunStorage, name: str, content: Callable[[], bytes]) -> str | None:
    """Write a file; returns the reason if that fails, which the other ranks must hear."""
    try:
        storage.write(name, content())
    except Exception as cause:
        return short_reason(cause)
    return None
