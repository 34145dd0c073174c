"""Documents of a language model: files of texts and chats, tokenized and packed into sequences of equal length."""

from __future__ import annotations

import gzip
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from filelock import FileLock
from torch import Tensor

from ray_on_ecs.errors import UsageError
from ray_on_ecs.recipes.cache import CACHE
from ray_on_ecs.recipes.chats import answers_of
from ray_on_ecs.recipes.options import fail
from ray_on_ecs.recipes.ranks import rank_in_environment
from ray_on_ecs.storage.filesystem import fetch

LOADERS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
CHATS = (["messages"], ["prompt", "completion"])  # columns of chats
PACKED_TOGETHER = 256  # documents; the last sequence of them is filled up
IGNORED = -100  # a label that cross_entropy leaves out


@dataclass(frozen=True)
class Documents:
    """Documents for training and for validation, one per row, and the columns of a text or a chat."""

    training: Dataset
    validation: Dataset
    columns: list[str]

    @property
    def are_chats(self) -> bool:
        """Return True if only the answers of the assistant are learned."""
        return self.columns in CHATS


def read_documents(
    data: str, validation_data: str | None = None, *, column: str | None = None, validation_fraction: float = 0.05
) -> Documents:
    """Read the documents of a folder, a file or an `s3://bucket/prefix`: files of text, JSON or Parquet, also with .gz.

    Args:
        data: The folder, file or prefix; `python` for the source files of Python's library.
        validation_data: The same for validation; by default a part of `data`.
        column: The column with a text; by default messages, prompt and completion, or text.
        validation_fraction: Documents for validation.
    """
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is one line
    if int(os.environ.get("LOCAL_RANK", "0")) or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with _one_rank_of_the_node():
        rows, columns = read_rows(data, "--data", column)
        if validation_data:
            return Documents(rows, read_rows(validation_data, "--validation-data", column)[0], columns)
        return Documents(*split(rows, columns, validation_fraction), columns)


def pack(documents: Documents, tokenizer: Any, *, context: int, vocab_size: int) -> tuple[Any, Any]:
    """Return sequences of `context` + 1 tokens for training and validation, kept on the node's disk for later runs."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes share the work instead
    parts = {"training": documents.training, "validation": documents.validation}
    with _one_rank_of_the_node():
        training, validation = (
            _pack(rows, name, documents.columns, tokenizer, context, vocab_size) for name, rows in parts.items()
        )
    return training, validation


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return a batch: tokens, the learned ones that follow, and positions, by which documents are told apart."""
    ids = torch.from_numpy(np.stack([row["ids"] for row in rows])).long()
    learned = torch.from_numpy(np.stack([row["learned"] for row in rows]))
    positions = torch.arange(ids.shape[1]).repeat(len(rows), 1)
    for number, row in enumerate(rows):
        for start in row["starts"]:
            learned[number, start : start + 1] = False  # it follows the last token of another document
            positions[number, start:] = torch.arange(ids.shape[1] - start)
    labels = torch.where(learned, ids, IGNORED)[:, 1:].contiguous()
    return {"input_ids": ids[:, :-1], "labels": labels, "position_ids": positions[:, :-1]}


def learned_tokens(batch: Mapping[str, Tensor]) -> int:
    """Return the number of tokens that are learned."""
    return int((batch["labels"] != IGNORED).sum())


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy a batch to the device, with the offsets of its documents as variable-length attention needs them.

    The offsets are found on the CPU, because a GPU would have to finish all work before they are known.
    """
    positions = batch["position_ids"].flatten()
    starts = (positions == 0).nonzero().flatten()
    offsets = torch.cat([starts, torch.tensor([len(positions)])]).int()
    return {name: value.to(device, non_blocking=True) for name, value in {**batch, "document_offsets": offsets}.items()}


def read_rows(address: str, flag: str, column: str | None) -> tuple[Dataset, list[str]]:
    """Read the documents of an address, one per row, and choose the columns; a text file is one document."""
    files = _files_by_loader(address, flag)
    try:
        rows = concatenate_datasets([_load(loader, paths) for loader, paths in files.items()])
    except Exception as error:  # files may be broken in any way
        fail(f"argument {flag}: {first_fault(files) or f'{address!r}: {_reason(error)}'}")
    columns = _choose_columns(rows, column, flag)
    full = rows.filter(lambda row: all(row[name] for name in columns), desc="empty documents")
    if empty := len(rows) - len(full):
        _print(f"warning: {flag}: {empty:,} of {len(rows):,} documents are empty and left out")
    return full, columns


def first_fault(files: Mapping[str, Sequence[str]]) -> str | None:
    """Return the first line of JSONL files that is not an object, or else a file that can't be read by itself."""
    return next(filter(None, map(_fault_of_lines, files.get("json", ()))), None) or next(
        filter(None, (_fault_of_file(loader, paths) for loader, paths in files.items())), None
    )


def _fault_of_lines(path: str) -> str | None:
    if not path.removesuffix(".gz").endswith(".jsonl"):
        return None
    with (
        suppress(OSError, EOFError, UnicodeError, zlib.error),  # not lines at all
        gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file,
    ):
        for number, line in enumerate(file, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"{path}, line {number} is not an object, such as one with a text"
            except json.JSONDecodeError as cause:
                return f"{path}, line {number} is not JSON ({cause.msg}); correct it, or take it out"
    return None


def _fault_of_file(loader: str, paths: Sequence[str]) -> str | None:
    """Return a file that can't be read, which is in one of two halves; None if the files only differ."""
    try:
        _load(loader, paths)
    except Exception as error:
        if len(paths) == 1:
            return f"{paths[0]} can't be read ({_reason(error)}); correct it, or take it out"
        middle = len(paths) // 2
        return _fault_of_file(loader, paths[:middle]) or _fault_of_file(loader, paths[middle:])
    return None


def _load(loader: str, paths: Sequence[str]) -> Dataset:
    # By default the loader for text makes a document of each line.
    options: Any = {"sample_by": "document"} if loader == "text" else {}
    # `load_dataset` would report each call to the Hub, or wait for it where it can't be reached.
    read = {"text": Dataset.from_text, "json": Dataset.from_json, "parquet": Dataset.from_parquet}[loader]
    return read(list(paths), cache_dir=str(CACHE / "datasets" / datasets.__version__), **options)


def _reason(error: Exception) -> str:
    return str(error.__cause__ or error)[:300]


def split(rows: Dataset, columns: list[str], validation_fraction: float) -> tuple[Dataset, Dataset]:
    """Return documents for training and for validation; a single text is cut in two."""
    if len(rows) > 1:
        parts = rows.train_test_split(max(1, round(len(rows) * validation_fraction)), seed=0)
        return parts["train"], parts["test"]
    text = rows[0][columns[0]] if len(rows) else None
    if not isinstance(text, str):
        fail("argument --data: there are not two documents; give more, or --validation-data")
    cut = round(len(text) * (1 - validation_fraction))
    return Dataset.from_dict({columns[0]: [text[:cut]]}), Dataset.from_dict({columns[0]: [text[cut:]]})


def tokenize(row: Mapping[str, Any], tokenizer: Any, columns: list[str]) -> dict[str, Any]:
    """Return a document's tokens, and which of them are learned: all of a text, and of a chat the answers."""
    if columns not in CHATS:
        ids = tokenizer(row[columns[0]], truncation=False)["input_ids"]
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return {"ids": np.asarray(ids, np.int32), "learned": np.ones(len(ids), bool)}
    pair = [{"role": "user", "content": row.get("prompt")}, {"role": "assistant", "content": row.get("completion")}]
    text, answers = answers_of(tokenizer, row["messages"] if columns == ["messages"] else pair)
    if not answers:
        return {"ids": [], "learned": []}
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False)
    learned = [any(first <= start < end for first, end in answers) for start, _ in encoded["offset_mapping"]]
    return {"ids": np.asarray(encoded["input_ids"], np.int32), "learned": np.asarray(learned)}


def pack_tokens(rows: Mapping[str, Any], context: int) -> dict[str, list[Any]]:
    """Join documents and cut them into sequences of context + 1 tokens, of which two share the last and first token."""
    ids, learned = (np.concatenate(list(rows[name])) for name in ("ids", "learned"))
    begins = np.cumsum([0, *map(len, rows["ids"])])[:-1]
    packed: dict[str, list[Any]] = {"ids": [], "learned": [], "starts": []}
    for first in range(0, max(len(ids) - 1, 0), context):
        end = first + context + 1
        missing = max(0, end - len(ids))
        packed["ids"].append(np.pad(ids[first:end], (0, missing)))
        packed["learned"].append(np.pad(learned[first:end], (0, missing)))
        inside = slice(*np.searchsorted(begins, (first, end)))
        packed["starts"].append([*(begins[inside] - first), *([context + 1 - missing] if missing else [])])
    return packed


def _pack(rows: Dataset, name: str, columns: list[str], tokenizer: Any, context: int, vocab_size: int) -> Dataset:
    """Return sequences of documents, and print how many there are of both."""
    if not len(rows):
        fail(f"argument --data, --validation-data: there are no documents for {name}")
    features = Features({"ids": List(Value("int32")), "learned": List(Value("bool"))})
    try:
        tokens = rows.map(
            partial(tokenize, tokenizer=tokenizer, columns=columns),
            num_proc=min(os.cpu_count() or 1, len(rows) // 1000) or None,
            remove_columns=rows.column_names,
            features=features,
            writer_batch_size=PACKED_TOGETHER,
        )
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        fail(f"argument --data: {str(cause).splitlines()[0]}")
    lengths = pc.call_function("list_value_length", [tokens.data.column("ids")]).to_numpy()
    ids, learned = (pc.call_function("list_flatten", [tokens.data.column(name)]) for name in ("ids", "learned"))
    if not pc.call_function("any", [learned]).as_py():
        fail(f"argument --data, --validation-data: there is nothing to learn in the documents for {name}")
    largest = pc.call_function("max", [ids]).as_py()
    if largest >= vocab_size:
        fail(f"argument --model: its tokenizer made token {largest}, and its vocab_size is {vocab_size}")
    sequences = tokens.with_format("numpy").map(
        partial(pack_tokens, context=context),
        batched=True,
        batch_size=PACKED_TOGETHER,
        remove_columns=tokens.column_names,
        features=Features({**features, "starts": List(Value("int32"))}),
        writer_batch_size=PACKED_TOGETHER,
    )
    empty = int((lengths == 0).sum())
    without_answer = f"; {empty:,} without an answer of the assistant are left out" if empty else ""
    total = f"{len(rows):,} documents, {lengths.sum():,} tokens, {len(sequences):,} sequences of {context}"
    _print(f"{name}: {total}{without_answer}")
    return sequences


def _files_by_loader(address: str, flag: str) -> dict[str, list[str]]:
    """Return the paths of the documents by the loader of datasets that reads them: text, json or parquet."""
    folder = Path(sysconfig.get_path("stdlib")) if address == "python" else fetch_folder(address, flag)
    paths = [folder]
    if folder.is_dir():
        paths = sorted(folder.glob("*.py") if address == "python" else folder.rglob("*"))
    files: dict[str, list[str]] = {}
    others: list[str] = []
    for path in paths:
        if not path.is_file() or path.name.startswith("."):
            continue
        loader = LOADERS.get(Path(path.name.lower().removesuffix(".gz")).suffix)
        if loader is None:
            others.append(str(path))
        else:
            files.setdefault(loader, []).append(str(path))
    if others:
        _print(f"warning: {flag}: files of other kinds are left out: {len(others)}, such as {others[0]}")
    if not files:
        fail(f"argument {flag}: {address!r} has no file whose name ends with {', '.join(LOADERS)}, or that and .gz")
    return files


def fetch_folder(address: str, flag: str) -> Path:
    """Return a folder of this node: that of the address, or the copy of a bucket's prefix."""
    try:
        return fetch(os.path.expanduser(address), flag)
    except UsageError as cause:
        fail(f"argument {cause}")


def _choose_columns(rows: Dataset, column: str | None, flag: str) -> list[str]:
    """Return the columns of a chat or a text."""
    choices = [[column]] if column else [*CHATS, ["text"]]
    columns = next((columns for columns in choices if set(columns) <= set(rows.column_names)), None)
    if columns is None:
        fail(
            f"argument {flag}: there is no column {column or 'messages, prompt and completion, or text'}, but "
            f"{', '.join(rows.column_names)}; rename them, or name the one with a text by --column"
        )
    for name in columns:
        if columns != ["messages"] and getattr(rows.features[name], "dtype", "") not in ("string", "large_string"):
            fail(f"argument {flag}: the column {name} is not text alone, but {rows.features[name]}")
    return columns


def _one_rank_of_the_node() -> FileLock:
    """Return a lock: one rank of a node does the work, which the others then find in the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return FileLock(CACHE / "language-model.lock")


def _print(line: str) -> None:
    """Print a line on rank 0."""
    if rank_in_environment() == 0:
        print(line, flush=True)
