"""A causal language model of transformers: fine-tuned, with LoRA or in full, or trained from scratch.

    ray-on-ecs run language_model.py --model s3://my-bucket/Qwen3-8B --data s3://my-bucket/chats --sharding full
    ray-on-ecs run language_model.py --model ./SmolLM2-135M --data ./texts --lora 16

--model is a folder or bucket prefix in Hugging Face's layout; with only a config.json the training starts from scratch.
The run writes model/, which from_pretrained loads. Order and steps depend only on seed and global batch size, not on
the number of workers. The file is self-contained: copy it (ray-on-ecs recipe copy language_model) and change it.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, cast

RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "ray-on-ecs"
KINDS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
TINY = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
IGNORED = -100  # labels that cross_entropy leaves out
WARMUP, CLIP_NORM = 0.05, 1.0  # fraction of the steps, and largest norm of the gradients
CHUNK = 512  # tokens whose logits are in memory at a time
DOCUMENTS = 256  # that are packed together; their last sequence is filled up
# Options that may differ when a run resumes.
FREE = ("compile", "precision", "batch_size", "sharding", "activation_checkpointing", "log_every", "checkpoint_seconds")
COPIED = ("config.json", "generation_config", "tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_")
CHATS = (["messages"], ["prompt", "completion"])  # columns of chats


def fail(line: str, status: int = 2) -> NoReturn:
    """Print one line and exit; status 2 is an error that a restart won't fix."""
    print(f"language_model.py: error: {line}", file=sys.stderr, flush=True)
    sys.exit(status)


def parse() -> argparse.Namespace:
    """Return the options."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.error = fail  # ty: ignore[invalid-assignment]
    add = parser.add_argument
    add("--model", default="tiny", help="folder or s3://bucket/prefix; tiny: a small Llama, from scratch (%(default)s)")
    add("--data", default="python", metavar="FOLDER", help="folder or s3://bucket/prefix with .txt, .md, .jsonl, .json "
        "or .parquet, also .gz; python: the source files of Python's library (%(default)s)")  # fmt: skip
    add("--column", help="of the text; by default messages (chats), prompt and completion, or text")
    add("--validation-data", metavar="FOLDER", help="default: a part of --data")
    add("--validation-fraction", type=float, default=0.05, help="documents for validation (%(default)s)")
    add("--context", type=int, help="tokens of a sequence (default: the model's, at most 2048)")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank; 0: all weights (%(default)s)")
    add("--epochs", type=int, default=1, help="passes over the documents (%(default)s)")
    add("--max-steps", type=int, help="end after so many steps")
    add("--batch-size", type=int, default=1, help="sequences that a worker computes at once (%(default)s)")
    add("--global-batch-size", type=int, help="sequences of a step (default: 16, or --batch-size of all workers)")
    add("--lr", type=float, help="peak learning rate (default: 1e-5; LoRA 2e-4; from scratch 1e-3)")
    add("--weight-decay", type=float, help="of matrices (default: 0; from scratch 0.1)")
    add("--sharding", choices=("none", "full"), default="none", help="none: DDP; full: FSDP2 (%(default)s)")
    kinds = ("none", "selective", "full")
    add("--activation-checkpointing", choices=kinds, default="none", help="compute again in the backward pass: "
        "all of a layer, or all but matrix products and attention (%(default)s)")  # fmt: skip
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on GPUs that have it")
    add("--compile", action="store_true", help="compile the layers")
    add("--log-every", type=int, default=10, metavar="STEPS", help="log loss and speed (%(default)s)")
    add("--checkpoint-seconds", type=float, default=300.0, help="between checkpoints (%(default)s)")
    add("--seed", type=int, default=0, help="of weights and order (%(default)s)")
    args = parser.parse_args()
    least = dict.fromkeys(("context", "epochs", "max_steps", "batch_size", "global_batch_size", "log_every"), 1.0)
    least |= {"lora": 0, "weight_decay": 0, "validation_fraction": 1e-6, "lr": 1e-9, "checkpoint_seconds": 1}
    for name, limit in least.items():
        value = getattr(args, name)
        if value is not None and not limit <= value < math.inf:
            fail(f"argument --{name.replace('_', '-')}: {value} must be at least {limit:g}")
    if args.validation_fraction > 0.5:
        fail(f"argument --validation-fraction: {args.validation_fraction} must be at most 0.5")
    for name, built_in in (("model", "tiny"), ("data", "python"), ("validation_data", None)):
        value = getattr(args, name)
        if value not in (built_in, None) and "://" not in value and not Path(value).expanduser().exists():
            fail(f"argument --{name.replace('_', '-')}: {value!r} is neither a folder nor s3://bucket/prefix")
    return args


if __name__ == "__main__":
    options = parse()  # before torch is imported, which takes seconds
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less waste
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes share the work instead

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_dataset
from filelock import FileLock
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig

from ray_on_ecs import Checkpointer, DistributedSampler, log, microbatches, progress
from ray_on_ecs.errors import UsageError
from ray_on_ecs.sdk import alive
from ray_on_ecs.storage.filesystem import fetch, upload

say = partial(print, flush=True) if RANK == 0 else lambda *words: None
# Results that selective activation checkpointing saves: of matrix products and attention.
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
OPERATIONS = ("mm", "addmm", "bmm", *(f"_scaled_dot_product_{kind}" for kind in ATTENTION))
SAVED_RESULTS = [getattr(torch.ops.aten, name).default for name in OPERATIONS]


def list_files(address: str, flag: str) -> dict[str, list[str]]:
    """Return the paths of the documents by kind: text, json or parquet, the loaders of datasets."""
    folder = Path(sysconfig.get_path("stdlib") if address == "python" else fetch(os.path.expanduser(address), flag))
    paths = [folder]
    if folder.is_dir():
        paths = sorted(folder.glob("*.py") if address == "python" else folder.rglob("*"))
    files: dict[str, list[str]] = {}
    others: list[str] = []
    for path in paths:
        if not path.is_file() or path.name.startswith("."):
            continue
        kind = KINDS.get(Path(path.name.lower().removesuffix(".gz")).suffix)
        if kind is None:
            others.append(str(path))
        else:
            files.setdefault(kind, []).append(str(path))
    if others:
        say(f"warning: {flag}: files of other kinds are left out: {len(others)}, such as {others[0]}")
    if not files:
        fail(f"argument {flag}: {address!r} has no file whose name ends with {', '.join(KINDS)}, or that and .gz")
    return files


def choose_columns(rows: Dataset, column: str | None, flag: str) -> list[str]:
    """Return the columns of a chat or a text."""
    choices = [[column]] if column else [*CHATS, ["text"]]
    columns = next((columns for columns in choices if set(columns) <= set(rows.column_names)), None)
    if columns is None:
        fail(f"argument {flag}: there is no column {column or 'messages, prompt and completion, or text'}, but "
             f"{', '.join(rows.column_names)}; rename them, or name the one with a text by --column")  # fmt: skip
    for name in columns:
        if columns != ["messages"] and getattr(rows.features[name], "dtype", "") not in ("string", "large_string"):
            fail(f"argument {flag}: the column {name} is not text alone, but {rows.features[name]}")
    return columns


def read_documents(address: str, flag: str, args: argparse.Namespace) -> tuple[Dataset, list[str]]:
    """Read the documents of a folder, one per row, and choose the columns; a text file is one document."""
    files = list_files(address, flag)
    try:
        parts = []
        for kind, paths in files.items():
            # By default the loader for text makes a document of each line.
            options: Any = {"sample_by": "document"} if kind == "text" else {}
            parts.append(
                # Here and below, paths of this disk: nothing is downloaded.
                load_dataset(kind, data_files=paths, split="train", cache_dir=str(CACHE / "datasets"), **options)  # nosec B615
            )
        rows = concatenate_datasets(parts)
    except Exception as error:  # files may be broken in any way
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        fail(f"argument {flag}: {first_fault(files.get('json', [])) or f'{address!r}: {reason}'}")
    columns = choose_columns(rows, args.column, flag)
    full = rows.filter(lambda row: all(row[name] for name in columns), desc="empty documents")
    empty = len(rows) - len(full)
    if empty:
        say(f"warning: {flag}: {empty:,} of {len(rows):,} documents are empty and left out")
    return full, columns


def first_fault(paths: Sequence[str]) -> str | None:
    """Return the first line of JSONL files that is not an object."""
    for path in paths:
        if not path.removesuffix(".gz").endswith(".jsonl"):
            continue
        with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"{path}, line {number} is not an object, such as one with a text"
                except json.JSONDecodeError as cause:
                    return f"{path}, line {number} is not JSON ({cause.msg}); correct it, or take it out"
    return None


def split(rows: Dataset, columns: list[str], args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Return documents for training and for validation; a single text is cut in two."""
    if len(rows) > 1:
        parts = rows.train_test_split(max(1, round(len(rows) * args.validation_fraction)), seed=0)
        return parts["train"], parts["test"]
    text = rows[0][columns[0]] if len(rows) else None
    if not isinstance(text, str):
        fail("argument --data: there are not two documents; give more, or --validation-data")
    cut = round(len(text) * (1 - args.validation_fraction))
    return Dataset.from_dict({columns[0]: [text[:cut]]}), Dataset.from_dict({columns[0]: [text[cut:]]})


def tokenize(row: Mapping[str, Any], tokenizer: Any, columns: list[str]) -> dict[str, Any]:
    """Return a document's tokens, and which of them are learned: all of a text, and of a chat the answers."""
    if columns not in CHATS:
        ids = tokenizer(row[columns[0]], truncation=False)["input_ids"]
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return {"ids": np.asarray(ids, np.int32), "learned": np.ones(len(ids), bool)}
    pair = [{"role": "user", "content": row.get("prompt")}, {"role": "assistant", "content": row.get("completion")}]
    text, answers = render(tokenizer, row["messages"] if columns == ["messages"] else pair)
    if not answers:
        return {"ids": [], "learned": []}
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False)
    learned = [any(a <= start < b for a, b in answers) for start, _ in encoded["offset_mapping"]]
    return {"ids": np.asarray(encoded["input_ids"], np.int32), "learned": np.asarray(learned)}


def render(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as text, by the model's template, and the ranges of the assistant's answers, with their end."""
    template = partial(tokenizer.apply_chat_template, tokenize=False, date_string="26 Jul 2024")
    if not isinstance(messages, list) or not all({"role", "content"} <= dict(turn).keys() for turn in messages):
        raise ValueError(f"messages are a list of {{'role': ..., 'content': ...}}, not {str(messages)[:200]}")
    cleaned: list[dict[str, Any]] = []
    for turn in messages:  # Arrow fills missing keys with None
        cleaned.append({name: value for name, value in turn.items() if value is not None})
    messages = cleaned
    try:
        text = str(template(messages))
        answers = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                # A template may change earlier answers, as Qwen3's does, but not what they say and how they end.
                before = str(template(messages[:number], add_generation_prompt=True)) if number else ""
                says, after = str(message["content"]).strip(), str(template(messages[: number + 1]))
                says = after[after.rfind(says) :]
                position = text.find(says, len(before)) if text.startswith(before) else -1
                if position >= 0:
                    answers.append((len(before), position + len(says)))
    except Exception as cause:  # a template may raise anything
        raise ValueError(f"the chat template refuses a chat ({cause}): {json.dumps(messages)[:200]}") from None
    return text, answers


def pack(rows: Mapping[str, Any], context: int) -> dict[str, list[Any]]:
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


def prepare(rows: Dataset, name: str, tokenizer: Any, columns: list[str], args: argparse.Namespace) -> Dataset:
    """Return sequences of documents, and say what there was; datasets keeps them on the node's disk for later runs."""
    if not len(rows):
        fail(f"argument --data, --validation-data: there are no documents for {name}")
    processes = min(os.cpu_count() or 1, len(rows) // 1000) or None
    one = partial(tokenize, tokenizer=tokenizer, columns=columns)
    form = Features({"ids": List(Value("int32")), "learned": List(Value("bool"))})
    how = {"remove_columns": rows.column_names, "features": form, "writer_batch_size": DOCUMENTS}
    try:
        tokens = rows.map(one, num_proc=processes, **how)
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        fail(f"argument --data: {str(cause).splitlines()[0]}")
    lengths = pc.call_function("list_value_length", [tokens.data.column("ids")]).to_numpy()
    ids, learned = (pc.call_function("list_flatten", [tokens.data.column(name)]) for name in ("ids", "learned"))
    if not pc.call_function("any", [learned]).as_py():
        fail(f"argument --data, --validation-data: there is nothing to learn in the documents for {name}")
    largest = pc.call_function("max", [ids]).as_py()
    if largest >= args.vocab_size:
        fail(f"argument --model: its tokenizer made token {largest}, and its vocab_size is {args.vocab_size}")
    several = partial(pack, context=args.context)
    how |= {"remove_columns": tokens.column_names, "features": Features({**form, "starts": List(Value("int32"))})}
    sequences = tokens.with_format("numpy").map(several, batched=True, batch_size=DOCUMENTS, **how)
    empty = int((lengths == 0).sum())
    more = f"; {empty:,} without an answer of the assistant are left out" if empty else ""
    total = f"{len(rows):,} documents, {lengths.sum():,} tokens, {len(sequences):,} sequences of {args.context}"
    say(f"{name}: {total}{more}")
    return sequences.with_format(None)


def collate(rows: Sequence[Mapping[str, Any]], device: torch.device) -> dict[str, Tensor]:
    """Return a batch: tokens, the learned ones that follow, and positions, by which documents are told apart."""
    ids = torch.tensor([row["ids"] for row in rows])
    learned = torch.tensor([row["learned"] for row in rows])
    positions = torch.arange(ids.shape[1]).repeat(len(rows), 1)
    for number, row in enumerate(rows):
        for start in row["starts"]:
            learned[number, start : start + 1] = False
            positions[number, start:] = torch.arange(ids.shape[1] - start)
    labels = torch.where(learned, ids, IGNORED)[:, 1:]
    batch = {"input_ids": ids[:, :-1], "labels": labels.contiguous(), "position_ids": positions[:, :-1]}
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def load_tokenizer(folder: Path | None, *, pretrained: bool, for_chats: bool) -> Any:
    """Return the model's tokenizer; a model from scratch that has none learns bytes."""
    tokenizer: Any = ByT5Tokenizer(extra_ids=0)
    if folder and (pretrained or (folder / "tokenizer.json").is_file()):
        try:
            tokenizer = cast(Any, AutoTokenizer.from_pretrained(folder))  # nosec B615
        except Exception as cause:  # its files may be broken in any way
            fail(f"argument --model: the tokenizer of {folder} can't be read ({cause})")
    if for_chats and not (tokenizer.chat_template and tokenizer.is_fast):
        fail("argument --model: chats need a tokenizer.json and a chat template; take the model's instruct version")
    return tokenizer


def load_data(args: Any, folder: Path | None, pretrained: bool) -> tuple[Dataset, Dataset, Any]:
    """Return sequences for training and for validation, and the tokenizer."""
    CACHE.mkdir(parents=True, exist_ok=True)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is one line
    if int(os.environ.get("LOCAL_RANK", "0")) or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    say(f"reading the documents of {args.data}, which takes a minute for each gigabyte")
    with FileLock(CACHE / "language-model.lock"):  # one worker of a node does the work, which the others find done
        train, columns = read_documents(args.data, "--data", args)
        if args.validation_data:
            validation, _ = read_documents(args.validation_data, "--validation-data", args)
        else:
            train, validation = split(train, columns, args)
        tokenizer = load_tokenizer(folder, pretrained=pretrained, for_chats=columns in CHATS)
        parts = [prepare(part, name, tokenizer, columns, args)
                 for part, name in ((train, "training"), (validation, "validation"))]  # fmt: skip
    return parts[0], parts[1], tokenizer


def read_config(args: argparse.Namespace) -> tuple[Path | None, Any, bool]:
    """Return the model's folder on this node, its configuration, and whether there are weights."""
    folder, config = None, AutoConfig.for_model("llama", **TINY, eos_token_id=1, bos_token_id=None)
    if args.model != "tiny":
        folder = fetch(os.path.expanduser(args.model), "--model")
        try:
            config = AutoConfig.from_pretrained(folder)  # nosec B615
        except Exception as cause:  # the file may be broken in any way
            fail(f"argument --model: {args.model!r} has no config.json of transformers ({str(cause).splitlines()[0]})")
    if config.get_text_config() is not config or hasattr(config, "quantization_config"):
        fail(f"argument --model: {args.model!r} is quantized, or not of text alone; take a plain language model")
    config.dtype, args.vocab_size = config.dtype or torch.float32, config.vocab_size
    pretrained = folder is not None and any(any(folder.glob(name)) for name in ("*.safetensors", "pytorch_model*.bin"))
    if args.lora and not pretrained:
        fail(f"argument --lora: adapters need a trained model, and {args.model!r} has no weights; leave out --lora")
    return folder, config, pretrained


def build_model(folder: Any, config: Any, args: Any, dtype: torch.dtype, pretrained: bool, empty: bool) -> Any:
    """Build the model on the CPU with pretrained or random weights, or an empty one on the meta device."""
    config = copy.deepcopy(config)  # from_config writes the dtype into it
    try:
        if empty:
            with init_empty_weights(include_buffers=False):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        elif pretrained:
            load: Any = AutoModelForCausalLM.from_pretrained
            model, info = load(folder, config=config, dtype=dtype, output_loading_info=True)
            missing = [*info["missing_keys"], *info["mismatched_keys"]]
            if missing:
                fail(f"argument --model: {args.model!r} has no weights for {missing[0]} of its config.json")
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, LookupError, RuntimeError, ImportError, AttributeError, TypeError) as cause:  # not of a disk
        fail(f"argument --model: {args.model!r} can't be loaded ({str(cause).splitlines()[0]})")
    if args.lora:
        adapters = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters, low_cpu_mem_usage=empty)
        model.peft_config["default"].base_model_name_or_path = args.model
    return model


def build_network(
    args: argparse.Namespace, folder: Path | None, config: Any, pretrained: bool, device: torch.device, bf16: bool
) -> Any:
    """Build the model on this rank's device, or its shards with --sharding full; seed dropout differently per rank."""
    # The weights that are trained are in fp32; with LoRA the frozen ones may be in bf16.
    dtype = config.dtype if args.lora and bf16 else torch.float32
    build = partial(build_model, folder, config, args, dtype, pretrained)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    if args.sharding == "full" and RANKS > 1:
        network = build(True)
        shard(network, build(False).state_dict() if RANK == 0 else {}, bf16)
    else:
        network = build(False).to(device)
    torch.manual_seed(args.seed * 1_000_003 + RANK)
    return network


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers: the list of modules with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def shard(model: Any, weights: dict[str, Any], bf16: bool) -> None:
    """Shard an empty model layer by layer with FSDP2, and broadcast rank 0's weights into the shards."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts = [*layers_of(model), *([] if embedding.weight is head.weight else [embedding, head])]
    for part in [*parts, model]:
        # Also of the whole: without it, a forward pass without a backward one leaves weights unsharded.
        fully_shard(part, mp_policy=policy, reshard_after_forward=True)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    model.tie_weights()  # weights that two modules share have been set twice


class Loss:
    """The sum of the losses of a batch's tokens; the output layer returns it, as the logits of a token take 512 KB."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.head, self.labels = model.get_output_embeddings(), torch.empty(0)
        tokens = torch.arange(8, device=device)[None]
        batch = {"input_ids": tokens, "labels": tokens, "position_ids": tokens}
        with torch.no_grad():
            expected = self(model.eval(), batch)
            self.head.forward = self.in_parts
            if not torch.allclose(self(model, batch), expected, rtol=0.05):
                del self.head.forward
                say("warning: this model changes its logits: those of a whole batch are in memory at once")

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss."""
        self.labels = batch["labels"]
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        return logits if logits.dim() == 0 else self.of(logits.flatten(0, 1), self.labels.flatten())

    def in_parts(self, hidden: Tensor) -> Tensor:
        """Return the loss for hidden states [batch, context, width]; the backward pass computes the logits again."""
        parts = zip(hidden.flatten(0, 1).split(CHUNK), self.labels.flatten().split(CHUNK), strict=True)

        def loss(states: Tensor, labels: Tensor) -> Tensor:
            return self.of(nn.functional.linear(states, self.head.weight, self.head.bias), labels)

        return torch.stack([checkpoint(loss, *part, use_reentrant=False) for part in parts]).sum()

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits [tokens, vocabulary], in fp32."""
        return cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def validate(network: nn.Module, loss_of: Loss, sequences: Dataset, batch_size: int, device: torch.device) -> float:
    """Return the mean loss over the learned tokens; all ranks take part in each round, as a sharded model needs it."""
    network.eval()
    sums = torch.zeros(2, device=device, dtype=torch.float64)
    for first in range(RANK * batch_size, len(sequences) + RANK * batch_size, batch_size * RANKS):
        rows = [sequences[number] for number in range(first, min(first + batch_size, len(sequences)))]
        batch = collate(rows or [{**sequences[0], "learned": [False] * len(sequences[0]["ids"])}], device)
        sums += torch.stack([loss_of(network, batch), (batch["labels"] != IGNORED).sum()])
        alive()
    return mean_loss(sums)


def mean_loss(sums: Tensor) -> float:
    """Return the mean of sums of [losses, learned tokens] over all ranks."""
    sums = sums.clone()
    if RANKS > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).item()


def learning_rate(step: int, steps: int) -> float:
    """Return the fraction of the peak: linear warm-up, then cosine decay to a tenth."""
    rising = WARMUP * steps
    falling = 0.55 + 0.45 * math.cos(math.pi * max(step - rising, 0) / max(steps - rising, 1))
    return min((step + 1) / (rising + 1), falling)


def export(saved: Checkpointer, model: Any, folder: Any, config: Any, tokenizer: Any, lora: bool) -> None:
    """Write model/, which from_pretrained loads, its other files as they came in; with LoRA also adapter/."""
    if not lora:
        saved.export("model/model.safetensors", dtype=config.dtype)
    else:  # all ranks take part in making the weights whole
        whole = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                weight = parameter.detach()
                whole[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight
    if RANK > 0:
        return
    with tempfile.TemporaryDirectory() as temporary:
        made, adapter = Path(temporary, "model"), Path(temporary, "adapter")
        if lora:
            model.peft_config["default"].inference_mode = True
            model.peft_config["default"].save_pretrained(adapter)
            adapters = get_peft_model_state_dict(model, state_dict=whole)
            weights = {name: value.to("cpu").contiguous() for name, value in adapters.items()}
            save_file(weights, adapter / "adapter_model.safetensors")
            base = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=config.dtype)  # nosec B615
            PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(made)
        alive()
        tokenizer.save_pretrained(made)
        config.architectures = config.architectures or [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(made)
        GenerationConfig.from_model_config(config).save_pretrained(made)
        for path in sorted(folder.iterdir()) if folder else ():
            if path.name.startswith(COPIED):
                shutil.copy(path, made)
        upload(Path(temporary), os.environ.get("RUN_URI") or os.getcwd())


def set_defaults(args: argparse.Namespace, config: Any, pretrained: bool, workers: int) -> None:
    """Set the options that depend on the model or the number of workers."""
    if not args.lr:
        fine_tuning_lr = 2e-4 if args.lora else 1e-5
        args.lr = fine_tuning_lr if pretrained else 1e-3
    if args.weight_decay is None:
        args.weight_decay = 0.0 if pretrained else 0.1
    positions = getattr(config, "max_position_embeddings", None) or 2048
    args.context = args.context or min(positions, 2048)
    if args.context > positions:
        fail(f"argument --context: {args.context} is more than the model's {positions} positions")
    args.global_batch_size = args.global_batch_size or max(16, args.batch_size * workers)


def main(args: argparse.Namespace) -> None:
    """Train, validate after each epoch, and export the best weights."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    bf16 = args.precision == "bf16"
    if args.precision == "auto":
        bf16 = is_gpu and torch.cuda.is_bf16_supported(False)
    folder, config, pretrained = read_config(args)
    workers = int(os.environ.get("MAX_WORLD_SIZE", RANKS))  # of a run with --num-workers 1:4, four
    set_defaults(args, config, pretrained, workers)
    training, validation, tokenizer = load_data(args, folder, pretrained)
    if not workers <= args.global_batch_size <= len(training):
        fail(f"argument --global-batch-size: {args.global_batch_size} must be at least {workers}, the workers, and at "
             f"most {len(training)}, the sequences of {args.context} tokens; a smaller --context: more")  # fmt: skip
    steps_per_epoch = len(training) // args.global_batch_size
    steps = min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)
    epochs = math.ceil(steps / steps_per_epoch)
    if is_gpu:
        torch.cuda.set_device(device)
    if RANKS > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo", timeout=timedelta(hours=1))
    sharded = args.sharding == "full" and RANKS > 1
    network = build_network(args, folder, config, pretrained, device, bf16)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16 and not sharded)
    with autocast:
        loss_of = Loss(network, device)
    if args.activation_checkpointing != "none":
        options: dict[str, Any] = {"use_reentrant": False}
        if args.activation_checkpointing == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED_RESULTS)
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if args.compile:
        for layer in layers_of(network):
            layer.compile()
    # FSDP2 would keep whole gradients on each GPU until the last micro-batch: there each one is reduced.
    ddp = DDP(network, gradient_as_bucket_view=True) if RANKS > 1 and not sharded else None
    model = ddp or network
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]  # biases and norms, not decayed
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps=steps))
    sampler = DistributedSampler(training, seed=args.seed)
    saved = Checkpointer(
        model=model,
        optimizer=optimizer,
        state={"schedule": schedule, "sampler": sampler},
        keep_best="validation_loss",
        save_frozen=not args.lora,
        every_seconds=args.checkpoint_seconds,
        config={name: value for name, value in vars(args).items() if name not in FREE},
    )
    saved.resume()
    total = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    trained = sum(parameter.numel() for parameter in parameters) / 1e6
    say(f"{args.model}: {total:,.1f} million weights, {trained:,.2f} trained; {steps} steps of "
        f"{args.global_batch_size} sequences, {RANKS} x {device.type.upper()}, {'bf16' if bf16 else 'fp32'}, peak "
        f"learning rate {args.lr:g}, {saved.step} steps done")  # fmt: skip
    while saved.epoch < epochs and not saved.should_stop:
        began, first, sums = time.perf_counter(), saved.step, torch.zeros(2, device=device, dtype=torch.float64)
        network.train()
        for numbers in islice(sampler.batches(args.global_batch_size), steps - saved.step):
            share = collate([training[number] for number in numbers], device)
            tokens = (share["labels"] != IGNORED).sum()
            all_tokens = tokens.clone()
            if RANKS > 1:
                dist.all_reduce(all_tokens)
            loss = torch.zeros((), device=device)
            for part, _ in microbatches(share, args.global_batch_size, size=args.batch_size, model=ddp):
                with autocast:
                    part_loss = loss_of(model, part)
                (part_loss * (RANKS / all_tokens.clamp(min=1))).backward()  # DDP and FSDP take the mean over the ranks
                loss += part_loss.detach()
            norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            sums += torch.stack([loss, tokens])
            if saved.after_step(samples=args.global_batch_size):
                break
            progress(saved.step, steps)
            if saved.step % args.log_every == 0 or saved.step == steps:
                mean = mean_loss(sums)
                size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                speed = (saved.step - first) * args.global_batch_size * args.context / (time.perf_counter() - began)
                metrics: dict[str, Any] = {"loss": mean, "perplexity": math.exp(min(mean, 100)), "gradient_norm": size,
                           "learning_rate": schedule.get_last_lr()[0], "tokens_per_second": speed}  # fmt: skip
                log(**metrics)
                say(f"step {saved.step}/{steps}", *(f" {name} {value:.4g}" for name, value in metrics.items()))
                if not math.isfinite(mean + size):
                    fail(f"the loss of step {saved.step} is not finite; lower --lr, now {args.lr:g}")
                began, first = time.perf_counter(), saved.step
                sums.zero_()
        if not saved.should_stop:
            with autocast:
                mean = validate(network, loss_of, validation, args.batch_size, device)
            metrics = {"validation_loss": mean, "validation_perplexity": math.exp(min(mean, 100))}
            say(f"epoch {saved.epoch + 1}/{epochs}", *(f" {name} {value:.4g}" for name, value in metrics.items()))
            saved.end_epoch(**metrics)
    if not saved.should_stop:
        saved.load_best()
        say("writing the weights with the lowest validation loss to model/")
        export(saved, network, folder, config, tokenizer, bool(args.lora))
    saved.close()
    if RANKS > 1:
        dist.barrier()  # rank 0 may still write
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(options)
    except UsageError as cause:
        fail(f"argument {cause}")
