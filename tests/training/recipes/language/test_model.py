import cmath
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from training.recipes.language import sharding
from training.recipes.language.model import (
    Attention,
    LanguageModel,
    ModelConfig,
    generate,
    random_weights,
    rotary_angles,
    rotate,
)

CPU = torch.device("cpu")
SHAPE = ModelConfig(vocab_size=50, layers=2, width=32, heads=4, kv_heads=2, mlp_width=64, context=16)


def built(seed: int = 0, *, recompute: bool = False, **changed: Any) -> LanguageModel:
    shape = replace(SHAPE, **changed)
    return sharding.build(shape, random_weights(seed, shape.layers), CPU, policy=None, recompute=recompute)


def some_tokens(count: int = 16, n: int = 2) -> torch.Tensor:
    return torch.randint(SHAPE.vocab_size, (n, count), generator=torch.Generator().manual_seed(1))


def test_each_token_has_logits_of_the_next() -> None:
    assert built()(some_tokens(9)).shape == (2, 9, SHAPE.vocab_size)


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_are_as_many_as_the_shape_says(tied: bool) -> None:
    model = built(tied=tied)
    assert sum(each.numel() for each in model.parameters()) == model.config.parameters
    assert not list(model.buffers()), "a checkpoint is the parameters"


def test_the_operations_are_those_of_the_matrix_products() -> None:
    model = built()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # of others it counts none on CPUs
        model(some_tokens()).sum().backward()
    assert counter.get_total_flops() == some_tokens().numel() * SHAPE.flops_per_token(SHAPE.context)


def test_no_token_sees_a_later_one() -> None:
    model, tokens = built(), some_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SHAPE.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:]), "it sees what is before it"


def test_positions_turn_pairs_by_the_angles_of_the_paper() -> None:
    width, theta = SHAPE.head_width, SHAPE.rope_theta
    heads = torch.randn(1, 1, 5, width, generator=torch.Generator().manual_seed(0))
    turned = rotate(heads, rotary_angles(5, SHAPE, CPU))
    for position in range(5):
        for pair in range(width // 2):
            first, second = heads[0, 0, position, [pair, pair + width // 2]].tolist()
            expected = complex(first, second) * cmath.exp(1j * position * theta ** (-2 * pair / width))
            found = complex(*turned[0, 0, position, [pair, pair + width // 2]].tolist())
            assert found == pytest.approx(expected, abs=1e-5)


def test_attention_depends_on_distances_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 1, 1, 6, 8)
    rotation = rotary_angles(6, replace(SHAPE, rope_theta=100.0), CPU)
    scores = (rotate(query, rotation) @ rotate(key, rotation).transpose(2, 3))[0, 0]
    assert scores[3, 1].item() == pytest.approx(scores[5, 3].item(), abs=1e-5)
    assert scores[3, 1].item() != pytest.approx(scores[4, 1].item(), abs=1e-5)


def test_heads_that_share_keys_and_values_attend_as_if_each_had_a_copy() -> None:
    torch.manual_seed(0)
    grouped, single = Attention(SHAPE), Attention(replace(SHAPE, kv_heads=SHAPE.heads))
    for name, weight in grouped.state_dict().items():
        if name.startswith(("key", "value")):
            heads = weight.unflatten(0, (SHAPE.kv_heads, SHAPE.head_width))
            weight = heads.repeat_interleave(SHAPE.heads // SHAPE.kv_heads, 0).flatten(0, 1)
        single.get_parameter(name).data.copy_(weight)
    hidden = torch.randn(2, 7, SHAPE.width)
    rotation = rotary_angles(7, SHAPE, CPU)
    torch.testing.assert_close(grouped(hidden, rotation), single(hidden, rotation))


def test_tied_weights_learn_from_both_ends() -> None:
    model = built(tied=True)
    assert not any(name.startswith("output") for name, _ in model.named_parameters())
    model(torch.tensor([[1]])).square().sum().backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert gradient[2].abs().sum() > 0, "a token that didn't go in could have come out"


def test_weights_depend_on_the_seed_alone() -> None:
    one, same, other = (dict(built(seed).named_parameters()) for seed in (0, 0, 1))
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        assert torch.equal(weight, other[name]) == name.endswith("norm.weight"), name
    assert one["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert one["blocks.0.mlp.down.weight"].std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)


def test_activations_that_are_computed_again_give_the_same_gradients() -> None:
    found = []
    for recompute in (False, True):
        model = built(recompute=recompute)
        model(some_tokens()).square().mean().backward()
        found.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_a_prompt_is_continued_by_likely_tokens() -> None:
    class Counts(nn.Module):
        """Is sure that each token is the one before and one more."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert tokens.shape[1] <= 4, "more than it can take"
            return 50.0 * nn.functional.one_hot((tokens + 1) % 50, 50)

    continued = generate(Counts(), torch.tensor([3, 4]), 6, context=4)
    assert continued.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    drawn = [generate(built(), torch.tensor([3]), 8, context=16, seed=seed).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = [generate(built(), torch.tensor([3]), 8, context=16, seed=seed, temperature=0).tolist() for seed in (0, 1)]
    assert greedy[0] == greedy[1], "nothing is drawn"
