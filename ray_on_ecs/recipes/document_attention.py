"""Flash attention within the documents of a packed batch: torch's variable-length attention, without masks.

It is registered with transformers under the name of `ATTENTION`:
https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "ray_on_ecs_documents"
# Options that it lacks; transformers passes them to the models that need them.
REFUSED = ("softcap", "s_aux", "position_bias")


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, cu_seq_lens_q: Tensor,
    max_length_q: int, scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention of tensors of shape [sequences, heads, context, width], as [sequences, context, heads, …].

    A model without a mask for its kind of attention passes none; the documents are told apart by their offsets.
    """
    if unknown := [name for name in REFUSED if others.get(name) is not None]:
        raise ValueError(f"variable-length attention has no {unknown[0]}")
    if dropout or attention_mask is not None or others.get("is_causal") is False:
        raise ValueError("variable-length attention has neither dropout nor a mask, and is causal")
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    packed = [each.transpose(1, 2).flatten(0, 1).to(dtype) for each in (query, key, value)]
    within = _varlen if device == "cuda" else _one_by_one
    result = within(*packed, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    return result.unflatten(0, (len(query), -1)), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """Return the attention of tensors of shape [tokens, heads, width], by flash attention."""
    result: Any = varlen_attn(
        *(query, key, value, offsets, offsets, longest, longest),
        scale=scale,
        window_size=(-1, 0) if window is None or window >= longest else (window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return result


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """Return the same, one document after the other: the reference, for the CPU."""
    results = []
    for start, end in pairwise(offsets.tolist()):
        parts = [each[start:end].transpose(0, 1)[None] for each in (query, key, value)]
        mask = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).tril()
        mask = mask if window is None else mask.triu(1 - window)
        is_grouped = query.shape[1] != key.shape[1]
        result = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
        results.append(result[0].transpose(0, 1))
    return torch.cat(results)


AttentionInterface.register(ATTENTION, attend)


@torch.no_grad()
def fault_of_model(model: Any) -> str | None:
    """Return the reason why a model can't have this attention: it fails, or its logits are others than with masks."""
    implementation, was_training = model.config._attn_implementation, model.training
    if getattr(model.config, "attention_dropout", 0.0):
        return "the model has attention dropout"
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None].to(model.device)
    tokens = torch.arange(16, device=model.device)[None]
    offsets = torch.tensor([0, 7, 16], dtype=torch.int32, device=model.device)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 16, "max_length_k": 16}
    try:
        expected = model.eval()(input_ids=tokens, position_ids=positions, use_cache=False).logits.float()
        model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            return "its attention can't be replaced"
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **lengths).logits.float()
    except Exception as cause:  # a model may be anything
        return str(cause).partition("\n")[0]
    finally:
        model.set_attn_implementation(implementation)
        model.train(was_training)
    error = _difference(logits, expected)
    limit = 1e-3 if model.dtype == torch.float32 else 0.05
    return None if error <= limit else f"its logits differ by {error:.2g} from those with masks"


def fault_of_gpu(config: Any, device: torch.device) -> str | None:
    """Return the reason why a GPU can't compute it in bf16 for a model's heads, forward and backward."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    offsets = torch.tensor([0, 200, 256], dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(256, count, width) for count in (heads, groups, groups, heads)]
    try:
        query, key, value, factor = (
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes
        )
        inputs = [each.requires_grad_() for each in (query, key, value)]
        results = []
        for within in (_varlen, _one_by_one):
            result = within(*inputs, offsets, 256, None, None)
            results.append([result, *torch.autograd.grad(result, inputs, factor)])
        errors = [_difference(*pair) for pair in zip(*results, strict=True)]
    except Exception as cause:  # kernels fail in many ways
        return str(cause).partition("\n")[0]
    error = torch.stack(errors).max()
    return None if error <= 0.05 else f"its results differ by {error:.2g} from those of masks"


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference, relative to the largest value."""
    return (found - expected).abs().max() / expected.abs().max()
