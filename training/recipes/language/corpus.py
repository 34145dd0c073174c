"""A corpus: text files, tokenized once on each node, and kept there as tokens to train on and tokens to test with.

The files are put into an order that depends on their names alone; the last part of it is for testing. The tokenizer is
learned from the first part, unless there is one. A file that is no text (UTF-8) is left out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer

from training.errors import UsageError
from training.filesystem import fetch
from training.node_folder import node_folder
from training.recipes.language import tokenizer as tokenizers
from training.recipes.language.config import PYTHON

# Changes with what this module makes of the same files.
VERSION = 1
# Characters of a document that are encoded at once, and how many such pieces, in parallel.
PIECE = 2**18
PIECES = 64
PARTS = ("train", "test")
TOKENIZER = "tokenizer.json"
ABOUT = "about.json"


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and to test with.

    Attributes:
        name: What was asked for.
        tokenizer: Makes tokens of text, and text of tokens.
        end: The token after each document, or None if the tokenizer has none.
        train: Tokens [n], in the order of the documents, mapped from a file.
        test: The same, of other text.
        train_bytes: Length of the training text in UTF-8.
        test_bytes: Length of the test text.
        documents: Number of files.
        fingerprint: Changes with the tokens and with the tokenizer.
    """

    name: str
    tokenizer: Tokenizer
    end: int | None
    train: np.ndarray
    test: np.ndarray
    train_bytes: int
    test_bytes: int
    documents: int
    fingerprint: str


def load(corpus: str, test_fraction: float, vocab_size: int | None, tokenizer: Path | None = None) -> Corpus:
    """Tokenize a corpus, or open what another process of this node has made of it.

    Args:
        corpus: A folder, an `s3://bucket/prefix`, or "python".
        test_fraction: The fraction of its bytes that are for testing.
        vocab_size: Most tokens of the tokenizer that is learned, if none is given.
        tokenizer: A `tokenizer.json` to use instead.

    Raises:
        UsageError: There is no text, or not enough for both parts.
        OSError: It can't be read.
    """
    root, files = _find(corpus)
    given = tokenizer.read_bytes() if tokenizer else str(vocab_size).encode()
    listed = [(str(each.relative_to(root)), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    key = repr([VERSION, corpus, str(root), test_fraction, hashlib.sha256(given).hexdigest(), listed])
    folder = node_folder("corpus", key)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            part = Path(f"{folder}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            learned = Tokenizer.from_file(str(tokenizer)) if tokenizer else None
            _Maker(root, files, test_fraction, corpus).make(part, learned, vocab_size)
            part.rename(folder)
    return _open(folder, corpus)


class _Maker:
    """Makes the folder of a corpus from its files."""

    def __init__(self, root: Path, files: list[Path], test_fraction: float, corpus: str) -> None:
        self._corpus = corpus
        self._files = sorted(files, key=lambda each: hashlib.sha256(str(each.relative_to(root)).encode()).digest())
        self._train_bytes = int((1 - test_fraction) * sum(each.stat().st_size for each in files))

    def make(self, folder: Path, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
        """Write the tokens of both parts, the tokenizer and what there is to know of them."""
        if tokenizer is None:
            assert vocab_size is not None
            texts = (text for part, text in self._documents() if part == "train")
            tokenizer = tokenizers.learn(texts, vocab_size)
        tokenizer.save(str(folder / TOKENIZER))
        end = tokenizers.end_of(tokenizer)
        dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
        about: dict[str, Any] = {"end": end, "dtype": dtype.name, "documents": 0, "train_bytes": 0, "test_bytes": 0}
        digest = hashlib.sha256((folder / TOKENIZER).read_bytes())
        with ExitStack() as files:
            outputs = {part: files.enter_context((folder / part).open("wb")) for part in PARTS}
            for part, text in self._documents():
                for tokens in chain(_encode(tokenizer, text), [[] if end is None else [end]]):
                    encoded = np.asarray(tokens, dtype).tobytes()
                    outputs[part].write(encoded)
                    digest.update(encoded)
                about[f"{part}_bytes"] += len(text.encode())
                about["documents"] += 1
        for part in PARTS:
            if not about[f"{part}_bytes"]:
                raise UsageError(f"--corpus: {self._corpus} has too little text (UTF-8) to {part} a model")
        about["fingerprint"] = digest.hexdigest()
        (folder / ABOUT).write_text(json.dumps(about))

    def _documents(self) -> Iterator[tuple[str, str]]:
        """Yield the part and the text of each document; one document may be in both parts."""
        before = 0
        for file in self._files:
            size = file.stat().st_size
            text = _read(file)
            if text:
                cut = max(0, min(len(text), round(len(text) * (self._train_bytes - before) / size)))
                yield from ((part, some) for part, some in zip(PARTS, (text[:cut], text[cut:]), strict=True) if some)
            before += size


def _find(corpus: str) -> tuple[Path, list[Path]]:
    """Return the folder of a corpus on this node, and its files.

    Raises:
        UsageError: There are none.
        OSError: A bucket can't be read.
    """
    if corpus == PYTHON:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = list(root.glob("*.py"))
    else:
        root = fetch(corpus, "--corpus")
        files = [each for each in root.rglob("*") if each.is_file()] if root.is_dir() else []
        if root.is_file():
            root, files = root.parent, [root]
    if not any(each.stat().st_size for each in files):
        raise UsageError(f"--corpus: there are no files in {corpus}")
    return root, sorted(files)


def _read(file: Path) -> str | None:
    """Return the text of a file, or None if it isn't text."""
    content = file.read_bytes()
    if b"\0" in content[:8192]:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _encode(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Yield the tokens of a text, piece by piece, without those that a tokenizer would put around it."""
    pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
    while group := list(islice(pieces, PIECES)):
        for encoding in tokenizer.encode_batch(group, add_special_tokens=False):
            yield encoding.ids


def _open(folder: Path, name: str) -> Corpus:
    about = json.loads((folder / ABOUT).read_text())
    tokens = {part: np.memmap(folder / part, about["dtype"], mode="r") for part in PARTS}
    return Corpus(
        name,
        Tokenizer.from_file(str(folder / TOKENIZER)),
        about["end"],
        tokens["train"],
        tokens["test"],
        about["train_bytes"],
        about["test_bytes"],
        about["documents"],
        about["fingerprint"],
    )
