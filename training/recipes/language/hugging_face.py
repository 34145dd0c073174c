"""Checkpoints of the Llama family in Hugging Face's folders: config.json, tokenizer.json and *.safetensors.

https://huggingface.co/docs/transformers/model_doc/llama
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ray_on_ecs.errors import UsageError
from training.recipes.language.corpus import Corpus
from training.recipes.language.model import ModelConfig, RopeScaling
from training.recipes.language.sharding import whole

FOLDER = "hugging_face"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A file of weights has at most so many bytes, since rank 0 has it in memory.
FILE_BYTES = 2 * 2**30
# What a config.json of the family may lack, and what it must say for the model to be ours.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
NEEDED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}
# The kind of scaled positions that we know, and its values, by our names of them.
LLAMA3 = "llama3"
SCALING = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "context": "original_max_position_embeddings",
}
# Our names of the parts, and theirs.
NAMES = {
    "embedding.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "output.": "lm_head.",
    "blocks.": "model.layers.",
}
BLOCK_NAMES = {
    "attention_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "attention.query.": "self_attn.q_proj.",
    "attention.key.": "self_attn.k_proj.",
    "attention.value.": "self_attn.v_proj.",
    "attention.output.": "self_attn.o_proj.",
    "mlp.gate.": "mlp.gate_proj.",
    "mlp.up.": "mlp.up_proj.",
    "mlp.down.": "mlp.down_proj.",
}


class Checkpoint:
    """A checkpoint to start from; weights are read when they are asked for.

    Attributes:
        shape: The shape of its model.
        tokenizer: Its tokenizer's file.

    Args:
        folder: The folder.

    Raises:
        UsageError: A file is missing, or the model is of another family.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer = folder / "tokenizer.json"
        if not (folder / "config.json").is_file() or not self.tokenizer.is_file():
            raise UsageError(
                f"--model: {folder} has no config.json and tokenizer.json, as a Hugging Face checkpoint has"
            )
        self.shape = shape_of(json.loads((folder / "config.json").read_text()), folder)
        self._files = self._find_files()

    @torch.no_grad()
    def fill(self, name: str, parameter: Tensor) -> None:
        """Fill a parameter with the checkpoint's weights.

        Raises:
            UsageError: The checkpoint has no such weights, or they have another shape.
        """
        theirs = their_name(name)
        if (file := self._files.get(theirs)) is None:
            raise UsageError(f"--model: {self._folder} has no weights {theirs}")
        with safe_open(self._folder / file, "pt") as weights:
            found = weights.get_tensor(theirs)
        if found.shape != parameter.shape:
            raise UsageError(
                f"--model: {theirs} in {self._folder} is {tuple(found.shape)}, and its config.json makes it "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(found)

    def _find_files(self) -> dict[str, str]:
        """Return the file of each of the weights."""
        if (index := self._folder / INDEX).is_file():
            return json.loads(index.read_text())["weight_map"]
        if not (self._folder / WEIGHTS).is_file():
            raise UsageError(f"--model: {self._folder} has no {WEIGHTS} and no {INDEX}")
        with safe_open(self._folder / WEIGHTS, "pt") as weights:
            return dict.fromkeys(weights.keys(), WEIGHTS)


def shape_of(document: Mapping[str, Any], folder: Path) -> ModelConfig:
    """Return the shape that a config.json describes.

    Raises:
        UsageError: The model is not one of ours.
    """
    for name, values in NEEDED.items():
        if document.get(name, values[0]) not in values:
            raise UsageError(
                f"--model: {folder} has {name} {document[name]!r}, and only {values[0]!r} can be trained here"
            )
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", LLAMA3):
        raise UsageError(f"--model: {folder} has positions that are scaled as {kind!r}, which can't be trained here")
    known = {**DEFAULTS, **document}
    heads = known["num_attention_heads"]
    if (known.get("head_dim") or known["hidden_size"] // heads) * heads != known["hidden_size"]:
        raise UsageError(f"--model: {folder} has head_dim {known['head_dim']}, which times the heads is not its width")
    return ModelConfig(
        vocab_size=known["vocab_size"],
        layers=known["num_hidden_layers"],
        width=known["hidden_size"],
        heads=heads,
        kv_heads=known.get("num_key_value_heads") or heads,
        mlp_width=known["intermediate_size"],
        context=known["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta") or known.get("rope_theta") or 10_000.0),
        rope_scaling=RopeScaling(**{ours: rope[theirs] for ours, theirs in SCALING.items()})
        if kind == LLAMA3
        else None,
        norm_eps=known["rms_norm_eps"],
        tied=known["tie_word_embeddings"],
    )


def document_of(shape: ModelConfig, end: int | None) -> dict[str, Any]:
    """Return the config.json of a model; `end` is the token after a document."""
    scaling = None
    if shape.rope_scaling:
        scaling = {
            "rope_type": LLAMA3,
            **{theirs: getattr(shape.rope_scaling, ours) for ours, theirs in SCALING.items()},
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.mlp_width,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def export(model: nn.Module, shape: ModelConfig, corpus: Corpus, rank: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a checkpoint's folder, by their names; every rank of a sharded model must call it.

    On other ranks than 0 the files of weights are empty.
    """
    yield f"{FOLDER}/config.json", _json(document_of(shape, corpus.end))
    yield f"{FOLDER}/tokenizer.json", corpus.tokenizer.to_str(pretty=True).encode()
    parts = _parts({name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()})
    parameters = dict(model.named_parameters())
    files = {
        WEIGHTS if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors": names
        for number, names in enumerate(parts, start=1)
    }
    for file, names in files.items():
        weights = {
            their_name(name): gathered for name in names if (gathered := _gather(parameters[name], rank)) is not None
        }
        yield f"{FOLDER}/{file}", save(weights, metadata={"format": "pt"})
    if len(files) > 1:
        index = {their_name(name): file for file, names in files.items() for name in names}
        yield f"{FOLDER}/{INDEX}", _json({"metadata": {}, "weight_map": index})


def their_name(name: str) -> str:
    """Return Hugging Face's name of a parameter of ours."""
    if found := re.fullmatch(r"blocks\.(\d+)\.(.+\.)(\w+)", name):
        return f"{NAMES['blocks.']}{found[1]}.{BLOCK_NAMES[found[2]]}{found[3]}"
    part, _, rest = name.partition(".")
    return NAMES[f"{part}."] + rest


def _gather(parameter: Tensor, rank: int) -> Tensor | None:
    """Return a whole parameter in host memory on rank 0, and nothing on the others, which have to call it, too."""
    gathered = whole(parameter.detach())
    return gathered.cpu() if rank == 0 else None


def _parts(sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide parameters, by their bytes, into parts of `FILE_BYTES` or less."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if filled + size > FILE_BYTES and parts[-1]:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    return parts


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
