"""The loss of a language model's tokens, whose logits are never in memory for a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, log_softmax

from ray_on_ecs.recipes.documents import IGNORED

# Logits in memory at once: 0.5 GiB with their gradients in bf16. Fewer would be matrix products too small for a GPU.
LOGITS = 2**26


class TokenLoss(nn.Module):
    """A module that DDP or FSDP2 wraps: the sum of the losses of a batch's tokens under a model of transformers.

    It calls the model's decoder and computes the loss from the last hidden states and the output layer. A model that
    changes its logits, as Gemma 2 does, is called as a whole: then the logits of a micro-batch are in memory.

    Args:
        model: The model, also with peft's adapters. Its state_dict is that of the training, not this module's.
        is_plain: The logits are the output layer's result, as `has_plain_logits` finds.
        attends_within_documents: The model has `document_attention`, which needs the offsets of documents.
    """

    def __init__(self, model: Any, *, is_plain: bool, attends_within_documents: bool = False) -> None:
        super().__init__()
        base = base_model(model)
        self.attends_within_documents = attends_within_documents
        self.decoder = base.base_model if is_plain else base
        self.head = HeadLoss(base.get_output_embeddings()) if is_plain else None

    def forward(
        self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, document_offsets: Tensor | None = None
    ) -> Tensor:
        """Return the sum for tokens and labels of shape [sequences, context], in fp32."""
        extra: dict[str, Any] = {}
        if self.attends_within_documents:  # the names of transformers' FlashAttentionKwargs
            # The longest that a document may be: its real length would be another one for each batch to compile.
            longest = input_ids.shape[1]
            extra = {"cu_seq_lens_q": document_offsets, "cu_seq_lens_k": document_offsets,
                     "max_length_q": longest, "max_length_k": longest}  # fmt: skip
        output = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)
        if self.head is not None:
            return self.head(output.last_hidden_state, labels)
        logits = output.logits.flatten(0, 1).float()
        return cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


class HeadLoss(nn.Module):
    """Output layer and loss in one module, so that FSDP2 gathers the layer's weights for it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the sum for hidden states of shape [sequences, context, width]."""
        return linear_cross_entropy(hidden.flatten(0, 1), self.layer.weight, self.layer.bias, labels.flatten())


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropies of `linear(hidden, weight, bias)` in fp32, without all logits in memory.

    The forward pass computes the gradients as well, so that no logits are computed twice, as Liger's does:
    https://github.com/linkedin/Liger-Kernel. torch's function of this name returns the loss of bf16 in bf16.
    """
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, grad: bool) -> Tensor:
        needs_hidden, needs_weight, needs_bias = (needed and grad for needed in ctx.needs_input_grad[:3])
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden, dtype=dtype) if needs_hidden else None
        # Sums of all chunks, which bf16 would round each time.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        size = max(1, LOGITS // len(weight))
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            states, targets = hidden[chunk].to(dtype), labels[chunk].clamp(min=0)[:, None]
            learned = (labels[chunk] != IGNORED)[:, None]
            with torch.autocast(device, enabled=False):
                log_probabilities = log_softmax(linear(states, matrix, offset), 1, dtype=torch.float32)
                loss -= (log_probabilities.gather(1, targets) * learned).sum()
                if not (needs_hidden or needs_weight or needs_bias):
                    continue
                # The gradient of the logits: probabilities, and one less for the target. Rows of ignored labels are
                # set to zero in what they are multiplied with, which is smaller.
                gradients = log_probabilities.exp_()
                gradients.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=torch.float32))
                gradients = gradients.to(dtype)
                if of_hidden is not None:
                    torch.mul(gradients @ matrix, learned, out=of_hidden[chunk])
                if of_weight is not None:
                    of_weight += gradients.T @ (states * learned)
                if of_bias is not None:
                    of_bias += (gradients * learned).sum(0, dtype=torch.float32)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> Any:
        # In place: they are as large as the output layer. A second backward pass is refused, as they have changed.
        return *(
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ), None, None  # fmt: skip


def base_model(model: Any) -> Any:
    """Return the model of transformers that peft's adapters are in, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def has_plain_logits(model: Any) -> bool:
    """Return True if the logits are the output layer's result for the decoder's last hidden states, and nothing more.

    Some models scale or cap their logits. It is found out with a few tokens, as configurations name that differently.
    """
    base = base_model(model)
    head = base.get_output_embeddings()
    if base.base_model is base or not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    seen: list[Any] = []
    hooks = [
        base.base_model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state)),
        head.register_forward_hook(lambda module, args, output: seen.extend([args[0], output])),
    ]
    was_training = model.training
    try:
        tokens = torch.arange(8, device=head.weight.device)[None]
        logits = model.eval()(input_ids=tokens, position_ids=tokens, use_cache=False).logits
    except AttributeError:  # a decoder with other outputs
        return False
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    if len(seen) != 3:
        return False
    hidden, head_input, head_output = seen
    return torch.equal(hidden, head_input) and torch.equal(head_output.float(), logits.float())
