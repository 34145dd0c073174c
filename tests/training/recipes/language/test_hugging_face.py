import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_on_ecs.errors import UsageError
from tests.training.ranks import Ranks
from training.engine.feed import in_threads
from training.recipes.language import corpus, hugging_face, recipe, sharding
from training.recipes.language.config import LanguageConfig
from training.recipes.language.corpus import Corpus
from training.recipes.language.hugging_face import Checkpoint
from training.recipes.language.model import LanguageModel, ModelConfig, RopeScaling, random_weights

CPU = torch.device("cpu")
SHAPE = ModelConfig(vocab_size=512, layers=2, width=64, heads=4, kv_heads=2, mlp_width=128, context=64)
# With which some pairs of so short a sequence are slowed down wholly, others in part, and others not.
SCALING = RopeScaling(factor=8.0, low=0.5, high=4.0, context=64)
Config = Callable[..., LanguageConfig]


def built(shape: ModelConfig, fill: Any) -> LanguageModel:
    return sharding.build(shape, fill, CPU, policy=None, recompute=False)


def write(folder: Path, shape: ModelConfig, text: Corpus) -> LanguageModel:
    """Leave a checkpoint in a folder; returns its model."""
    model = built(shape, random_weights(3, shape.layers))
    for name, content in hugging_face.export(model, shape, text):
        path = folder / Path(name).relative_to(hugging_face.FOLDER)
        path.write_bytes(content)
    return model


def read(folder: Path) -> LanguageModel:
    checkpoint = Checkpoint(folder)
    return built(checkpoint.shape, checkpoint.fill)


def some_tokens() -> torch.Tensor:
    return torch.randint(SHAPE.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("file_bytes", [2**31, 100_000])
def test_what_is_written_is_read_again(
    tmp_path: Path, code: Corpus, monkeypatch: pytest.MonkeyPatch, tied: bool, file_bytes: int
) -> None:
    monkeypatch.setattr(hugging_face, "FILE_BYTES", file_bytes)
    shape = replace(SHAPE, tied=tied, rope_theta=500_000.0, norm_eps=1e-6, rope_scaling=SCALING)
    written = write(tmp_path, shape, code)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (file_bytes < 2**31)
    assert Checkpoint(tmp_path).shape == shape
    assert torch.equal(read(tmp_path)(some_tokens()), written(some_tokens()))


@pytest.mark.parametrize(
    "changed", [{}, {"tied": False, "rope_theta": 500.0}, {"rope_scaling": SCALING, "kv_heads": 4, "norm_eps": 1e-3}]
)
def test_transformers_computes_the_same(tmp_path: Path, code: Corpus, changed: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="it is no dependency; it says what a checkpoint means")
    ours = write(tmp_path, replace(SHAPE, **changed), code)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(some_tokens()), theirs(some_tokens()).logits, atol=1e-5, rtol=1e-4)
    theirs.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder)
    code.tokenizer.save(str(folder / "tokenizer.json"))
    with torch.no_grad():
        torch.testing.assert_close(read(folder)(some_tokens()), theirs(some_tokens()).logits, atol=1e-5, rtol=1e-4)


def train_from(rank: int, ranks: int, config: LanguageConfig, node: Path) -> list[float]:
    """Train from a checkpoint; returns the losses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "node_folder", lambda kind, key: node / kind / "of-ranks")
        trainer = recipe.build(config, CPU, in_threads)
    metrics = trainer.run_epoch()
    return [metrics["train_loss"], metrics["test_loss"]]


def test_a_checkpoint_is_trained_on(config: Config, node: Path, tmp_path: Path, on_ranks: Ranks) -> None:
    trained = recipe.build(config(max_steps=40, global_batch=8, lr=3e-3), CPU, in_threads)
    before = trained.run_epoch()
    for name, content in recipe.files(trained):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert (tmp_path / "sample.txt").read_text().startswith(trained.config.prompt)
    changed = {"layers": None, "width": None, "heads": None, "kv_heads": None, "vocab_size": None}
    folder = str(tmp_path / hugging_face.FOLDER)
    settings = config(model=folder, max_steps=1, global_batch=8, batch_size=4, lr=1e-9, **changed)
    alone = on_ranks(1, train_from, settings, node)[0]
    assert alone[1] == pytest.approx(before["test_loss"], rel=1e-5), "it is the model that was trained"
    sharded = on_ranks(2, train_from, replace(settings, sharding="full"), node)
    assert sharded[0] == pytest.approx(alone, rel=1e-5)
    with pytest.raises(UsageError, match="--context: 65 is more than the 64 tokens"):
        recipe.build(replace(settings, context=65), CPU, in_threads)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba', and only 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "scaled as '(yarn|linear)'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaled as '(yarn|linear)'"),
        ({"head_dim": 128}, "head_dim 128"),
        ({"intermediate_size": 64}, "mlp.gate_proj.weight in .* is .128, 64., and its config.json makes it .64, 64."),
        ({"num_hidden_layers": 3}, "no weights model.layers.2"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, code: Corpus, changed: dict[str, Any], named: str) -> None:
    write(tmp_path, SHAPE, code)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**document, **changed}))
    with pytest.raises(UsageError, match=named):
        read(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config.json and tokenizer.json"):
        Checkpoint(tmp_path)
