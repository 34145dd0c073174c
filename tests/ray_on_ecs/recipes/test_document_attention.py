"""document_attention.py: attention within documents beside masks, and its call of torch's kernel without a GPU."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.language import random_model
from tests.lazy import Lazy

attention = Lazy("ray_on_ecs.recipes.document_attention")
token_loss = Lazy("ray_on_ecs.recipes.token_loss")
documents = Lazy("ray_on_ecs.recipes.documents")
pytestmark = pytest.mark.filterwarnings("default")  # of the libraries
LENGTHS = ((7, 12, 9, 4), (20, 12))  # of the documents of two sequences


def batch_of(device: str = "cpu") -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(3, 300, (2, 32))
    positions = torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in LENGTHS])
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": positions}
    return documents.to_device(batch, torch.device(device))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 5}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    ],
)
def test_attention_within_documents_is_that_of_masks(kind: str, more: dict[str, Any]) -> None:
    model = random_model(kind, **more).train()
    parameters = list(model.parameters())
    batch = batch_of()
    expected = token_loss.TokenLoss(model, is_plain=True)(**batch)
    gradients = torch.autograd.grad(expected / 64, parameters)
    assert attention.fault_of_model(model) is None
    assert model.config._attn_implementation == "sdpa", "as it was"
    model.set_attn_implementation(attention.ATTENTION)
    loss = token_loss.TokenLoss(model, is_plain=True, attends_within_documents=True)(**batch)
    assert torch.allclose(loss, expected, rtol=1e-6)
    for found, gradient in zip(torch.autograd.grad(loss / 64, parameters), gradients, strict=True):
        assert torch.allclose(found, gradient, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "more", "fault"),
    [
        ("gemma2", {}, "variable-length attention has no softcap"),
        ("llama", {"attention_dropout": 0.1}, "the model has attention dropout"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "its attention can't be replaced"),
    ],
)
def test_models_that_need_masks_are_found(kind: str, more: dict[str, Any], fault: str) -> None:
    model = random_model(kind, **more)
    before = model.config._attn_implementation
    faults = attention.fault_of_model(model)
    assert faults is not None
    assert fault in faults
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("kind", "more"), [("qwen3", {}), ("mistral", {"sliding_window": 5}), ("llama", {"num_key_value_heads": 4})]
)
def test_kernel_takes_what_a_model_passes(kind: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward and a backward pass in bf16 with tensors without values; the kernel has a fake, also for the CPU."""
    calls: list[Any] = []
    kernel = attention.varlen_attn

    def varlen(*tensors: Any, **options: Any) -> Any:
        calls.append((tensors, options))
        return kernel(*tensors, **options)

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "_one_by_one", attention._varlen)
    with FakeTensorMode():
        model = random_model(kind, torch.bfloat16, **more)
        model.set_attn_implementation(attention.ATTENTION)
        loss_of = token_loss.TokenLoss(model, is_plain=True, attends_within_documents=True)
        ids = torch.empty(2, 32, dtype=torch.int64)
        offsets = torch.empty(7, dtype=torch.int32)
        loss = loss_of(ids, ids, ids, offsets)
        loss.backward()
        assert loss.shape == ()
        assert all(
            parameter.grad is not None and parameter.grad.shape == parameter.shape for parameter in model.parameters()
        )
    assert len(calls) == 2
    (query, key, value, offsets, *_), options = calls[0]
    assert query.shape == (64, 4, 16)
    assert key.shape == value.shape == (64, more.get("num_key_value_heads", 2), 16)
    assert (offsets.shape, offsets.dtype) == ((7,), torch.int32)
    assert options["window_size"] == ((4, 0) if kind == "mistral" else (-1, 0))
