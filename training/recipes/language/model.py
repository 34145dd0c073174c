"""The model: a decoder of the Llama family in plain PyTorch (Touvron et al. 2023, https://arxiv.org/abs/2302.13971).

Pre-norm RMSNorm, rotary position embeddings, grouped-query attention with a causal mask, and SwiGLU, without biases. It
has no buffers, so its parameters are all of its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from training.engine import random_state

INIT_STD = 0.02
# The layers of SwiGLU have 8/3 of the width, in multiples of this.
MLP_MULTIPLE = 64
# What a seed for a weight is derived for, beside those in `random_state`.
WEIGHTS = 2

# Fills a parameter by its name in place.
Fill = Callable[[str, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later slow down the rotary embedding's lower frequencies, for longer sequences.

    https://huggingface.co/docs/transformers/internal/rope_utils ("llama3")

    Attributes:
        factor: Divides the frequencies of pairs that turn at most `low` times in `context` tokens.
        low: Up to so many turns, a pair is slowed down by the whole factor.
        high: From so many turns on, a pair is left as it is; in between, it is slowed down by a part of the factor.
        context: Tokens of a sequence for which the frequencies were made.
    """

    factor: float
    low: float
    high: float
    context: int

    def scale(self, frequencies: Tensor) -> Tensor:
        """Return the slower frequencies of frequencies in radians per token."""
        turns = self.context * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model.

    Attributes:
        vocab_size: Number of tokens that it knows.
        layers: Number of its blocks.
        width: Numbers per token between the blocks.
        heads: Attention heads.
        kv_heads: Heads of keys and values; each is shared by `heads / kv_heads` attention heads.
        mlp_width: Numbers per token within SwiGLU.
        context: Most tokens of a sequence.
        rope_theta: The base of the rotary embedding's frequencies.
        rope_scaling: How these are slowed down, if they are.
        norm_eps: What RMSNorm adds to the mean square.
        tied: Whether the weights of the embedding are also those of the output.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    context: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = True

    @property
    def head_width(self) -> int:
        """Numbers per token of a head."""
        return self.width // self.heads

    @property
    def matrix_parameters(self) -> int:
        """Number of weights that each token is multiplied with, those of the output included."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp_width) + self.vocab_size * self.width

    @property
    def parameters(self) -> int:
        """Number of all weights; tied ones count once."""
        norms = (2 * self.layers + 1) * self.width
        return self.matrix_parameters + norms + (0 if self.tied else self.vocab_size * self.width)

    def flops_per_token(self, context: int) -> int:
        """Return the floating-point operations of training on one token of a sequence of `context` tokens.

        6 N for the matrices and 12 L H Q T for the attention, whose causal mask isn't counted as a saving, nor is
        activation checkpointing as a cost (Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311).
        """
        return 6 * self.matrix_parameters + 12 * self.layers * self.width * context


def default_mlp_width(width: int) -> int:
    """Return the width of SwiGLU that has as many weights as an MLP of four times the width."""
    return MLP_MULTIPLE * math.ceil(8 * width / 3 / MLP_MULTIPLE)


class LanguageModel(nn.Module):
    """Predicts the next token at each position.

    Args:
        config: Its shape.
        recompute: Compute each block again in the backward pass instead of keeping its activations.
    """

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, recompute=recompute) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.output = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [n, length, vocab_size] of the tokens that follow each of `tokens` [n, length]."""
        rotation = rotary_angles(tokens.shape[1], self.config, tokens.device)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, rotation)
        hidden = self.norm(hidden)
        return linear(hidden, self.embedding.weight) if self.output is None else self.output(hidden)

    def units(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the parts that make up the model, each with the prefix of its parameters' names: the blocks first."""
        for index, block in enumerate(self.blocks):
            yield f"blocks.{index}.", block
        for name, module in self.named_children():
            if module is not self.blocks:
                yield f"{name}.", module


class Block(nn.Module):
    """Attention and then SwiGLU, each on normalized input and added to it."""

    def __init__(self, config: ModelConfig, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        """Return hidden states [n, length, width] from such; `rotation` is that of `rotary_angles`."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, hidden, rotation, use_reentrant=False)
        return self._compute(hidden, rotation)

    def _compute(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Attention(nn.Module):
    """Causal attention, whose heads share keys and values in groups (Ainslie et al. 2023).

    https://arxiv.org/abs/2305.13245
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.shared = config.heads > config.kv_heads
        projection = partial(nn.Linear, bias=False)
        self.query = projection(config.width, config.heads * self.head_width)
        self.key = projection(config.width, config.kv_heads * self.head_width)
        self.value = projection(config.width, config.kv_heads * self.head_width)
        self.output = projection(config.heads * self.head_width, config.width)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        """Return what each position [n, length, width] takes from itself and those before it."""
        query, key, value = (self._heads(project(hidden)) for project in (self.query, self.key, self.value))
        attended = scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True, enable_gqa=self.shared
        )
        return self.output(attended.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        """Return [n, heads, length, head_width] from [n, length, heads * head_width]."""
        return projected.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class SwiGLU(nn.Module):
    """A gated MLP (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [n, length, width] from [n, length, width]."""
        return self.down(silu(self.gate(hidden)) * self.up(hidden))


def rotary_angles(length: int, config: ModelConfig, device: torch.device) -> Tensor:
    """Return cosines and sines [2, length, head_width / 2] in fp32 of the angles by which positions are turned.

    Pair i of a head turns by position / theta^(2i / head_width) (Su et al. 2021, https://arxiv.org/abs/2104.09864).
    """
    pairs = torch.arange(0, config.head_width, 2, device=device, dtype=torch.float32)
    frequencies = config.rope_theta ** (-pairs / config.head_width)
    if config.rope_scaling:
        frequencies = config.rope_scaling.scale(frequencies)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_width / 2) of [n, heads, length, head_width], as Hugging Face's Llama pairs them."""
    cosine, sine = rotation
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(heads.dtype)


def random_weights(seed: int, layers: int) -> Fill:
    """Return what fills parameters at random, each from a seed of its own: in any order, on any number of ranks.

    Norms are 1. Matrices have a standard deviation of 0.02, divided by the square root of 2 `layers` where a block adds
    its result to its input (Radford et al. 2019, GPT-2).
    """

    @torch.no_grad()
    def fill(name: str, parameter: Tensor) -> None:
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            return
        adds = name.endswith(("attention.output.weight", "mlp.down.weight"))
        own = random_state.derive_seed(seed, WEIGHTS, crc32(name.encode()))
        generator = torch.Generator(parameter.device).manual_seed(own)
        parameter.normal_(0.0, INIT_STD / math.sqrt(2 * layers) if adds else INIT_STD, generator=generator)

    return fill


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    count: int,
    *,
    context: int,
    seed: int = 0,
    temperature: float = 0.8,
    top: int = 50,
) -> Tensor:
    """Continue a prompt by `count` tokens, each drawn from the `top` likeliest; every rank of a sharded model calls it.

    Args:
        model: Returns logits [1, length, vocab_size] of tokens [1, length].
        prompt: Tokens [length], on the model's device; at least one.
        count: How many tokens to add.
        context: Most tokens that the model is given at once.
        seed: Of the draws.
        temperature: Divides the logits; 0 takes the likeliest token.
        top: How many tokens are drawn from.

    Returns:
        Tokens [length + count].
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        logits = model(tokens[None, -context:])[0, -1].float().cpu()
        best, candidates = logits.topk(min(top, len(logits)))
        choice = best.argmax()[None]
        if temperature > 0:
            choice = torch.multinomial((best / temperature).softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, candidates[choice].to(tokens.device)])
    return tokens
