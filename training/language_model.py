"""A causal language model of transformers: fine-tuned, with LoRA or in full, or trained from scratch.

    ray-on-ecs run language_model.py --model s3://my-bucket/Qwen3-8B --data s3://my-bucket/chats --sharding full
    ray-on-ecs run language_model.py --model ./SmolLM2-135M --data ./texts --lora 16

--model is a folder or bucket prefix in Hugging Face's layout; with only a config.json the training starts from scratch.
For another size let LlamaConfig(vocab_size=259, ...).save_pretrained(FOLDER) write one, which learns bytes.
The run writes model/, which from_pretrained loads. Order and steps depend only on seed and global batch size, not on
the number of workers. Copy the file (ray-on-ecs recipe copy language_model) and change it.
"""

from __future__ import annotations

import math
import os
import sys
import time
from argparse import Namespace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from ray_on_ecs import Checkpointer, DistributedSampler, log, microbatches, progress
from ray_on_ecs.recipes.batch_size import find_batch_size
from ray_on_ecs.recipes.documents import collate, learned_tokens, pack, read_documents, to_device
from ray_on_ecs.recipes.language_models import (
    checkpoint_activations,
    export,
    layers_of,
    load_model,
    load_tokenizer,
    read_model,
)
from ray_on_ecs.recipes.options import Options, fail, number, source, whole
from ray_on_ecs.recipes.ranks import Ranks, end_ranks, largest_world_size, start_ranks, sum_over_ranks

WARMUP, CLIP_NORM = 0.05, 1.0  # fraction of the steps, and largest norm of the gradients
# Options that may differ when a run resumes, because they change at most the rounding.
FREE = ("compile", "precision", "batch_size", "sharding", "activation_checkpointing", "attention", "log_every",
        "checkpoint_seconds")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Options


def parse() -> Namespace:
    """Return the options."""
    parser = Options(__doc__)
    add = parser.add_argument
    add("--model", default="tiny", type=source("tiny"), help="folder or s3://bucket/prefix; tiny: a small Llama, from "
        "scratch (%(default)s)")  # fmt: skip
    add("--data", default="python", type=source("python", or_file=True), metavar="FOLDER|FILE", help="or "
        "s3://bucket/prefix, with .txt, .md, .jsonl, .json or .parquet, also .gz; python: the files of Python's "
        "library (%(default)s)")  # fmt: skip
    add("--column", help="of the text; by default messages (chats), prompt and completion, or text")
    add("--validation-data", type=source(or_file=True), metavar="FOLDER|FILE", help="default: a part of --data")
    add("--validation-fraction", type=number(1e-6, 0.5), default=0.05, help="documents for validation (%(default)s)")
    add("--context", type=whole(), help="tokens of a sequence (default: the model's, at most 2048)")
    add("--lora", type=whole(0), default=0, metavar="RANK", help="train adapters of this rank; 0: all weights "
        "(%(default)s)")  # fmt: skip
    add("--epochs", type=whole(), default=1, help="passes over the documents (%(default)s)")
    add("--max-steps", type=whole(), default=sys.maxsize, help="end after so many steps")
    add("--batch-size", type=whole(), help="sequences that a worker computes at once (default: as many as fit on a "
        "GPU, and 1 on a CPU)")  # fmt: skip
    add("--global-batch-size", type=whole(), help="sequences of a step (default: 16, or --batch-size of all workers)")
    add("--lr", type=number(above=0), help="peak learning rate (default: 1e-5; LoRA 2e-4; from scratch 1e-3)")
    add("--weight-decay", type=number(), help="of matrices (default: 0; from scratch 0.1)")
    add("--sharding", choices=("none", "full"), default="none", help="none: DDP; full: FSDP2 (%(default)s)")
    kinds = ("none", "selective", "full")
    add("--activation-checkpointing", choices=kinds, default="none", help="compute again in the backward pass: "
        "all of a layer, or all but matrix products and attention (%(default)s)")  # fmt: skip
    add("--attention", choices=("auto", "masks"), default="auto", help="auto: flash attention within documents on "
        "GPUs that have it (%(default)s)")  # fmt: skip
    add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help="auto: bf16 on GPUs that have it")
    add("--compile", action="store_true", help="compile the layers")
    add("--log-every", type=whole(), default=10, metavar="STEPS", help="log loss and speed (%(default)s)")
    add("--checkpoint-seconds", type=number(1), default=300.0, help="between checkpoints (%(default)s)")
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of weights and order (%(default)s)")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the training: the schedule, and the validation


def learning_rate(step: int, steps: int) -> float:
    """Return the fraction of the peak: linear warm-up, then cosine decay to a tenth."""
    rising = WARMUP * steps
    falling = 0.55 + 0.45 * math.cos(math.pi * max(step - rising, 0) / max(steps - rising, 1))
    return min((step + 1) / (rising + 1), falling)


@torch.no_grad()
def validate(loss_of: nn.Module, sequences: Any, batch_size: int, ranks: Ranks, alive: Any) -> float:
    """Return the mean loss over the learned tokens of all ranks; rank r of n has every n-th batch."""
    loss_of.eval()
    sums = torch.zeros(2, device=ranks.device, dtype=torch.float64)
    for first in range(0, len(sequences), batch_size * ranks.world_size):
        start = first + ranks.rank * batch_size
        rows = [sequences[index] for index in range(start, min(start + batch_size, len(sequences)))]
        # A rank without a last batch takes part with nothing to learn, as a sharded model needs all ranks.
        batch = collate(rows or [{**sequences[0], "learned": np.zeros_like(sequences[0]["learned"])}])
        sums[0] += loss_of(**to_device(batch, ranks.device))
        sums[1] += learned_tokens(batch)
        alive()
    return mean_loss(sums)


def mean_loss(sums: Tensor) -> float:
    """Return the mean of all ranks' sums of [losses, learned tokens]."""
    losses, tokens = sum_over_ranks(sums).tolist()
    return losses / max(tokens, 1)


def main() -> None:
    """Train, validate after each epoch, and export the best weights."""
    args = parse()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # fewer gaps between tensors of a GPU

    # -----------------------------------------------------------------------------------------------------------------
    # Data: documents, tokenized and packed into sequences of --context tokens

    files = read_model(args.model, lora=args.lora > 0)
    args.context = args.context or min(files.context, 2048)
    if args.context > files.context:
        fail(f"argument --context: {args.context} is more than the model's {files.context} positions")
    documents = read_documents(
        args.data, args.validation_data, column=args.column, validation_fraction=args.validation_fraction
    )
    tokenizer = load_tokenizer(files, for_chats=documents.are_chats)
    training, validation = pack(documents, tokenizer, context=args.context, vocab_size=files.config.vocab_size)

    # -----------------------------------------------------------------------------------------------------------------
    # Steps: a global batch is the same for any number of ranks, so that a run with fewer learns the same

    ranks = start_ranks()
    rank, world_size, device = ranks
    print0 = partial(print, flush=True) if rank == 0 else lambda *words: None
    is_gpu = device.type == "cuda"
    most_ranks = largest_world_size()
    args.global_batch_size = args.global_batch_size or max(16, (args.batch_size or 1) * most_ranks)
    if not most_ranks <= args.global_batch_size <= len(training):
        fail(f"argument --global-batch-size: {args.global_batch_size} must be at least {most_ranks}, the workers, and "
             f"at most {len(training)}, the sequences of {args.context} tokens; a shorter --context: more")  # fmt: skip
    steps_per_epoch = len(training) // args.global_batch_size
    steps = min(args.epochs * steps_per_epoch, args.max_steps)
    epochs = math.ceil(steps / steps_per_epoch)

    # -----------------------------------------------------------------------------------------------------------------
    # Model: weights in fp32, computation in bf16 where the GPU has it

    bf16 = args.precision == "bf16" or (args.precision == "auto" and is_gpu and torch.cuda.is_bf16_supported(False))
    sharded = args.sharding == "full" and world_size > 1
    torch.manual_seed(args.seed)  # the same weights on all ranks
    # loss_of is a module, recipes.token_loss.TokenLoss: a batch's sum of the losses of its learned tokens.
    model, loss_of = load_model(files, ranks, lora=args.lora, bf16=bf16, shard=sharded, attention=args.attention)
    torch.manual_seed(args.seed * 1_000_003 + rank)  # other dropout on each rank
    # FSDP2 has a policy of precision instead, with which it also gathers the weights in bf16.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16 and not sharded)
    if args.activation_checkpointing != "none":
        checkpoint_activations(model, selective=args.activation_checkpointing == "selective")
    parameters = [parameter for parameter in loss_of.parameters() if parameter.requires_grad]

    def trial(size: int) -> Tensor:
        """Return the loss of a batch of this size, each of whose sequences has two documents, as masks take memory."""
        rows = [{**training[index], "starts": [0, args.context // 2]} for index in range(size)]
        with autocast:
            return loss_of(**to_device(collate(rows), device))

    # Before the layers are compiled, which would be done again for each size.
    share = -(-args.global_batch_size // world_size)
    batch_size = args.batch_size or (find_batch_size(trial, parameters, share, device) if is_gpu else 1)
    if args.compile:
        for layer in layers_of(model):
            layer.compile()
    # FSDP2 would keep whole gradients on each GPU until the last micro-batch: there each one is reduced.
    ddp = DDP(loss_of, gradient_as_bucket_view=True) if world_size > 1 and not sharded else None

    # -----------------------------------------------------------------------------------------------------------------
    # Optimizer: AdamW, without decay of biases and norms

    if args.lr is None:
        fine_tuning_lr = 2e-4 if args.lora else 1e-5
        args.lr = fine_tuning_lr if files.has_weights else 1e-3
    if args.weight_decay is None:
        args.weight_decay = 0.0 if files.has_weights else 0.1
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps=steps))

    # -----------------------------------------------------------------------------------------------------------------
    # Checkpoints: the same command resumes after the last saved step

    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(
        training, batch_sampler=sampler.batches(args.global_batch_size), collate_fn=collate, pin_memory=is_gpu
    )
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
    total = sum(parameter.numel() for parameter in loss_of.parameters()) / 1e6
    trained = sum(parameter.numel() for parameter in parameters) / 1e6
    print0(f"{args.model}: {total:,.1f} million weights, {trained:,.2f} trained; {steps} steps of "
           f"{args.global_batch_size} sequences, {batch_size} at once, {world_size} x {device.type.upper()}, "
           f"{'bf16' if bf16 else 'fp32'}, peak learning rate {args.lr:g}, {saved.step} steps done")  # fmt: skip

    # -----------------------------------------------------------------------------------------------------------------
    # Training

    while saved.epoch < epochs and not saved.should_stop:
        loss_of.train()
        began, first, sums = time.perf_counter(), saved.step, torch.zeros(2, device=device, dtype=torch.float64)
        for batch in islice(loader, steps - saved.step):
            # The weights make the gradients those of the mean over all learned tokens of the global batch.
            for part, weight in microbatches(
                batch, args.global_batch_size, size=batch_size, model=ddp, count=learned_tokens
            ):
                with autocast:
                    loss = (ddp or loss_of)(**to_device(part, device))
                tokens = learned_tokens(part)
                (weight / max(tokens, 1) * loss).backward()
                sums[0] += loss.detach()
                sums[1] += tokens
            norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if saved.after_step(samples=args.global_batch_size):
                break  # the node is being reclaimed
            progress(saved.step, steps)
            # A GPU has to finish its work before these numbers are known, so not in each step.
            if saved.step % args.log_every == 0 or saved.step == steps:
                mean = mean_loss(sums)
                size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                speed = (saved.step - first) * args.global_batch_size * args.context / (time.perf_counter() - began)
                metrics = {"loss": mean, "perplexity": math.exp(min(mean, 100)), "gradient_norm": size,
                           "learning_rate": schedule.get_last_lr()[0], "tokens_per_second": speed}  # fmt: skip
                log(**metrics)
                print0(f"step {saved.step}/{steps}", *(f" {name} {value:.4g}" for name, value in metrics.items()))
                if not math.isfinite(mean + size):
                    fail(f"the loss of step {saved.step} is not finite; lower --lr, now {args.lr:g}")
                began, first = time.perf_counter(), saved.step
                sums.zero_()
        if not saved.should_stop:
            with autocast:
                mean = validate(loss_of, validation, batch_size, ranks, partial(progress, saved.step, steps))
            metrics = {"validation_loss": mean, "validation_perplexity": math.exp(min(mean, 100))}
            print0(f"epoch {saved.epoch + 1}/{epochs}", *(f" {name} {value:.4g}" for name, value in metrics.items()))
            saved.end_epoch(**metrics)

    # -----------------------------------------------------------------------------------------------------------------
    # Result: model/, which from_pretrained loads, and with --lora adapter/

    if not saved.should_stop:
        saved.load_best()
        print0("writing the weights with the lowest validation loss to model/")
        export(saved, model, files, tokenizer)
    saved.close()
    end_ranks()


if __name__ == "__main__":
    main()
