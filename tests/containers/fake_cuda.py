"""Python's sitecustomize in the containers: where FAKE_CUDA is set, a CUDA driver with one GPU.

FAKE_CUDA is the number that cuInit returns, or a file with that number; without the file the GPU works.
"""

import ctypes
import os
import sys
from pathlib import Path


class Driver:
    """The driver."""

    def cuInit(self, flags: int) -> int:
        """Return the status."""
        value = os.environ["FAKE_CUDA"]
        if value.isdigit():
            return int(value)
        return int(Path(value).read_text()) if Path(value).exists() else 0

    def cuDeviceGetCount(self, count: object) -> int:
        """Count one GPU."""
        count._obj.value = 1  # ty: ignore[missing-attribute]
        return 0


if os.environ.get("FAKE_CUDA"):
    load = ctypes.CDLL

    def load_or_fake(name: str, *given: object, **named: object) -> object:
        """Load a library, or return the driver."""
        return Driver() if name == "libcuda.so.1" else load(name, *given, **named)  # ty: ignore[invalid-argument-type]

    setattr(ctypes, "CDLL", load_or_fake)  # noqa: B010

    if "ray_on_ecs.node.gpus" in sys.orig_argv:  # the process of the check multiplies on the CPU
        import torch

        ones = torch.ones
        setattr(torch.cuda, "device_count", lambda: 1)  # noqa: B010
        setattr(torch, "ones", lambda *size, device: ones(*size))  # noqa: B010
