"""A corpus: text files, tokenized once, and kept on each node's disk as tokens to train on and tokens to test with.

The files are put into an order that depends on their names alone; the last part of it is for testing. The tokenizer is
learned from the beginning of the first part, unless there is one. A file that is no text (UTF-8) is left out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock
from pyarrow import fs
from tokenizers import Tokenizer

from ray_on_ecs import node_cache
from ray_on_ecs.errors import UsageError
from ray_on_ecs.filesystem import check_room, open_filesystem
from ray_on_ecs.node_folder import node_folder
from training.engine.agreement import from_rank_zero
from training.engine.feed import Feed, in_threads
from training.recipes.language import tokenizer as tokenizers
from training.recipes.language.texts import Texts, find, tokenize, tokens_of

# Changes with what this module makes of the same files.
VERSION = 3
PARTS = ("train", "test")
TOKENIZER = "tokenizer.json"
ABOUT = "about.json"
FILES = (*PARTS, TOKENIZER, ABOUT)
POLL_SECONDS = 1.0
# The tokenizer is learned from so much text: more takes long, and changes little.
LEARN_BYTES = 256 * 2**20
COPY_BYTES = 16 * 2**20
CPU = torch.device("cpu")


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


def load(
    corpus: str,
    test_fraction: float,
    vocab_size: int | None,
    tokenizer: Path | None = None,
    feed: Feed = in_threads,
    shared: str | None = None,
    device: torch.device = CPU,
) -> Corpus:
    """Tokenize a corpus, or open what another process of this node, or of another one, has made of it.

    Args:
        corpus: A folder, an `s3://bucket/prefix`, or "python".
        test_fraction: The fraction of its bytes that are for testing.
        vocab_size: Most tokens of the tokenizer that is learned, if none is given.
        tokenizer: A `tokenizer.json` to use instead.
        feed: Tokenizes the text, if it is where every node can read it.
        shared: A folder or `s3://bucket/prefix` through which the ranks share the tokens: rank 0 makes them, and the
            others wait. None: each node makes its own.
        device: This rank's device.

    Raises:
        UsageError: There is no text, or not enough for both parts, or the disk has no room for its tokens.
        OSError: It can't be read.
    """
    texts = find(corpus, test_fraction)
    given = tokenizer.read_text() if tokenizer else None
    key = repr([VERSION, texts.version, vocab_size if given is None else hashlib.sha256(given.encode()).hexdigest()])
    if shared:  # a file may have come between the listings of two ranks
        key = from_rank_zero(key, device)
    folder = node_folder("corpus", key)
    folder.parent.mkdir(parents=True, exist_ok=True)
    exchange = Exchange(f"{shared}/{folder.name}") if shared else None
    if exchange and _rank() > 0:
        exchange.wait_until_given(folder)
    with FileLock(f"{folder}.lock"):
        node_cache.hold(folder)
        if not folder.exists():
            part = Path(f"{folder}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            if exchange and exchange.is_given():
                check_room(corpus, exchange.size(), part, "--corpus")
                exchange.take(part)
            else:
                check_room(corpus, sum(texts.sizes), part, "--corpus")  # its tokens take no more, as a rule
                _make(part, corpus, texts, given, vocab_size, feed if texts.in_bucket else in_threads)
            part.rename(folder)
        if exchange and not exchange.is_given():  # also where this node has the tokens of an earlier run
            exchange.give(folder)
    return _open(folder, corpus)


def _make(folder: Path, corpus: str, texts: Texts, tokenizer: str | None, vocab_size: int | None, feed: Feed) -> None:
    """Write the tokens of both parts, the tokenizer and what there is to know of them."""
    if tokenizer is None:
        assert vocab_size is not None
        tokenizer = tokenizers.learn(texts.train_texts(LEARN_BYTES), vocab_size).to_str()
    learned = Tokenizer.from_str(tokenizer)
    (folder / TOKENIZER).write_text(tokenizer)
    dtype = np.dtype(np.uint16 if learned.get_vocab_size() <= 2**16 else np.uint32).name
    lengths = {"train_bytes": 0, "test_bytes": 0, "documents": 0}
    digests = {part: hashlib.sha256(tokenizer.encode()) for part in PARTS}
    with ExitStack() as files:
        outputs = {part: files.enter_context((folder / part).open("wb")) for part in PARTS}
        for prepared in feed(texts.parts(), partial(tokenize, tokenizer, dtype)):
            made = tokens_of(prepared)
            for part, tokens in zip(PARTS, (made.train, made.test), strict=True):
                outputs[part].write(tokens)
                digests[part].update(tokens)
            for name in lengths:
                lengths[name] += getattr(made, name)
    for part in PARTS:
        if not lengths[f"{part}_bytes"]:
            raise UsageError(f"--corpus: {corpus} has too little text (UTF-8) to {part} a model")
    fingerprint = hashlib.sha256(b"".join(digests[part].digest() for part in PARTS)).hexdigest()
    about = {"end": tokenizers.end_of(learned), "dtype": dtype, **lengths, "fingerprint": fingerprint}
    (folder / ABOUT).write_text(json.dumps(about))


class Exchange:
    """A place where one rank leaves what it has made of a corpus, and those on other nodes take it from.

    Args:
        address: A folder or `s3://bucket/prefix` that every node can read and write.
    """

    def __init__(self, address: str) -> None:
        self._filesystem, self._path = open_filesystem(address)

    def is_given(self) -> bool:
        """Whether everything is there."""
        return self._filesystem.get_file_info(f"{self._path}/{ABOUT}").type == fs.FileType.File

    def size(self) -> int:
        """Return the size of everything, in bytes."""
        return sum(each.size for each in self._filesystem.get_file_info([self._place(name) for name in FILES]))

    def wait_until_given(self, folder: Path) -> None:
        """Wait until everything is there, or in a folder of this node."""
        while not folder.exists() and not self.is_given():
            time.sleep(POLL_SECONDS)

    def give(self, folder: Path) -> None:
        """Store a folder's files; the one that says what they are comes last."""
        self._filesystem.create_dir(self._path)
        for name in FILES:
            with (folder / name).open("rb") as source, self._filesystem.open_output_stream(self._place(name)) as target:
                shutil.copyfileobj(source, target, COPY_BYTES)

    def take(self, folder: Path) -> None:
        """Fetch the files into a folder."""
        for name in FILES:
            with self._filesystem.open_input_stream(self._place(name)) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, COPY_BYTES)

    def _place(self, name: str) -> str:
        return f"{self._path}/{name}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
