"""language_model.py: documents, chats and packing, the model's own results, LoRA, export, and exact resumption."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy

from tests.lazy import Lazy
from tests.waiting import until

language_model = Lazy("training.language_model")
SCRIPT = Path(__file__).parents[2] / "training" / "language_model.py"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "vocab_size": 304, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TRAINING = ("--context=64", "--global-batch-size=8", "--lr=1e-2")
pytestmark = pytest.mark.filterwarnings("default")  # of the libraries
Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tokens, which the tests share."""
    folder = tmp_path_factory.getbasetemp() / "language-model"
    monkeypatch.setattr(language_model, "CACHE", folder / "ray-on-ecs")
    language_model.datasets.disable_progress_bars()
    language_model.transformers.logging.set_verbosity_error()
    return folder


def fast_tokenizer(tokens: Tokenizer, **options: str) -> Any:
    return language_model.transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **options)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokens.train_from_iterator(["this is a text of words " * 50], trainer)
    return language_model.transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


@pytest.fixture
def make(tmp_path: Path, tokenizer: Any) -> Make:
    """Write a random model of a family."""

    def write(kind: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Path:
        torch.manual_seed(0)
        config = language_model.AutoConfig.for_model(kind, **{**SHAPE, **more})
        model = language_model.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.generation_config.max_length = 77
        model.save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return write


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A folder of sums in words."""
    (tmp_path / "chats").mkdir()
    rows = [
        {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]}
        for a in range(20)
        for b in range(12)
    ]
    (tmp_path / "chats" / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "chats"


def command(folder: Path, *flags: str, ranks: int = 1) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    folder.mkdir(exist_ok=True)
    return [sys.executable, *launcher, str(SCRIPT), *flags]


def run(folder: Path, cache: Path, *flags: str, ranks: int = 1, **variables: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *flags, ranks=ranks), cwd=folder, env=environment(cache, **variables), text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip


def environment(cache: Path, **variables: Any) -> dict[str, str]:
    fixed = {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    return {**os.environ, **fixed, **variables}


def batch_of(documents: list[list[int]], learned: list[list[bool]], context: int) -> dict[str, torch.Tensor]:
    """Pack documents, and return all sequences as a batch."""
    rows = language_model.datasets.Dataset.from_dict({"ids": documents, "learned": learned}).with_format("numpy")
    options = {"batched": True, "fn_kwargs": {"context": context}, "remove_columns": ["ids", "learned"]}
    packed = rows.map(language_model.pack, **options)
    return language_model.collate(list(packed.with_format(None)), torch.device("cpu"))


def train(folder: Path, *flags: str) -> None:
    """Train in this process, which has the libraries already."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(SCRIPT), *flags])
        language_model.main(language_model.parse())


def losses(output: str) -> list[float]:
    return [float(line.split("loss")[1].split()[0]) for line in output.splitlines() if line.startswith("step ")]


# Documents


def test_the_answers_of_a_chat_are_learned(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "so", "name": None},
    ]
    row = language_model.tokenize({"messages": messages}, tokenizer, ["messages"])
    learned = [token for token, flag in zip(row["ids"], row["learned"], strict=True) if flag]
    assert tokenizer.decode(learned) == "ho<|im_end|>\nso<|im_end|>\n"
    assert tokenizer.decode(row["ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
    pair = {"prompt": "hi", "completion": "ho"}
    first = language_model.tokenize({"messages": messages[:2]}, tokenizer, ["messages"])
    assert language_model.tokenize(pair, tokenizer, ["prompt", "completion"])["ids"].tolist() == first["ids"].tolist()
    assert language_model.render(tokenizer, messages[:1])[1] == []


def test_earlier_answers_that_a_template_changes_are_learned(tokenizer: Any) -> None:
    thinking = TEMPLATE.replace(
        "{{ m['content'] }}",
        "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}",
    )
    messages = [{"role": role, "content": role[:2] + str(turn)} for turn in (1, 2) for role in ("user", "assistant")]
    qwen = language_model.transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=thinking
    )
    row = language_model.tokenize({"messages": messages}, qwen, ["messages"])
    learned = [token for token, flag in zip(row["ids"], row["learned"], strict=True) if flag]
    assert qwen.decode(learned) == "as1<|im_end|>\n<think>\n\n</think>\n\nas2<|im_end|>\n"


@pytest.mark.parametrize("messages", ["text", [{"from": "human", "value": "hi"}], [{"role": "user"}]])
def test_another_form_of_chats_is_named(messages: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="messages are a list of"):
        language_model.tokenize({"messages": messages}, tokenizer, ["messages"])


def test_truncating_tokenizer_keeps_the_whole_text(tokenizer: Any) -> None:
    cut = language_model.transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    cut.backend_tokenizer.enable_truncation(4)
    row = language_model.tokenize({"text": "words " * 50}, cut, ["text"])
    assert tokenizer.decode(row["ids"]) == "words " * 50 + "<|im_end|>"


def test_each_token_is_a_label_once() -> None:
    documents = [list(range(10, 10 + size)) for size in (3, 1, 12, 0, 5)]
    learned = [[True] * len(each) for each in documents]
    learned[2][6] = False
    batch = batch_of(documents, learned, context=4)
    assert batch["input_ids"].shape == (5, 4)
    labels = batch["labels"][batch["labels"] != language_model.IGNORED].tolist()
    assert labels == [11, 12, *range(11, 16), *range(17, 22), *range(11, 15)]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0]
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_packed_documents_do_not_see_each_other(kind: str, make: Make) -> None:
    model = language_model.AutoModelForCausalLM.from_pretrained(make(kind), dtype=torch.float32).eval()
    documents = [torch.randint(3, 300, (size,)).tolist() for size in (7, 12, 9)]
    batch = batch_of(documents, [[True] * len(each) for each in documents], context=40)
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([each])).logits[0] for each in documents]
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        sums = [
            cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")
            for logits, ids in zip(alone, documents, strict=True)
        ]
        loss = language_model.Loss(model, torch.device("cpu"))(model, batch)
    assert torch.allclose(together[:28], torch.cat(alone), atol=1e-5)
    assert torch.allclose(loss, torch.stack(sums).sum(), rtol=1e-5), "transformers' logits, the same loss"


@pytest.mark.parametrize(("kind", "in_parts"), [("qwen3", True), ("gemma2", False)])
def test_the_loss_in_parts_has_the_same_gradients(
    kind: str, in_parts: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "CHUNK", 8)
    model = language_model.AutoModelForCausalLM.from_pretrained(make(kind), dtype=torch.float32)
    ids = torch.randint(3, 300, (2, 20))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(2, 20) < 0.3, language_model.IGNORED)
    positions = torch.arange(20).repeat(2, 1)
    expected = cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    loss_of = language_model.Loss(model, torch.device("cpu"))
    assert ("forward" in vars(model.get_output_embeddings())) is in_parts
    loss = loss_of(model.train(), {"input_ids": ids, "labels": labels, "position_ids": positions})
    assert torch.allclose(loss, expected, rtol=1e-5)
    for found, gradient in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
        assert torch.allclose(found, gradient, atol=1e-4)


def arguments(**more: Any) -> Namespace:
    return Namespace(**{"column": None, "validation_fraction": 0.25, "validation_data": None, **more})


def test_files_of_all_kinds_are_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "c.jsonl").write_text('{"text": "four"}\n\n{"text": ""}\n{"text": null}\n{"text": "five"}\n')
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "six"}\n'))
    language_model.datasets.Dataset.from_dict({"text": ["seven", "x" * 2**20]}).to_parquet(tmp_path / "e.parquet")
    (tmp_path / "f.bin").write_bytes(b"")
    rows, columns = language_model.read_documents(str(tmp_path), "--data", arguments())
    assert columns == ["text"]
    short = [text for text in rows["text"] if len(text) < 2**20]
    assert short == ["one\n\ntwo\n", "three", "four", "five", "six", "seven"]
    assert len(rows) == 7
    out = capsys.readouterr().out
    assert "files of other kinds are left out: 1, such as" in out
    assert "2 of 9 documents are empty and left out" in out
    train, validation = language_model.split(rows, columns, arguments())
    assert sorted([*train["text"], *validation["text"]]) == sorted(rows["text"])
    train, validation = language_model.split(rows.select([0]), columns, arguments())
    assert [train[0]["text"], validation[0]["text"]] == ["one\n\ntw", "o\n"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": \n', "a.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2 is not an object"),
        ("a.jsonl", b'{"body": "a"}\n', "there is no column messages, prompt and completion, or text, but body"),
        ("a.jsonl", b'{"text": 3}\n', "the column text is not text alone"),
        ("a.txt", b"caf\xe9", "can't decode byte 0xe9"),
        ("a.parquet", b"no parquet", "Parquet magic bytes not found"),
        ("a.txt.gz", b"no gzip", "Not a gzipped file"),
        ("a.bin", b"", "has no file whose name ends with"),
    ],
)
def test_a_broken_file_is_one_line(
    name: str, content: bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as error:
        language_model.read_documents(str(tmp_path), "--data", arguments())
    assert error.value.code == 2
    [said] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line in said


def test_different_columns_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(SystemExit):
        language_model.read_documents(str(tmp_path), "--data", arguments())
    assert "column names don't match" in capsys.readouterr().err
    assert language_model.first_fault([str(tmp_path / "a.jsonl")]) is None


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--epochs=0"], "argument --epochs: 0 must be at least 1"),
        (["--lr=0"], "argument --lr: 0.0 must be at least 1e-09"),
        (["--model=Qwen/Qwen3-0.6B"], "'Qwen/Qwen3-0.6B' is neither a folder nor s3://bucket/prefix"),
        (["--data=nowhere"], "'nowhere' is neither a folder nor s3://bucket/prefix"),
        (["--typo"], "unrecognized arguments: --typo"),
    ],
)
def test_a_wrong_option_is_one_line(
    flags: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    with pytest.raises(SystemExit, match="2"):
        language_model.parse()
    [error] = capsys.readouterr().err.splitlines()
    assert line in error


def test_a_wrong_option_ends_before_torch(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    done = run(tmp_path, cache, "--epochs=0", PYTHONPATH=f"{tmp_path}:{SCRIPT.parents[1]}")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


# Training


@pytest.mark.parametrize(
    ("kind", "ranks", "more"),
    [
        pytest.param(
            *("llama", 2, ["--precision=bf16", "--activation-checkpointing=selective", "--batch-size=2"]),
            marks=pytest.mark.ray,
        ),
        ("qwen3", 1, []),
        pytest.param("mistral", 1, ["--precision=bf16", "--activation-checkpointing=full"], marks=pytest.mark.ray),
    ],
)
def test_a_fine_tuned_model_loads_and_answers(
    kind: str,
    ranks: int,
    more: list[str],
    make: Make,
    chats: Path,
    tmp_path: Path,
    cache: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    base = make(kind, tie_word_embeddings=kind == "llama")
    flags = ("--model", str(base), "--data", str(chats), *TRAINING, "--epochs=2", "--log-every=5", *more)
    if ranks == 1:
        train(tmp_path / "run", *flags)
    else:
        subprocess.run(
            command(tmp_path / "run", *flags, ranks=ranks), cwd=tmp_path / "run", env=environment(cache), check=True
        )
    shown = losses(capfd.readouterr().out)
    assert shown[-1] < shown[0] / 3
    made = tmp_path / "run" / "model"
    model: Any = language_model.AutoModelForCausalLM.from_pretrained(made)
    tokenizer: Any = language_model.AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.bfloat16
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (made / name).read_bytes() == (base / name).read_bytes(), name
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("It is "), "it has learned how to answer"


def test_from_scratch_on_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("so it goes on and on. " * 200)
    train(tmp_path / "run", "--data", str(tmp_path / "a.txt"), "--epochs=2", *TRAINING)
    assert losses(capsys.readouterr().out)[-1] < 4
    model = language_model.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert (model.dtype, model.config.max_position_embeddings) == (torch.float32, 256)
    tokenizer: Any = language_model.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer("a")["input_ids"] == [100, 1]
    assert (model.config.architectures, model.generation_config.eos_token_id) == (["LlamaForCausalLM"], 1)


def test_weights_that_are_missing_are_named(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make("qwen3")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if ".1." not in name},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    args = Namespace(model=str(folder), lora=0)
    config = language_model.AutoConfig.from_pretrained(folder)
    with pytest.raises(SystemExit):
        language_model.build_model(folder, config, args, torch.float32, True, False)
    assert "has no weights for model.layers.1." in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ray)])
def test_adapters_alone_change_and_merge(make: Make, chats: Path, tmp_path: Path, cache: Path, ranks: int) -> None:
    base = make("qwen3", torch.float32)
    flags = ("--model", str(base), "--data", str(chats), *TRAINING, "--lora=4", "--max-steps=6", "--log-every=3")
    train(tmp_path / "one", *flags)
    if ranks == 2:
        done = run(tmp_path / "two", cache, *flags, "--sharding=full", "--batch-size=2", ranks=2)
        assert done.returncode == 0, done.stderr
    results = []
    for name in ("one", "two")[:ranks]:
        results.append(load_file(tmp_path / name / "adapter" / "adapter_model.safetensors"))
        before, merged = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / name / "model"))
        changed = 0
        for key, weight in before.items():
            adapter = f"base_model.model.{key.removesuffix('.weight')}"
            if f"{adapter}.lora_A.weight" in results[-1]:
                a, b = (results[-1][f"{adapter}.lora_{each}.weight"] for each in "AB")
                weight = weight + 2 * b @ a
                changed += 1
            assert torch.allclose(merged[key], weight, atol=1e-6), key
        assert changed == 14
        [*_, saved] = sorted((tmp_path / name / "checkpoints").rglob(".metadata"))
        assert b"lora_A" in saved.read_bytes()
        assert b"embed_tokens" not in saved.read_bytes()
    for key, value in results[0].items() if ranks == 2 else ():
        assert torch.allclose(value, results[-1][key], atol=1e-4), key


@pytest.mark.fault  # takes two minutes; test_checkpointer.py has the same with a small model
def test_a_reclaimed_training_ends_with_the_same_weights(make: Make, chats: Path, tmp_path: Path, cache: Path) -> None:
    base = make("llama", torch.float32, tie_word_embeddings=True)
    flags = ("--model", str(base), "--data", str(chats), *TRAINING, "--max-steps=24", "--log-every=4")
    whole = run(tmp_path / "whole", cache, *flags, "--sharding=full", ranks=2)
    assert whole.returncode == 0, whole.stderr

    told = tmp_path / "told"
    told.mkdir()
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command(tmp_path / "cut", *flags, "--sharding=full", ranks=2), cwd=tmp_path / "cut", stdout=file,
            stderr=subprocess.STDOUT, env=environment(cache, RAY_ON_ECS_SDK_DIR=str(told)),
        )  # fmt: skip
        until(lambda: process.poll() is not None or "step 4/" in log.read_text())
        (told / "deadline").write_text(str(time.time() + 60))
        assert process.wait(300) == 0, log.read_text()
    assert "the scripts are being ended: saving after step" in log.read_text()
    assert not (tmp_path / "cut" / "model").exists()
    shutil.copytree(tmp_path / "cut", tmp_path / "one")
    again = run(tmp_path / "cut", cache, *flags, "--sharding=full", ranks=2)
    assert "resuming after step" in again.stdout, again.stderr
    alone = run(tmp_path / "one", cache, *flags, "--sharding=full")
    assert "resuming after step" in alone.stdout, alone.stderr
    weights, same, near = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut", "one")
    )
    for key, value in weights.items():
        assert torch.equal(value, same[key]), key
        assert torch.allclose(value, near[key], atol=1e-5), key
