"""One model on several ranks: DistributedDataParallel, and the gradients on the wire."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from training.config import TrainingConfig
from training.watch import Watch


def has_bf16(device: torch.device) -> bool:
    """Whether this is a GPU that computes in bf16: NVIDIA's of the Ampere generation (A10G, A100) or later."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def replicate(model: nn.Module, config: TrainingConfig, device: torch.device, watch: Watch) -> nn.Module:
    """The model, with gradients that are the mean over all ranks; `watch` hears when they are sent.

    Its buffers are each rank's own: batch norm's are averaged before they are used (norm.py).
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    static = config.static_graph == "on"
    replicated = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        static_graph=static,
        find_unused_parameters=not static,
    )
    auto = "bf16" if has_bf16(device) else "fp32"
    dtype = auto if config.gradient_dtype == "auto" else config.gradient_dtype
    exchange = bf16_compress_hook if dtype == "bf16" else allreduce_hook

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        watch.ready()
        return exchange(group, bucket)

    replicated.register_comm_hook(dist.group.WORLD, hook)
    return replicated
