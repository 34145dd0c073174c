"""documents.py and chats.py: files and their columns, chats, packing, and errors of one line."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from tests.language import TEMPLATE, small_tokenizer
from tests.lazy import Lazy

documents = Lazy("ray_on_ecs.recipes.documents")
chats = Lazy("ray_on_ecs.recipes.chats")
transformers = Lazy("transformers")
torch = Lazy("torch")
pytestmark = pytest.mark.filterwarnings("default")  # of the libraries


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of tokens, which the tests share."""
    monkeypatch.setattr(documents, "CACHE", tmp_path_factory.getbasetemp() / "language-model" / "ray-on-ecs")
    documents.datasets.disable_progress_bars()


@pytest.fixture
def tokenizer() -> Any:
    return small_tokenizer()


def packed(texts: list[list[int]], learned: list[list[bool]], context: int) -> list[Any]:
    """The sequences of documents."""
    rows = documents.Dataset.from_dict({"ids": texts, "learned": learned}).with_format("numpy")
    options = {"batched": True, "fn_kwargs": {"context": context}, "remove_columns": ["ids", "learned"]}
    sequences = rows.map(documents.pack_tokens, **options)
    return [sequences[number] for number in range(len(sequences))]


def test_answers_of_a_chat_are_learned(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "so", "name": None},
    ]
    row = documents.tokenize({"messages": messages}, tokenizer, ["messages"])
    learned = [token for token, flag in zip(row["ids"], row["learned"], strict=True) if flag]
    assert tokenizer.decode(learned) == "ho<|im_end|>\nso<|im_end|>\n"
    assert tokenizer.decode(row["ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
    pair = {"prompt": "hi", "completion": "ho"}
    first = documents.tokenize({"messages": messages[:2]}, tokenizer, ["messages"])
    assert documents.tokenize(pair, tokenizer, ["prompt", "completion"])["ids"].tolist() == first["ids"].tolist()
    assert chats.answers_of(tokenizer, messages[:1])[1] == []


def test_earlier_answers_that_a_template_changes_are_learned(tokenizer: Any) -> None:
    thinking = TEMPLATE.replace(
        "{{ m['content'] }}",
        "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}",
    )
    messages = [{"role": role, "content": role[:2] + str(turn)} for turn in (1, 2) for role in ("user", "assistant")]
    qwen = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=thinking)
    row = documents.tokenize({"messages": messages}, qwen, ["messages"])
    learned = [token for token, flag in zip(row["ids"], row["learned"], strict=True) if flag]
    assert qwen.decode(learned) == "as1<|im_end|>\n<think>\n\n</think>\n\nas2<|im_end|>\n"


@pytest.mark.parametrize("messages", ["text", [{"from": "human", "value": "hi"}], [{"role": "user"}]])
def test_another_form_of_chats_is_named(messages: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="messages are a list of"):
        documents.tokenize({"messages": messages}, tokenizer, ["messages"])


def test_truncating_tokenizer_keeps_the_whole_text(tokenizer: Any) -> None:
    cut = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    cut.backend_tokenizer.enable_truncation(4)
    row = documents.tokenize({"text": "words " * 50}, cut, ["text"])
    cut.backend_tokenizer.no_truncation()
    assert tokenizer.decode(row["ids"]) == "words " * 50 + "<|im_end|>"


def test_each_token_is_a_label_once() -> None:
    texts = [list(range(10, 10 + size)) for size in (3, 1, 12, 0, 5)]
    learned = [[True] * len(text) for text in texts]
    learned[2][6] = False
    batch = documents.collate(packed(texts, learned, context=4))
    assert batch["input_ids"].shape == (5, 4)
    labels = batch["labels"][batch["labels"] != documents.IGNORED].tolist()
    assert labels == [11, 12, *range(11, 16), *range(17, 22), *range(11, 15)]
    assert documents.learned_tokens(batch) == len(labels)
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0]
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3]


def test_offsets_of_documents_begin_each_sequence() -> None:
    texts = [list(range(10, 10 + size)) for size in (3, 6)]
    batch = documents.collate(packed(texts, [[True] * len(text) for text in texts], context=4))
    offsets = documents.to_device(batch, torch.device("cpu"))["document_offsets"]
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, 3, 4, 8], "of the first sequence two documents, of the second the rest of one"


def test_files_of_all_kinds_are_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "c.jsonl").write_text('{"text": "four"}\n\n{"text": ""}\n{"text": null}\n{"text": "five"}\n')
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "six"}\n'))
    documents.Dataset.from_dict({"text": ["seven", "x" * 2**20]}).to_parquet(tmp_path / "e.parquet")
    (tmp_path / "f.bin").write_bytes(b"")
    rows, columns = documents.read_rows(str(tmp_path), "--data", None)
    assert columns == ["text"]
    short = [text for text in rows["text"] if len(text) < 2**20]
    assert short == ["one\n\ntwo\n", "three", "four", "five", "six", "seven"]
    assert len(rows) == 7
    out = capsys.readouterr().out
    assert "files of other kinds are left out: 1, such as" in out
    assert "2 of 9 documents are empty and left out" in out
    read = documents.read_documents(str(tmp_path), validation_fraction=0.25)
    assert (len(read.validation), read.are_chats) == (2, False)
    assert sorted([*read.training["text"], *read.validation["text"]]) == sorted(rows["text"])
    assert documents.read_rows(str(tmp_path / "a.txt"), "--data", None)[0]["text"] == ["one\n\ntwo\n"]
    train, validation = documents.split(rows.select([0]), columns, 0.25)
    assert [train[0]["text"], validation[0]["text"]] == ["one\n\ntw", "o\n"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": \n', "a.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is not an object"),
        ("a.jsonl", b'{"body": "a"}\n', "there is no column messages, prompt and completion, or text, but body"),
        ("a.jsonl", b'{"text": 3}\n', "the column text is not text alone"),
        ("a.bin", b"", "has no file whose name ends with"),
    ],
)
def test_wrong_documents_cost_one_line(
    name: str, content: bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    _check_refused(tmp_path, line, capsys)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("b.txt", b"caf\xe9", "can't decode byte 0xe9"),
        ("b.md", b"\xff\xfe", "can't decode byte 0xff"),
        ("b.py.gz", gzip.compress(b"caf\xe9", mtime=0), "can't decode byte 0xe9"),
        ("b.parquet", b"no parquet", "Parquet magic bytes not found"),
        ("b.parquet", b"PAR1" + bytes(99) + b"PAR1", ""),
        ("b.txt.gz", b"no gzip", "Not a gzipped file"),
        ("b.txt.gz", gzip.compress(b"truncated" * 99, mtime=0)[:-9], ""),
        ("b.json", b"not JSON", ""),
        ("b.json", b'[{"text": "a"}, {"te', ""),
        ("b.json.gz", b"no gzip", ""),
        ("b.jsonl.gz", b"no gzip", ""),
        ("b.jsonl", b"\xff", ""),
    ],
)
def test_broken_file_among_good_ones_is_named(
    name: str, content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for good in "ac":
        (tmp_path / f"{good}.txt").write_text("good")
        (tmp_path / f"{good}.json").write_text('{"text": "good"}')
        documents.Dataset.from_dict({"text": ["good"]}).to_parquet(tmp_path / f"{good}.parquet")
    (tmp_path / name).write_bytes(content)
    _check_refused(tmp_path, f"error: argument --data: {tmp_path / name}", capsys)
    _check_refused(tmp_path / name, reason, capsys)


def _check_refused(data: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        documents.read_rows(str(data), "--data", None)
    assert error.value.code == 2
    [printed] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line in printed


def test_different_columns_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(SystemExit):
        documents.read_rows(str(tmp_path), "--data", None)
    assert "column names don't match" in capsys.readouterr().err
    assert documents.first_fault({"json": [str(tmp_path / "a.jsonl")]}) is None


@pytest.mark.parametrize(
    ("vocab_size", "text", "line"),
    [(50, "words", "its tokenizer made token"), (304, "a", "there is nothing to learn in the documents")],
)
def test_unfit_tokens_are_one_line(
    vocab_size: int, text: str, line: str, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = documents.Dataset.from_dict({"prompt": [text], "completion": [text]})
    columns = ["prompt"] if vocab_size == 50 else ["prompt", "completion"]
    mute = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template="-")
    read = documents.Documents(rows, rows, columns)
    with pytest.raises(SystemExit):
        documents.pack(read, tokenizer if vocab_size == 50 else mute, context=4, vocab_size=vocab_size)
    assert line in capsys.readouterr().err
