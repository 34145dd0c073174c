"""token_loss.py: the loss and its gradients beside those of all logits at once."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from tests.language import random_model
from tests.lazy import Lazy

token_loss = Lazy("ray_on_ecs.recipes.token_loss")
peft = Lazy("peft")
IGNORED = -100
pytestmark = pytest.mark.filterwarnings("default")  # of the libraries


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of eight tokens for a vocabulary of 304, the last of which is smaller."""
    monkeypatch.setattr(token_loss, "LOGITS", 8 * 304)


def batch_of(sequences: int = 2, context: int = 19) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 300, (sequences, context))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(sequences, context) < 0.3, IGNORED)
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(context).repeat(sequences, 1)}


def plain_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


def operands() -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, bias and labels."""
    torch.manual_seed(2)
    labels = torch.randint(304, (37,)).masked_fill(torch.rand(37) < 0.3, IGNORED)
    return torch.randn(37, 64), torch.randn(304, 64) / 8, torch.randn(304), labels


@pytest.mark.parametrize("trained", ["hidden weight bias", "hidden", "weight", "hidden bias", ""])
def test_gradients_are_those_of_whole_logits(trained: str) -> None:
    hidden, weight, bias, labels = operands()
    wanted = [each for name, each in (("hidden", hidden), ("weight", weight), ("bias", bias)) if name in trained]
    for each in wanted:
        each.requires_grad_()
    expected = cross_entropy(linear(hidden, weight, bias), labels, reduction="sum")
    loss = token_loss.linear_cross_entropy(hidden, weight, bias, labels)
    assert loss.requires_grad is bool(wanted)
    assert torch.allclose(loss, expected, rtol=1e-6)
    if not wanted:
        return
    gradients = torch.autograd.grad(expected / 50, wanted)  # of a mean
    for found, gradient in zip(torch.autograd.grad(loss / 50, wanted), gradients, strict=True):
        assert torch.allclose(found, gradient, atol=1e-5)


def test_second_backward_pass_is_refused() -> None:
    hidden, weight, bias, labels = operands()
    loss = token_loss.linear_cross_entropy(hidden.requires_grad_(), weight, bias, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loss_without_gradients_and_without_labels() -> None:
    hidden, weight, _, labels = operands()
    with torch.no_grad():
        loss = token_loss.linear_cross_entropy(hidden, weight.requires_grad_(), None, labels)
    assert not loss.requires_grad
    assert torch.allclose(loss, cross_entropy(linear(hidden, weight), labels, reduction="sum"), rtol=1e-6)
    nothing = token_loss.linear_cross_entropy(hidden.requires_grad_(), weight, None, torch.full_like(labels, IGNORED))
    nothing.backward()
    assert nothing.item() == 0
    assert [None if each.grad is None else each.grad.abs().max().item() for each in (hidden, weight)] == [0, 0]


@pytest.mark.parametrize("form", ["autocast", "bf16 weights"])
def test_loss_and_sums_in_bf16_keep_fp32(form: str) -> None:
    hidden, weight, bias, labels = operands()
    logits = linear(*(each.bfloat16() for each in (hidden, weight, bias))).float()
    expected = cross_entropy(logits, labels, reduction="sum")
    inputs = [each.to(torch.bfloat16 if form == "bf16 weights" else torch.float32) for each in (hidden, weight, bias)]
    wanted = [each.requires_grad_() for each in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        loss = token_loss.linear_cross_entropy(*wanted, labels)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, expected, rtol=1e-5)
    exact = [each.detach().requires_grad_() for each in (hidden, weight, bias)]
    gradients = torch.autograd.grad(cross_entropy(linear(*exact), labels, reduction="sum"), exact)
    for found, gradient, of in zip(torch.autograd.grad(loss, wanted), gradients, wanted, strict=True):
        assert found.dtype == of.dtype
        assert torch.allclose(found.float(), gradient, atol=0.02 * gradient.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "more", "is_plain"),
    [
        ("qwen3", {}, True),
        ("llama", {"tie_word_embeddings": True}, True),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}, True),
        ("phi", {}, True),  # with a bias
        ("gemma2", {}, False),  # caps its logits
        ("cohere", {}, False),  # scales them
        ("granite", {"logits_scaling": 4.0}, False),
    ],
)
def test_loss_of_a_family_is_its_own(kind: str, more: dict[str, Any], is_plain: bool) -> None:
    model = random_model(kind, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **more).train()
    assert token_loss.has_plain_logits(model) is is_plain
    assert model.training
    batch = batch_of()
    expected = plain_loss(model, batch)
    loss = token_loss.TokenLoss(model, is_plain=is_plain)(**batch)
    assert torch.allclose(loss, expected, rtol=1e-5)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(expected / 20, parameters)
    for found, gradient in zip(torch.autograd.grad(loss / 20, parameters), gradients, strict=True):
        assert torch.allclose(found, gradient, atol=1e-5)


def test_loss_with_adapters_trains_them_alone() -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(random_model("qwen3"), config)
    assert token_loss.has_plain_logits(model)
    loss_of = token_loss.TokenLoss(model, is_plain=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in loss_of.parameters() if parameter.requires_grad} == {
        id(each) for each in trained
    }
    gradients = torch.autograd.grad(plain_loss(model, batch_of()), trained)
    for found, gradient in zip(torch.autograd.grad(loss_of(**batch_of()), trained), gradients, strict=True):
        assert torch.allclose(found, gradient, atol=1e-4)
