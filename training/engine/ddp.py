"""One model on several ranks: DistributedDataParallel, and the gradients on the wire."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from training.engine.config import TrainingConfig
from training.engine.step_timer import StepTimer

# A bucket on its way: the exchange, what is exchanged, the gradients that it becomes, and who waits for them.
Sent = tuple[dist.Work, Tensor, Tensor, torch.futures.Future[Tensor]]


def all_have_bf16(device: torch.device) -> bool:
    """Whether every rank's GPU computes in bf16, as NVIDIA's of the Ampere generation (A10G, A100) and later do."""
    has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if not dist.is_initialized():
        return has
    ranks = torch.tensor(int(has), device=device)
    dist.all_reduce(ranks, dist.ReduceOp.MIN)
    return bool(ranks)


def wrap_ddp(model: nn.Module, config: TrainingConfig, device: torch.device, bf16: bool, timer: StepTimer) -> nn.Module:
    """The model, with gradients that are the mean over all ranks; `watch` hears when they are sent.

    They are sent in bf16 if `bf16`, unless the config says otherwise. Buffers are each rank's own: norm.py shares them
    before they are used.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    # Where a worker has several shares of a step, all but the last are held back, which a static graph can't.
    static = config.static_graph == "on" and config.microbatches(dist.get_world_size()) == dist.get_world_size()
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        static_graph=static,
        find_unused_parameters=not static,
    )
    in_bf16 = bf16 if config.gradient_dtype == "auto" else config.gradient_dtype == "bf16"
    if in_bf16 and device.type == "cuda":
        ddp_model.register_comm_hook(None, bf16_compress_hook)
    elif in_bf16:
        ddp_model.register_comm_hook([], _all_reduce_in_bf16)
    register_multi_grad_hook(
        [each for each in model.parameters() if each.requires_grad], lambda _: timer.gradients_ready()
    )
    return ddp_model


def _all_reduce_in_bf16(sent: list[Sent], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """As `bf16_compress_hook`, but without a Python function that Gloo's threads would run.

    Such a thread lets go of the function that a future's `then` was given after it has run it, and needs the
    interpreter's lock for that. If the process is about to end it never gets the lock, and C++ ends the process with
    SIGABRT instead: seen at the end of runs that had trained well. NCCL runs the function in the thread that calls the
    hook. With the last bucket, nothing is left to compute, so this thread waits for all of them.
    """
    gradients = bucket.buffer()
    compressed = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    exchanged: torch.futures.Future[Tensor] = torch.futures.Future()
    sent.append((dist.all_reduce(compressed, async_op=True), compressed, gradients, exchanged))
    while bucket.is_last() and sent:
        work, received, into, done = sent.pop(0)
        work.wait()
        done.set_result(into.copy_(received))
    return exchanged
