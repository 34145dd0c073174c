"""One model on several ranks: DistributedDataParallel, and the dtype in which gradients are exchanged."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from training.engine.config import TrainingConfig
from training.engine.step_timer import StepTimer


@dataclass(frozen=True)
class PendingBucket:
    """A bucket of gradients that is being all-reduced in bf16, and the future of its fp32 gradients."""

    work: dist.Work
    compressed: Tensor
    gradients: Tensor
    future: torch.futures.Future[Tensor]

    def finish(self) -> None:
        """Wait for the all-reduce and copy the result back."""
        self.work.wait()
        self.future.set_result(self.gradients.copy_(self.compressed))


def all_have_bf16(device: torch.device) -> bool:
    """Return whether every rank's GPU computes in bf16, as NVIDIA's since the Ampere generation (A10G, A100) do."""
    has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if not dist.is_initialized():
        return has
    ranks = torch.tensor(int(has), device=device)
    dist.all_reduce(ranks, dist.ReduceOp.MIN)
    return bool(ranks)


def wrap_ddp(
    model: nn.Module,
    config: TrainingConfig,
    device: torch.device,
    *,
    bf16: bool,
    timer: StepTimer,
    accumulates: bool = False,
) -> nn.Module:
    """Return the model with gradients that are the mean over all ranks, or the model itself on a single rank.

    Buffers stay each rank's own.

    Args:
        model: The model, on its device.
        config: The run's settings.
        device: The device.
        bf16: Whether `--gradient-dtype auto` exchanges gradients in bf16.
        timer: Is told when gradients are ready.
        accumulates: Whether a step has several micro-batches on each worker, beside those of workers that are missing.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    # A worker with several micro-batches accumulates all but the last under `no_sync`, which DDP's static graph can't:
    # https://github.com/pytorch/pytorch/issues/187732
    one_each = config.microbatches(dist.get_world_size()) == dist.get_world_size()
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        static_graph=one_each and not accumulates,
    )
    in_bf16 = bf16 if config.gradient_dtype == "auto" else config.gradient_dtype == "bf16"
    if in_bf16 and device.type == "cuda":
        ddp_model.register_comm_hook(None, bf16_compress_hook)
    elif in_bf16:
        ddp_model.register_comm_hook([], _all_reduce_in_bf16)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    register_multi_grad_hook(parameters, lambda _: timer.gradients_ready())
    return ddp_model


def _all_reduce_in_bf16(pending: list[PendingBucket], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Do what `bf16_compress_hook` does, but without a Python function that Gloo's threads would run.

    Such a thread releases the function that a future's `then` was given after running it, and needs the interpreter's
    lock for that. If the process is about to end, it never gets the lock, and C++ ends the process with SIGABRT. This
    happened at the end of runs that had trained well. NCCL runs the function in the thread that calls the hook. With
    the last bucket nothing is left to compute, so this thread waits for all of them.
    """
    gradients = bucket.buffer()
    compressed = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    pending.append(PendingBucket(dist.all_reduce(compressed, async_op=True), compressed, gradients, future))
    if bucket.is_last():
        for each in pending:
            each.finish()
        pending.clear()
    return future
