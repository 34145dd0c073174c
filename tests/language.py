"""Small tokenizers and random models in Hugging Face's layout, for tests of the language model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.lazy import Lazy

transformers = Lazy("transformers")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "vocab_size": 304, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@cache
def small_tokenizer() -> Any:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokens.train_from_iterator(["this is a text of words " * 50], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>", chat_template=TEMPLATE)


def random_model(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A random model of a family."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **more})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def write_model(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Path:
    """Write a random model and its tokenizer."""
    transformers.logging.set_verbosity_error()
    model = random_model(kind, dtype, **more)
    model.generation_config.max_length = 77
    model.save_pretrained(folder / kind)
    small_tokenizer().save_pretrained(folder / kind)
    return folder / kind
