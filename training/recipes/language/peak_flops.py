"""What GPUs can compute: dense products of bf16 matrices with fp32 sums, by NVIDIA's data sheets."""

from __future__ import annotations

import torch

# TFLOP/s by a word of the device's name; the first one that fits counts. Of an H100 the SXM module's, which AWS has.
PEAK_TFLOPS = {"B300": 2500, "B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10G": 70}


def peak_flops(device: torch.device) -> float | None:
    """Return the floating-point operations per second that a device can do in bf16, or None if that isn't known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * tflops for word, tflops in PEAK_TFLOPS.items() if word in name), None)
