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

    def load_or_fake(name: str, *given: object, **named: object) -> object:
        """Load a library, or return the driver."""
        return Driver() if name == "libcuda.so.1" else load(name, *given, **named)  # ty: ignore[invalid-argument-type]

    setattr(ctypes, "CDLL", load_or_fake)  # noqa: B010
