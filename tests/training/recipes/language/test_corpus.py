import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_on_ecs.errors import UsageError
from tests.aws import BUCKET
from tests.training.ranks import Ranks
from tests.training.recipes.language.conftest import MODULES
from training.engine.feed import thread_feed
from training.recipes.language import corpus, tokenizer
from training.recipes.language import texts as texts_module
from training.recipes.language.corpus import Corpus


def test_any_text_comes_back_from_its_tokens() -> None:
    learned = tokenizer.learn(["some text", "some more text"], 300)
    for text in ("some text", "  Ünïcödé\n\t\N{SNOWMAN} never seen", ""):
        assert learned.decode(learned.encode(text).ids) == text
    assert len(learned.encode("some text").ids) < len("some text"), "it has learned its words"
    assert tokenizer.end_of(learned) == 0


def test_the_same_texts_give_the_same_tokenizer(texts: Path) -> None:
    written = [tokenizer.learn((file.read_text() for file in sorted(texts.iterdir())), 512).to_str() for _ in range(2)]
    assert written[0] == written[1], "nodes would train on different tokens"


def test_every_byte_of_text_is_trained_on_or_tested_with(texts: Path, code: Corpus) -> None:
    files = list(texts.iterdir())
    both = [code.tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in (code.train, code.test)]
    assert [len(part.replace(tokenizer.END, "").encode()) for part in both] == [code.train_bytes, code.test_bytes]
    joined = "".join(both)
    assert all(file.read_text()[:1000] in joined for file in files)
    size = sum(file.stat().st_size for file in files)
    assert code.train_bytes + code.test_bytes == size
    assert code.test_bytes == pytest.approx(0.05 * size, rel=0.02)
    assert np.count_nonzero(code.train == code.end) + np.count_nonzero(code.test == code.end) >= len(files)


def test_it_is_tokenized_once_on_a_node(texts: Path, code: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(corpus, "_make")
    again = corpus.load(str(texts), 0.05, 512)
    assert again.fingerprint == code.fingerprint
    assert np.array_equal(again.train, code.train)


def test_a_text_that_changes_is_another_corpus(texts: Path, code: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    shutil.copytree(texts, folder)
    copied = corpus.load(str(folder), 0.05, 512)
    assert copied.fingerprint == code.fingerprint, "the same text elsewhere is the same corpus"
    (folder / "more.txt").write_text("more text\n" * 100)
    assert corpus.load(str(folder), 0.05, 512).fingerprint != code.fingerprint


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "text.txt").write_text("a text of some length\n" * 200)
    before = corpus.load(str(tmp_path), 0.2, 300)
    assert before.documents == 2, "one file, a part of it for testing"
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0" + os.urandom(50))
    (tmp_path / "latin.txt").write_bytes("\xe9\xe8".encode("latin-1"))
    after = corpus.load(str(tmp_path), 0.2, 300)
    assert after.train_bytes + after.test_bytes == before.train_bytes + before.test_bytes


def test_a_tokenizer_that_is_given_is_used(tmp_path: Path, texts: Path) -> None:
    given = tokenizer.learn(["other text"], 260)
    given.save(str(tmp_path / "tokenizer.json"))
    found = corpus.load(str(texts), 0.05, None, tmp_path / "tokenizer.json")
    assert found.tokenizer.to_str() == given.to_str()


def test_python_s_own_library_is_a_corpus() -> None:
    found = corpus.load("python", 0.05, 300)
    assert found.train_bytes > 1_000_000
    train, test = (found.tokenizer.decode(part.tolist()) for part in (found.train, found.test))
    assert train.count("def ") > 1000
    assert test.count("def ") > 100
    assert "'BLDSHARED': " not in train + test, "how this Python was built"


def test_a_corpus_may_lie_in_a_bucket(texts: Path, code: Corpus, s3: Any) -> None:
    for file in texts.iterdir():
        s3.upload_file(str(file), BUCKET, f"texts/{file.name}")
    assert corpus.load(f"s3://{BUCKET}/texts", 0.05, 512).fingerprint == code.fingerprint


class Places:
    """A feed that counts what it tokenizes."""

    def __init__(self) -> None:
        self.files = 0

    def __call__(self, parts: Iterable[Any], prepare: Callable[[Any], np.ndarray]) -> Iterator[np.ndarray]:
        for part in parts:
            self.files += len(part.files)
            yield prepare(part)


def loaded(
    rank: int,
    ranks: int,
    address: str,
    folders: list[str],
    environment: dict[str, str],
    shared: str = f"s3://{BUCKET}/runs/.corpora",
    late: str | None = None,
) -> tuple[int, Corpus]:
    """How many files a rank on a node of its own tokenizes, and what it gets; ranks but 0 list `late`."""
    feed = Places()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(
            corpus, "node_folder", lambda kind, key: Path(folders[rank], hashlib.md5(key.encode()).hexdigest())
        )
        if late and rank > 0:
            patch.setattr(corpus, "find", lambda *given: replace(texts_module.find(*given), version=late))
        found = corpus.load(address, 0.05, 512, feed=feed, shared=shared)
    return feed.files, replace(found, tokenizer=None, train=np.array(found.train), test=np.array(found.test))


def test_nodes_share_the_tokens_of_a_bucket_which_later_runs_have_at_once(
    texts: Path, code: Corpus, s3: Any, on_ranks: Ranks, tmp_path: Path, aws_variables: dict[str, str]
) -> None:
    for file in texts.iterdir():
        s3.upload_file(str(file), BUCKET, f"shared/{file.name}")
    nodes = [str(tmp_path / name) for name in ("first", "second", "third")]
    for folders, made in ((nodes[:2], [len(MODULES), 0]), (nodes[2:], [0])):
        found = on_ranks(len(folders), loaded, f"s3://{BUCKET}/shared", folders, aws_variables)
        assert [files for files, _ in found] == made, "rank 0 tokenizes, and only where nobody has done it"
        for _, each in found:
            assert each.fingerprint == code.fingerprint
            assert np.array_equal(each.train, code.train)
            assert np.array_equal(each.test, code.test)


def test_a_node_that_has_the_tokens_gives_them_to_those_that_have_not(
    texts: Path, code: Corpus, s3: Any, on_ranks: Ranks, tmp_path: Path, aws_variables: dict[str, str]
) -> None:
    for file in texts.iterdir():
        s3.upload_file(str(file), BUCKET, f"given/{file.name}")
    nodes = [str(tmp_path / name) for name in ("first", "second")]
    places = [f"s3://{BUCKET}/{name}/.corpora" for name in ("runs", "other-runs")]
    address = f"s3://{BUCKET}/given"
    assert on_ranks(1, loaded, address, nodes[:1], aws_variables, places[0])[0][0] == len(MODULES)
    found = on_ranks(2, loaded, address, nodes, aws_variables, places[1])
    assert [files for files, _ in found] == [0, 0]
    assert {each.fingerprint for _, each in found} == {code.fingerprint}


def test_a_rank_that_lists_another_file_takes_what_rank_0_has_made(
    texts: Path, code: Corpus, s3: Any, on_ranks: Ranks, tmp_path: Path, aws_variables: dict[str, str]
) -> None:
    for file in texts.iterdir():
        s3.upload_file(str(file), BUCKET, f"late/{file.name}")
    nodes = [str(tmp_path / name) for name in ("first", "second")]
    place = f"s3://{BUCKET}/late-runs/.corpora"
    found = on_ranks(2, loaded, f"s3://{BUCKET}/late", nodes, aws_variables, place, "another")
    assert {each.fingerprint for _, each in found} == {code.fingerprint}


def test_a_disk_without_room_is_refused_before_anything_is_made(
    texts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(corpus, "node_folder", lambda kind, key: tmp_path / "corpus")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))  # the caches there would be deleted
    monkeypatch.setattr("ray_on_ecs.filesystem.SPARE_BYTES", 2**60)
    with pytest.raises(UsageError, match=r"--corpus: .* GiB, and there is room for 0\.0 GiB"):
        corpus.load(str(texts), 0.05, 512)


def test_the_tokenizer_is_learned_from_the_beginning_of_a_large_corpus(texts: Path) -> None:
    found = texts_module.find(str(texts), 0.05)
    whole = list(found.train_texts(2**40))
    assert list(found.train_texts(found.sizes[0] + 1)) == whole[:2]
    assert sum(map(len, whole)) > sum(map(len, whole[:2]))


def test_many_files_and_large_ones_are_the_same_tokens_in_any_parts(
    texts: Path, code: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(texts_module, "PART_BYTES", 100_000)
    monkeypatch.setattr(corpus, "node_folder", lambda kind, key: tmp_path / "corpus")
    parts = list(texts_module.find(str(texts), 0.05).parts())
    assert 1 < len(parts) < len(MODULES)
    assert corpus.load(str(texts), 0.05, 512, feed=thread_feed(3)).fingerprint == code.fingerprint


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    for given, reason in ((tmp_path, "are no files in"), (tmp_path / "nowhere", "is nothing at")):
        with pytest.raises(UsageError, match=f"--corpus: there {reason}"):
            corpus.load(str(given), 0.05, 300)
    (tmp_path / "data").write_bytes(b"\0" * 100)
    with pytest.raises(UsageError, match="too little text"):
        corpus.load(str(tmp_path), 0.05, 300)
