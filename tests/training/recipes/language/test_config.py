import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cluster import jobs
from ray_on_ecs.config import parse
from ray_on_ecs.errors import UsageError
from tests.aws import BUCKET
from training.recipes.language import recipe
from training.recipes.language.config import LanguageConfig


@pytest.mark.parametrize("flags", [["--recipe", "images"], ["--recipe"], ["--dataset", "digits"]])
def test_a_recipe_or_flag_that_is_not_there_is_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match=r"--recipe|--dataset"):
        parse(LanguageConfig, flags, {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 10, "epochs": 3}, "--max-steps: 10 .* multiple of --epochs 3, such as 9"),
        ({"width": 100, "heads": 3}, "--heads: 3 .* divide --width 100 into even parts"),
        ({"heads": 4, "kv_heads": 3}, "--kv-heads: 3 .* divide --heads 4"),
        ({"model": "/models/llama", "layers": 2}, "--layers: a checkpoint has its own"),
        ({"model": "/models/llama", "tied_weights": "off"}, "--tied-weights: a checkpoint has its own"),
        ({"vocab_size": 256}, "--vocab-size: 256"),
        ({"optimizer": "sgd"}, "--optimizer: 'sgd'"),
        ({"seed": 2**32}, "--seed: 4294967296 .* or less"),
        ({"sharding": "some"}, "--sharding: 'some'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LanguageConfig(**settings)


def test_a_step_is_the_same_whatever_workers_are_there() -> None:
    assert LanguageConfig(num_workers="1:4", batch_size=8).step_sequences(2) == 32
    assert LanguageConfig(num_workers=2, batch_size=8).step_sequences(2) == 16
    assert LanguageConfig(num_workers=2, batch_size=8, global_batch=6).step_sequences(2) == 6


@pytest.mark.parametrize(
    ("settings", "device", "expected"), [({}, "cpu", 8), ({}, "cuda", 16), ({"batch_size": 100}, "cuda", 100)]
)
def test_the_default_batch_size_follows_the_device(settings: dict[str, Any], device: str, expected: int) -> None:
    config = LanguageConfig(**settings).resolve_device(device)
    assert (config.device, config.batch_size) == (device, expected)
    assert config.resolve_device(device) == config, "a run that is resumed keeps it"


def test_a_folder_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="--model: '/nowhere' is not there; give one of tiny, "):
        recipe.prepare(LanguageConfig(model="/nowhere"))
    with pytest.raises(UsageError, match="--corpus: '/nowhere' is not there; give python, "):
        recipe.prepare(LanguageConfig(corpus="/nowhere"))
    kept = LanguageConfig(model="s3://bucket/model")
    assert recipe.prepare(kept) == kept, "a checkpoint in a bucket is seen by the workers"


@pytest.mark.parametrize("name", ["texts", "my texts #1", "tëxts"])
def test_a_corpus_in_a_bucket_is_looked_at_before_anything_starts(s3: Any, name: str) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"before/{name}/a.txt", Body=b"a text")
    kept = LanguageConfig(corpus=f"s3://{BUCKET}/before/{name}")
    assert recipe.prepare(kept) == kept
    with pytest.raises(UsageError, match="--corpus: there is nothing at 's3://"):
        recipe.prepare(replace(kept, corpus=f"s3://{BUCKET}/before/{name}/nothing"))
    with pytest.raises(UsageError, match=r"--corpus: 's3://bucket\?x=1' can't be read \(it is neither"):
        recipe.prepare(replace(kept, corpus="s3://bucket?x=1"))


@pytest.mark.parametrize(("corpus", "results"), [("texts", "texts"), ("texts", "texts/results"), (".", "results")])
def test_results_among_the_texts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, results: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text")
    with pytest.raises(UsageError, match=f"--storage-path: {results} is in --corpus .*give another folder"):
        recipe.prepare(LanguageConfig(corpus=corpus, storage_path=results))
    recipe.prepare(LanguageConfig(corpus="texts", storage_path="texts-results"))


def test_the_command_that_continues_a_run_names_the_recipe() -> None:
    given = LanguageConfig(max_steps=5, run_name="mine")
    words = given.command_line({})
    assert words == ["python", "-m", "training", "--recipe", "language", "--run-name", "mine", "--max-steps", "5"]
    assert parse(LanguageConfig, words[3:], {}) == given


def test_a_job_trains_a_language_model_with_the_flags_that_were_typed() -> None:
    flags = ["--recipe", "language", "--corpus", "s3://bucket/texts", "--max-steps", "10"]
    submission = jobs.submission_of_recipe("language", flags[2:])
    words = shlex.split(submission.entrypoint)
    assert words[:3] == ["python", "-m", "training"]
    assert words[3 : 3 + len(flags)] == flags
    config = parse(LanguageConfig, words[3:], {})
    assert config.run_name == submission.run["run_name"]
    assert str(config.run_name).startswith("tiny-texts-")
