"""language_model.py: options, training, sharding, LoRA, export, and exact resumption."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.language import write_model
from tests.lazy import Lazy
from tests.training.ranks import Ranks as OnRanks
from tests.training.refused import refused
from tests.waiting import until

language_model = Lazy("training.language_model")
documents = Lazy("ray_on_ecs.recipes.documents")
language_models = Lazy("ray_on_ecs.recipes.language_models")
transformers = Lazy("transformers")
SCRIPT = Path(__file__).parents[2] / "training" / "language_model.py"
TRAINING = ("--context=64", "--global-batch-size=8", "--lr=1e-2")
pytestmark = pytest.mark.filterwarnings("default")  # of the libraries
Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tokens, which the tests share."""
    folder = tmp_path_factory.getbasetemp() / "language-model"
    monkeypatch.setattr(documents, "CACHE", folder / "ray-on-ecs")
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a random model of a family."""
    return lambda kind, *dtype, **more: write_model(tmp_path, kind, *dtype, **more)


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


def train(folder: Path, *flags: str) -> None:
    """Train in this process, which has the libraries already."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(SCRIPT), *flags])
        language_model.main()


def losses(output: str) -> list[float]:
    return [float(line.split("loss")[1].split()[0]) for line in output.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--epochs=0"], "argument --epochs: 0 must be at least 1"),
        (["--lr=0"], "argument --lr: 0 must be more than 0"),
        (["--lr=nan"], "argument --lr: 'nan' is not a number"),
        (["--validation-fraction=0.6"], "argument --validation-fraction: 0.6 must be at most 0.5"),
        (["--model=Qwen/Qwen3-0.6B"], "'Qwen/Qwen3-0.6B' is not tiny, a folder, or s3://bucket/prefix"),
        (["--data=nowhere"], "'nowhere' is not python, a folder, a file, or s3://bucket/prefix"),
        (["--typo"], "unrecognized arguments: --typo"),
    ],
)
def test_wrong_option_is_one_line(
    flags: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    assert line in refused(capsys, language_model.parse)


def gradients(rank: int, ranks: int, folder: Path, shard: bool, lora: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of two sequences, and its whole gradients, as a rank of several, each of which has one sequence."""
    language_models.transformers.logging.set_verbosity_error()
    files = language_models.read_model(str(folder))
    this = language_models.Ranks(rank, ranks, torch.device("cpu"))
    torch.manual_seed(0)
    model, loss_of = language_models.load_model(files, this, lora=lora, shard=shard)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 300, (2, 20), generator=generator)[rank::ranks]
    module = loss_of if shard or ranks == 1 else torch.nn.parallel.DistributedDataParallel(loss_of)
    loss = module(ids, ids.roll(-1, 1), torch.arange(20).repeat(len(ids), 1))
    (loss * ranks / 40).backward()
    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            whole[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    with torch.no_grad():  # a pass without a backward one, as in the validation, and another one after it
        again = loss_of(ids, ids.roll(-1, 1), torch.arange(20).repeat(len(ids), 1))
    assert torch.equal(again, loss)
    return loss.item(), whole


@pytest.mark.parametrize(
    ("kind", "tied", "lora"), [("llama", True, 0), ("qwen3", False, 0), ("qwen3", False, 4), ("gemma2", True, 0)]
)
def test_gradients_are_equal_sharded_and_not(kind: str, tied: bool, lora: int, make: Make, on_ranks: OnRanks) -> None:
    folder = make(kind, torch.float32, tie_word_embeddings=tied)
    loss, alone = gradients(0, 1, folder, False, lora)
    assert alone
    for shard in (False, True):
        results = on_ranks(2, gradients, folder, shard, lora)
        assert sum(result[0] for result in results) == pytest.approx(loss, rel=1e-6)
        for _, found in results:
            assert found.keys() == alone.keys()
            for name, gradient in alone.items():
                assert torch.allclose(found[name], gradient, atol=1e-6), name


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
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(made)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.bfloat16
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (made / name).read_bytes() == (base / name).read_bytes(), name
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("It is "), "it has learned how to answer"


def test_from_scratch_on_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("so it goes on and on. " * 200)
    train(tmp_path / "run", "--data", str(tmp_path / "texts"), "--epochs=2", *TRAINING)
    assert losses(capsys.readouterr().out)[-1] < 4
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert (model.dtype, model.config.max_position_embeddings) == (torch.float32, 256)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer("a")["input_ids"] == [100, 1]
    assert (model.config.architectures, model.generation_config.eos_token_id) == (["LlamaForCausalLM"], 1)


def test_missing_weights_are_named(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make("qwen3")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if ".1." not in name},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    files = language_models.read_model(str(folder))
    with pytest.raises(SystemExit):
        language_models.build_model(files, lora=0, dtype=torch.float32)
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
