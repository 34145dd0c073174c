"""Models that classify images: torchvision's or a function's, and pretrained weights for them."""

from __future__ import annotations

import copy
import json
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torchvision
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights, list_models

from ray_on_ecs.recipes.options import fail
from ray_on_ecs.storage.filesystem import fetch

SUFFIXES = (".safetensors", ".pth", ".pt")
METADATA = "image_classifier"  # key of a description in the header of exported weights
SHOWN_NAMES = 3


def build_model(name: str, channels: int, classes: int) -> nn.Module:
    """Build a model of torchvision, or by module:function of (channels, classes), with random weights."""
    try:
        if ":" in name:
            sys.path.insert(0, os.getcwd())
            model = pkgutil.resolve_name(name.replace(".py:", ":"))(channels, classes)
        elif name in list_models(module=torchvision.models):
            model = get_model(name, weights=None, num_classes=classes)
        else:
            fail(f"argument --model: {name!r} is neither a model of torchvision nor module:function, such as "
                 f"{Path(sys.argv[0]).stem}:build for one of this script")  # fmt: skip
    except Exception as cause:  # the user's module may fail in any way
        fail(f"argument --model: {name!r} can't be built ({type(cause).__name__}: {cause})")
    if not isinstance(model, nn.Module):
        fail(f"argument --model: {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if ":" not in name and first is not None and first.in_channels != channels:  # torchvision's models take RGB
        first.in_channels = channels
        first.weight = nn.Parameter(first.weight.new_empty(first.out_channels, channels, *first.kernel_size))
        first.reset_parameters()
    return model


def check_model(name: str, model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Fail unless a model in training mode returns logits [2, classes] for two images of a shape."""
    device = next((parameter.device for parameter in model.parameters()), None)
    try:
        logits = copy.deepcopy(model)(torch.zeros(2, *shape, device=device))
    except Exception as cause:  # the user's module may fail in any way
        fail(f"argument --model: {name!r} can't take images of {'x'.join(map(str, shape))} ({cause})")
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        fail(f"argument --model: {name!r} doesn't return one logit for each of {classes} classes, but "
             f"{tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__}")  # fmt: skip


def load_weights(model: nn.Module, name: str, source: str) -> tuple[list[float], list[float]] | None:
    """Load pretrained weights into a model, but for a last layer with another number of classes.

    Args:
        model: The model, as `build_model` returned it.
        name: Its name.
        source: DEFAULT or another name of torchvision's weights, which are downloaded once per node; or a file or
            folder, also `s3://…`, with the state dict as .safetensors or .pth.

    Returns:
        Mean and standard deviation of the channels, from 0 to 255, that the weights expect; None if nothing says so.
    """
    known = get_model_weights(name) if ":" not in name else None
    expected = None
    if known is not None and source in known.__members__:  # among them DEFAULT
        weights = known[source]
        state = _download(name, weights)
    else:
        weights = known["DEFAULT"] if known is not None else None
        state, expected = _read(source, [*reversed(known.__members__)] if known is not None else [])
    channels = _fit(model, state, source)
    if expected is None and weights is not None:
        transforms = weights.transforms()
        expected = [255 * value for value in transforms.mean], [255 * value for value in transforms.std]
    if expected is not None and channels == 1:
        expected = [sum(expected[0]) / len(expected[0])], [sum(expected[1]) / len(expected[1])]
    return expected


def _download(name: str, weights: Any) -> dict[str, Tensor]:
    folder = Path(torch.hub.get_dir(), "checkpoints")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock"):  # one download for each node
            return get_model(name, weights=weights, progress=False).state_dict()
    except (OSError, RuntimeError) as cause:  # RuntimeError: the file's hash is another one
        fail(
            f"argument --weights: {weights.name} of {name} can't be downloaded ({cause}); download {weights.url} "
            f"elsewhere, and give the file or s3://bucket/key: --weights FILE",
            status=1,
        )


def _read(source: str, known: list[str]) -> tuple[dict[str, Tensor], tuple[list[float], list[float]] | None]:
    """Read a file's state dict, and what its header says of mean and standard deviation."""
    try:
        file = fetch(source if "://" in source else str(Path(source).expanduser()), "--weights")
        if file.is_dir():
            files = sorted(each for each in file.iterdir() if each.suffix in SUFFIXES)
            if len(files) != 1:
                raise ValueError(f"it has {len(files)} files {', '.join(SUFFIXES)}; give one of them")
            [file] = files
        if not file.exists():
            names = "".join(f"{each}, " for each in known)
            fail(f"argument --weights: {source!r} is not {names}a file, a folder, or s3://bucket/key")
        if file.suffix == ".safetensors":
            return load_file(file), _described(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("it is not a state dict; save model.state_dict() alone")
        return state, None
    except Exception as cause:  # a file may be broken in any way
        fail(f"argument --weights: {source!r} can't be read ({cause})", status=1 if "://" in source else 2)


def _described(file: Path) -> tuple[list[float], list[float]] | None:
    with safe_open(file, "pt") as opened:
        found = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
    return (found["mean"], found["std"]) if found else None


def _fit(model: nn.Module, state: dict[str, Tensor], source: str) -> int:
    """Load a state dict, but for a last layer with another number of classes; return the model's channels."""
    # densenet's files have names of an old torchvision: norm.1 for norm1.
    state = {re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", key): value for key, value in state.items()}
    layers = [(key, module) for key, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if not layers:
        fail("argument --weights: the model has neither a Linear nor a Conv2d")
    own, (first, last) = model.state_dict(), (layers[0][0], layers[-1][0])
    stem = f"{first}.weight"
    if stem in state and stem in own and state[stem].dim() == 4 and state[stem].shape[1] != own[stem].shape[1] == 1:
        state[stem] = state[stem].sum(1, keepdim=True)  # a gray image is one with three equal colors
    if f"{last}.weight" in state and state[f"{last}.weight"].shape != own[f"{last}.weight"].shape:
        state |= {key: own[key] for key in (f"{last}.weight", f"{last}.bias") if key in own}
    counters = {key: value for key, value in own.items() if key.endswith("num_batches_tracked")}  # old files lack them
    state = counters | state
    faults = [f"{key} is missing" for key in own.keys() - state.keys()]
    faults += [f"{key} is not of the model" for key in state.keys() - own.keys()]
    faults += [
        f"{key} is {list(value.shape)}, not {list(own[key].shape)}"
        for key, value in state.items()
        if key in own and value.shape != own[key].shape
    ]
    if faults:
        others = f", and {len(faults) - SHOWN_NAMES} more" if len(faults) > SHOWN_NAMES else ""
        fail(f"argument --weights: {source!r} does not fit --model: {', '.join(sorted(faults)[:SHOWN_NAMES])}{others}")
    model.load_state_dict(state)
    return own[stem].shape[1]
