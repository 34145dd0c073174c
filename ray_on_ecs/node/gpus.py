"""Checks of the GPUs that the task requested: do they compute, before the node joins, and are they there, from then on.

The first check runs in its own process, `python -m ray_on_ecs.node.gpus 4`: it leaves no CUDA context behind in this
one, and it can be abandoned if a GPU hangs.
"""

import ctypes
import subprocess
import sys
from contextlib import suppress

from ray_on_ecs.errors import counted
from ray_on_ecs.node.errors import GpuError

TIMEOUT_SECONDS = 120.0
CHECK = (sys.executable, "-m", "ray_on_ecs.node.gpus")
DRIVER = "libcuda.so.1"
SIDE = 256


def check(expected: int) -> None:
    """Check that this many GPUs compute.

    Raises:
        GpuError: A GPU is missing, computes wrongly, or hangs for `TIMEOUT_SECONDS`.
    """
    if not expected:
        return
    process = subprocess.Popen([*CHECK, str(expected)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as cause:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver survives even SIGKILL
            process.communicate(timeout=1)
        raise GpuError(f"the GPUs did not compute within {TIMEOUT_SECONDS:.0f} s; one of them hangs") from cause
    if process.returncode:
        raise GpuError((stderr.strip() or f"the GPU check ended with {process.returncode}").splitlines()[-1])


def driver_error(expected: int) -> str | None:
    """Return why the CUDA driver does not open the first `expected` GPUs, or None.

    The call opens the device files anew and makes no context, so a training beside it loses neither memory nor time. A
    container loses these files when systemd reloads its units on the host, and a GPU that fell off the bus is gone.
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__INITIALIZE.html
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as cause:
        return f"the CUDA driver is missing: {cause}"
    if status := driver.cuInit(0):
        return f"the CUDA driver does not start: cuInit returns {status}"
    count = ctypes.c_int()
    if status := driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the CUDA driver does not count its GPUs: cuDeviceGetCount returns {status}"
    if count.value < expected:
        return f"the task requested {counted(expected, 'GPU')} and has {count.value}"
    return None


def gpu_error(expected: int) -> str | None:
    """Return what is wrong with the first `expected` GPUs of this container, or None."""
    import torch

    found = torch.cuda.device_count()
    if found < expected:
        return f"the task requested {counted(expected, 'GPU')} and has {found}"
    for index in range(expected):
        try:
            ones = torch.ones(SIDE, SIDE, device=f"cuda:{index}")
            total = (ones @ ones).sum().item()
        except Exception as cause:  # PyTorch's errors of CUDA have no class in common
            return f"GPU {index} does not compute: {str(cause).splitlines()[0]}"
        if total != SIDE**3:
            return f"GPU {index} computes wrong: {total} instead of {SIDE**3}"
    return None


if __name__ == "__main__":
    sys.exit(gpu_error(int(sys.argv[1])))
