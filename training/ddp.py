"""One model on several ranks: DistributedDataParallel, and the gradients on the wire."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from training.config import TrainingConfig
from training.watch import Watch


def all_have_bf16(device: torch.device) -> bool:
    """Whether every rank's GPU computes in bf16, as NVIDIA's of the Ampere generation (A10G, A100) and later do."""
    has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if not dist.is_initialized():
        return has
    ranks = torch.tensor(int(has), device=device)
    dist.all_reduce(ranks, dist.ReduceOp.MIN)
    return bool(ranks)


def replicate(model: nn.Module, config: TrainingConfig, device: torch.device, bf16: bool, watch: Watch) -> nn.Module:
    """The model, with gradients that are the mean over all ranks; `watch` hears when they are sent.

    They are sent in bf16 if `bf16`, unless the config says otherwise. Buffers are each rank's own: norm.py shares them
    before they are used.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    # Where a worker has several shares of a step, all but the last are held back, which a static graph can't.
    static = config.static_graph == "on" and config.shares(dist.get_world_size()) == dist.get_world_size()
    replicated = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        static_graph=static,
        find_unused_parameters=not static,
    )
    in_bf16 = bf16 if config.gradient_dtype == "auto" else config.gradient_dtype == "bf16"
    exchange = bf16_compress_hook if in_bf16 else allreduce_hook

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        watch.ready()
        return exchange(group, bucket)

    replicated.register_comm_hook(dist.group.WORLD, hook)
    return replicated
