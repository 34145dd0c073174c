"""The tokenizer: byte-level byte-pair encoding, learned from a corpus, by Hugging Face's `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

# The token at the end of each document; it has the number 0.
END = "<|endoftext|>"
# Others' names for it, of checkpoints that don't say which it is.
ENDS = (END, "</s>", "<|end_of_text|>", "<eos>")


def learn(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a tokenizer of at most `vocab_size` tokens: the 256 bytes, `END`, and the commonest pairs of tokens.

    Any text can be encoded, and decoding gives it back.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of(tokenizer: Tokenizer) -> int | None:
    """Return the number of the token that ends a document, or None if the tokenizer has none of the usual ones."""
    found = (tokenizer.token_to_id(name) for name in ENDS)
    return next((number for number in found if number is not None), None)
