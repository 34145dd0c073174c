"""Causal language models of transformers: read from a folder or bucket, built, sharded and exported.

Their errors are one line, as they come from files of the user.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig

from ray_on_ecs import Checkpointer
from ray_on_ecs.recipes import document_attention
from ray_on_ecs.recipes.documents import fetch_folder
from ray_on_ecs.recipes.options import fail
from ray_on_ecs.recipes.ranks import Ranks, choice_of_rank_0, rank_in_environment, sum_over_ranks
from ray_on_ecs.recipes.token_loss import TokenLoss, base_model, has_plain_logits
from ray_on_ecs.sdk import alive
from ray_on_ecs.storage.filesystem import upload

TINY = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
COPIED = ("config.json", "generation_config", "tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_")
# Results that selective activation checkpointing keeps: of matrix products and attention.
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
OPERATIONS = ("mm", "addmm", "bmm", *(f"_scaled_dot_product_{name}" for name in ATTENTION))
KEPT_RESULTS = [
    *(getattr(torch.ops.aten, name).default for name in OPERATIONS),
    torch.ops.torch_attn._varlen_attn.default,
]


@dataclass(frozen=True)
class ModelFiles:
    """Files of a model on this node: `folder` is None for `tiny`, a small Llama that is trained from scratch."""

    address: str
    folder: Path | None
    config: Any
    has_weights: bool

    @property
    def context(self) -> int:
        """Return the largest number of tokens of a sequence."""
        return getattr(self.config, "max_position_embeddings", None) or 2048


def read_model(address: str, *, lora: bool = False) -> ModelFiles:
    """Return the files of a model in Hugging Face's layout, of a folder or an `s3://bucket/prefix`, or `tiny`."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, config = None, AutoConfig.for_model("llama", **TINY, eos_token_id=1, bos_token_id=None)
    if address != "tiny":
        folder = fetch_folder(address, "--model")
        try:
            config = AutoConfig.from_pretrained(folder)  # nosec B615
        except Exception as cause:  # the file may be broken in any way
            fail(f"argument --model: {address!r} has no config.json of transformers ({str(cause).splitlines()[0]})")
    if config.get_text_config() is not config or hasattr(config, "quantization_config"):
        fail(f"argument --model: {address!r} is quantized, or not of text alone; take a plain language model")
    config.dtype = config.dtype or torch.float32
    has_weights = folder is not None and any(any(folder.glob(name)) for name in ("*.safetensors", "pytorch_model*.bin"))
    if lora and not has_weights:
        fail(f"argument --lora: adapters need a trained model, and {address!r} has no weights; leave out --lora")
    return ModelFiles(address, folder, config, has_weights)


def load_tokenizer(files: ModelFiles, *, for_chats: bool) -> Any:
    """Return the model's tokenizer; a model from scratch that has none learns bytes."""
    tokenizer: Any = ByT5Tokenizer(extra_ids=0)
    folder = files.folder
    if folder and (files.has_weights or (folder / "tokenizer.json").is_file()):
        try:
            tokenizer = cast(Any, AutoTokenizer.from_pretrained(folder))  # nosec B615
        except Exception as cause:  # its files may be broken in any way
            fail(f"argument --model: the tokenizer of {folder} can't be read ({cause})")
    if for_chats and not (tokenizer.chat_template and tokenizer.is_fast):
        fail("argument --model: chats need a tokenizer.json and a chat template; take the model's instruct version")
    return tokenizer


def load_model(
    files: ModelFiles, ranks: Ranks, *, lora: int = 0, bf16: bool = False, shard: bool = False, attention: str = "auto"
) -> tuple[Any, TokenLoss]:
    """Return the model on this rank's device, or its shards, and the module that computes its loss.

    Args:
        files: The model's files.
        ranks: This rank.
        lora: The rank of adapters, or 0.
        bf16: The computation is in bf16. Trained weights are in fp32; with LoRA the frozen ones may be in bf16.
        shard: Shard the model with FSDP2.
        attention: `masks`, or `auto` for variable-length attention on GPUs that have it.
    """
    build = partial(build_model, files, lora=lora, dtype=files.config.dtype if lora and bf16 else torch.float32)
    whole = build() if ranks.rank == 0 or not shard else None
    is_plain, fault = choice_of_rank_0(lambda: (has_plain_logits(whole), _attention_fault(whole)))
    if not is_plain and ranks.rank == 0:
        print("warning: this model changes its logits: those of a whole micro-batch are in memory at once", flush=True)
    can_attend = attention == "auto" and bf16 and _gpus_attend(files, ranks, fault)
    model = build(on_meta=True) if shard else whole
    if can_attend:
        base_model(model).set_attn_implementation(document_attention.ATTENTION)
    loss_of = TokenLoss(model, is_plain=is_plain, attends_within_documents=can_attend)
    if shard:
        shard_model(loss_of, model, whole.state_dict() if whole is not None else {}, bf16=bf16)
    return model, loss_of.to(ranks.device)


def build_model(files: ModelFiles, *, lora: int, dtype: torch.dtype, on_meta: bool = False) -> Any:
    """Build the model on the CPU with pretrained or random weights, or an empty one on the meta device."""
    config = copy.deepcopy(files.config)  # from_config writes the dtype into it
    try:
        if on_meta:
            with init_empty_weights(include_buffers=False):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        elif files.has_weights:
            load: Any = AutoModelForCausalLM.from_pretrained
            model, info = load(files.folder, config=config, dtype=dtype, output_loading_info=True)
            if missing := [*info["missing_keys"], *info["mismatched_keys"]]:
                fail(f"argument --model: {files.address!r} has no weights for {missing[0]} of its config.json")
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, LookupError, RuntimeError, ImportError, AttributeError, TypeError) as cause:  # not of a disk
        fail(f"argument --model: {files.address!r} can't be loaded ({str(cause).splitlines()[0]})")
    if lora:
        adapters = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters, low_cpu_mem_usage=on_meta)
        model.peft_config["default"].base_model_name_or_path = files.address
    return model


def shard_model(loss_of: TokenLoss, model: Any, weights: dict[str, Any], *, bf16: bool) -> None:
    """Shard an empty model layer by layer with FSDP2, and broadcast rank 0's weights into the shards."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    base = base_model(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    # Tied weights belong to the whole. Otherwise FSDP2 gathers each of them only where a module's forward uses it.
    ends = [] if embedding.weight is head.weight else [embedding, loss_of.head or head]
    for part in [*layers_of(model), *ends, loss_of]:
        # Also of the whole: without it, a forward pass without a backward one leaves weights unsharded.
        fully_shard(part, mp_policy=policy, reshard_after_forward=True)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    base.tie_weights()  # weights that two modules share have been set twice


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers: the list of modules with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def checkpoint_activations(model: Any, *, selective: bool) -> None:
    """Compute activations again in the backward pass: all of a layer, or all but matrix products and attention."""
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT_RESULTS)
    base_model(model).activation_checkpointing_enable(activation_checkpointing_kwargs=options)


def export(saved: Checkpointer, model: Any, files: ModelFiles, tokenizer: Any) -> None:
    """Write model/, which from_pretrained loads, with copies of its other files; with LoRA also adapter/.

    All ranks take part. The folders are in the run's folder, and outside a run in the working directory.
    """
    is_lora = isinstance(model, PeftModel)
    trained: dict[str, Tensor] = {}
    if not is_lora:
        saved.export("model/model.safetensors", dtype=files.config.dtype)
    else:  # all ranks take part in making the weights whole
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                weight = parameter.detach()
                trained[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight
    if rank_in_environment() > 0:
        return
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary, "model")
        if is_lora:
            _write_adapters(model, trained, files, Path(temporary))
        alive()
        tokenizer.save_pretrained(target)
        config = files.config
        config.architectures = config.architectures or [type(model).__name__]
        config.save_pretrained(target)
        GenerationConfig.from_model_config(config).save_pretrained(target)
        for path in sorted(files.folder.iterdir()) if files.folder else ():
            if path.name.startswith(COPIED):
                shutil.copy(path, target)
        upload(Path(temporary), os.environ.get("RUN_URI") or os.getcwd())


def _write_adapters(model: Any, trained: dict[str, Tensor], files: ModelFiles, folder: Path) -> None:
    """Write adapter/, and model/ with the adapters merged into the weights."""
    model.peft_config["default"].inference_mode = True
    model.peft_config["default"].save_pretrained(folder / "adapter")
    adapters = get_peft_model_state_dict(model, state_dict=trained)
    weights = {name: value.to("cpu").contiguous() for name, value in adapters.items()}
    save_file(weights, folder / "adapter" / "adapter_model.safetensors")
    load: Any = AutoModelForCausalLM.from_pretrained
    base = load(files.folder, config=files.config, dtype=files.config.dtype)
    PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().save_pretrained(folder / "model")


def _attention_fault(model: Any) -> str | None:
    """Return the reason why a model can't attend within documents without masks; nothing is checked without a GPU."""
    return document_attention.fault_of_model(base_model(model)) if torch.cuda.is_available() else None


def _gpus_attend(files: ModelFiles, ranks: Ranks, fault: str | None) -> bool:
    """Return True if the GPUs of all ranks have variable-length attention for this model, which has this fault."""
    if ranks.device.type != "cuda":
        return False
    fault = fault or document_attention.fault_of_gpu(files.config, ranks.device)
    if fault:
        print(f"warning: rank {ranks.rank}: masks instead of variable-length attention: {fault}", flush=True)
    return not sum_over_ranks(torch.tensor(1 if fault else 0, device=ranks.device)).item()
