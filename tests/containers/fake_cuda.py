"""Python's sitecustomize in the containers: where FAKE_CUDA is set, a CUDA driver whose cuInit returns that number."""

import ctypes
import os

if status := os.environ.get("FAKE_CUDA"):
    load = ctypes.CDLL

    class Driver:
        """The driver."""

        def cuInit(self, flags: int) -> int:
            """Fail."""
            return int(str(status))

    ctypes.CDLL = lambda name, *given, **named: Driver() if name == "libcuda.so.1" else load(name, *given, **named)
