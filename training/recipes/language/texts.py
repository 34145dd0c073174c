"""The text files of a corpus, which are read and tokenized where they are: in a folder or in a bucket, part by part."""

from __future__ import annotations

import hashlib
import pickle
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ray_on_ecs.errors import UsageError
from ray_on_ecs.filesystem import filesystem_of, find_files
from training.recipes.language import tokenizer as tokenizers
from training.recipes.language.config import PYTHON

# Characters of a document that are encoded at once.
PIECE = 2**18
# Files are put together until they have so many bytes.
PART_BYTES = 4 * 2**20
# A file with a zero among its first bytes is no text.
HEAD_BYTES = 8192


class TextFile(NamedTuple):
    """A file, and how much of it is for training.

    Attributes:
        path: Where it is on its file system.
        train_fraction: The fraction of its characters, 0..1, before those that are for testing.
    """

    path: str
    train_fraction: float


@dataclass(frozen=True)
class TextPart:
    """Files that are tokenized together, wherever that is done; the address says on which file system they are."""

    address: str
    files: Sequence[TextFile]


class Tokens(NamedTuple):
    """The tokens of a part.

    Attributes:
        train: Those to train on, as bytes of the corpus's dtype.
        test: Those to test with.
        train_bytes: Length of the text that is trained on, in UTF-8.
        test_bytes: Length of the other text.
        documents: Number of documents; one may be in both.
    """

    train: bytes
    test: bytes
    train_bytes: int
    test_bytes: int
    documents: int


@dataclass(frozen=True)
class Texts:
    """The files of a corpus, in an order that depends on their names alone.

    Attributes:
        address: A folder or `s3://bucket/prefix`.
        files: The files.
        sizes: Their sizes, in bytes.
        version: Changes with the files.
    """

    address: str
    files: Sequence[TextFile]
    sizes: Sequence[int]
    version: str

    @property
    def in_bucket(self) -> bool:
        """Whether every node can read them."""
        return "://" in self.address

    def parts(self) -> Iterator[TextPart]:
        """Yield all files, in parts of some megabytes, unless one file is larger."""
        some: list[TextFile] = []
        size = 0
        for file, bytes_ in zip(self.files, self.sizes, strict=True):
            some.append(file)
            size += bytes_
            if size >= PART_BYTES:
                yield TextPart(self.address, some)
                some, size = [], 0
        if some:
            yield TextPart(self.address, some)

    def train_texts(self, limit: int) -> Iterator[str]:
        """Yield the first so many bytes of the text that is trained on, document by document, and no part of one."""
        before = 0
        for file, size in zip(self.files, self.sizes, strict=True):
            if before >= limit:
                return
            before += size
            if file.train_fraction > 0 and (halves := _halves(self.address, file)) and halves[0]:
                yield halves[0]


def find(corpus: str, test_fraction: float) -> Texts:
    """Find the files of a corpus.

    Args:
        corpus: A folder, a file, an `s3://bucket/prefix`, or "python".
        test_fraction: The fraction of their bytes that is for testing: the last ones in order.

    Raises:
        UsageError: There are none, or they can't be listed.
    """
    address = sysconfig.get_paths()["stdlib"] if corpus == PYTHON else corpus
    top, files = find_files(address, "--corpus")
    if corpus == PYTHON:
        modules = (each for each in files if each.extension == "py" and str(PurePosixPath(each.path).parent) == top)
        # _sysconfigdata*.py records how this Python was built. It differs between machines, and on Python 3.12 it would
        # be a fifth of the test part.
        files = [each for each in modules if not each.base_name.startswith("_sysconfigdata")]
    if not any(each.size for each in files):
        raise UsageError(f"--corpus: there are no files in {corpus}")
    names = {each.path: each.path.removeprefix(f"{top}/") if each.path != top else each.base_name for each in files}
    files.sort(key=lambda each: hashlib.sha256(names[each.path].encode()).digest())
    train_bytes = int((1 - test_fraction) * sum(each.size for each in files))
    found, before = [], 0
    for each in files:
        found.append(TextFile(each.path, min(1.0, max(0.0, (train_bytes - before) / each.size)) if each.size else 0.0))
        before += each.size
    version = repr([address, test_fraction, *((names[each.path], each.size, each.mtime_ns) for each in files)])
    return Texts(address, found, [each.size for each in files], version)


def tokenize(tokenizer: str, dtype: str, part: TextPart) -> np.ndarray:
    """Return the tokens of a part, each document with a token at its end: `Tokens`, pickled, as uint8 [n].

    Args:
        tokenizer: The tokenizer as JSON.
        dtype: The type of a token.
        part: The files.

    Raises:
        OSError: A file can't be read.
    """
    learned = _tokenizer(tokenizer)
    end = tokenizers.end_of(learned)
    outputs: tuple[list[bytes], list[bytes]] = ([], [])
    lengths = [0, 0]
    documents = 0
    for file in part.files:
        for index, text in enumerate(_halves(part.address, file) or ()):
            if not text:
                continue
            pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
            for encoding in learned.encode_batch(pieces, add_special_tokens=False):
                outputs[index].append(np.asarray(encoding.ids, dtype).tobytes())
            outputs[index].append(np.asarray([] if end is None else [end], dtype).tobytes())
            lengths[index] += len(text.encode())
            documents += 1
    found = Tokens(b"".join(outputs[0]), b"".join(outputs[1]), *lengths, documents)
    return np.frombuffer(pickle.dumps(tuple(found)), np.uint8)


def tokens_of(prepared: np.ndarray) -> Tokens:
    """Return what `tokenize` has made."""
    return Tokens(*pickle.loads(prepared.tobytes()))


@lru_cache(1)
def _tokenizer(tokenizer: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer)


def _halves(address: str, file: TextFile) -> tuple[str, str] | None:
    """Return the text of a file that is for training and that for testing, or None if it isn't text (UTF-8)."""
    with filesystem_of(address).open_input_file(file.path) as opened:
        content = opened.read()
    if b"\0" in content[:HEAD_BYTES]:
        return None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    cut = round(len(text) * file.train_fraction)
    return text[:cut], text[cut:]
