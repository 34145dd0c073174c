"""The recipe of the language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ray_on_ecs.errors import UsageError
from ray_on_ecs.filesystem import check_outside, fetch
from training.engine.feed import Feed
from training.engine.recipe import Quality, Recipe
from training.recipes.language import corpus, hugging_face, texts
from training.recipes.language.config import PYTHON, SIZES, LanguageConfig
from training.recipes.language.model import ModelConfig, default_mlp_width, random_weights
from training.recipes.language.trainer import LanguageTrainer

SAMPLE = "sample.txt"
# In the storage path, beside the runs' folders.
CORPORA = ".corpora"
# Of a checkpoint that could take longer sequences, unless --context says so.
LONGEST_CONTEXT = 2048


def prepare(config: LanguageConfig) -> LanguageConfig:
    """Check that corpus and checkpoint are there, if that can be seen from here, and make their paths absolute.

    Raises:
        UsageError: A folder isn't there, the bucket of the corpus can't be read, or the model is neither a size nor a
            folder.
    """
    if config.model not in SIZES:
        choices = f"one of {', '.join(SIZES)}, or a folder or s3://bucket/prefix with a Hugging Face checkpoint"
        config = replace(config, model=_absolute("--model", config.model, choices))
    if config.corpus != PYTHON:
        choices = f"{PYTHON}, or a folder or s3://bucket/prefix with text files"
        config = replace(config, corpus=_absolute("--corpus", config.corpus, choices))
        check_outside(config.corpus, "--corpus", config.storage_path)
        texts.find(config.corpus, config.test_fraction)
    return config


def build(config: LanguageConfig, device: torch.device, feed: Feed) -> LanguageTrainer:
    """Tokenize the corpus, unless its tokens are there, and build this rank's trainer on a device.

    Raises:
        UsageError: The corpus or the checkpoint can't be used, or the settings don't fit them.
    """
    load = partial(corpus.load, config.corpus, config.test_fraction, feed=feed, shared=_shared(config), device=device)
    if config.model in SIZES:
        text = load(vocab_size=config.size.vocab_size)
        shape = _shape(config, text.tokenizer.get_vocab_size())
        return LanguageTrainer(config, shape, random_weights(config.seed, shape.layers), text, device)
    checkpoint = hugging_face.Checkpoint(fetch(config.model, "--model"))
    text = load(vocab_size=None, tokenizer=checkpoint.tokenizer)
    longest = checkpoint.shape.context
    shape = replace(checkpoint.shape, context=config.context or min(longest, LONGEST_CONTEXT))
    if shape.context > longest:
        raise UsageError(f"--context: {shape.context} is more than the {longest} tokens of {config.model}")
    if text.tokenizer.get_vocab_size() > shape.vocab_size:
        raise UsageError(f"--model: the tokenizer of {config.model} has more tokens than the model")
    return LanguageTrainer(config, shape, checkpoint.fill, text, device)


def describe(requested: LanguageConfig, config: LanguageConfig) -> dict[str, str]:
    """Return the header's lines on the model and the data, by label."""
    number, unit = (config.max_steps, "step") if config.max_steps else (config.epochs, "epoch")
    length = f"{number} {unit}{'' if number == 1 else 's'}"
    sharded = ", sharded" if config.sharding == "full" else ""
    return {"model": f"{config.model}, {length}{sharded}", "data": config.corpus}


def files(trainer: LanguageTrainer) -> Iterator[tuple[str, bytes]]:
    """Yield a sample of generated text, and the weights as a Hugging Face checkpoint."""
    config = trainer.config
    if config.sample_tokens:
        text = trainer.continue_text(config.prompt, config.sample_tokens)
        if trainer.rank == 0:
            print(f"a sample of generated text:\n{text}", flush=True)
        yield SAMPLE, text.encode()
    yield from hugging_face.export(trainer.model, trainer.shape, trainer.batches.corpus, trainer.rank)


def _shared(config: LanguageConfig) -> str | None:
    """Return where the nodes share the tokens of a corpus that is in a bucket, which other runs use, too."""
    in_buckets = all(each.startswith("s3://") for each in (config.corpus, config.storage_path))
    return f"{config.storage_path}/{CORPORA}" if in_buckets else None


def _shape(config: LanguageConfig, vocab_size: int) -> ModelConfig:
    size = config.size
    return ModelConfig(
        vocab_size=vocab_size,
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        kv_heads=size.kv_heads,
        mlp_width=default_mlp_width(size.width),
        context=size.context,
        tied=config.tied_weights != "off",
    )


def _absolute(flag: str, given: str, choices: str) -> str:
    """Return a path that is the same in another working directory, as Ray gives one to its workers."""
    if given.startswith("s3://"):
        return given
    path = Path(given).expanduser().absolute()
    if not path.exists():
        raise UsageError(f"{flag}: {given!r} is not there; give {choices}")
    return str(path)


LANGUAGE = Recipe(
    name="language",
    prepare=prepare,
    build=build,
    describe=describe,
    qualities=(Quality("loss", "nats per token"), Quality("bits_per_byte", "bits per byte")),
    score="test_log_likelihood",
    scalars={
        "speed/tokens_per_second": "tokens_per_second",
        "speed/model_flops_utilization": "model_flops_utilization",
    },
    files=files,
)
