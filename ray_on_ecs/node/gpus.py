"""Checks of the GPUs that the task requested: that they compute before the node joins, and are present from then on.

The first check runs in its own process, `python -m ray_on_ecs.node.gpus 4`: it leaves no CUDA context behind in this
one, and it can be abandoned if a GPU hangs.
"""

import ctypes
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ray_on_ecs.errors import counted
from ray_on_ecs.node.errors import GpuError, StartError

TIMEOUT_SECONDS = 120.0
CHECK = (sys.executable, "-m", "ray_on_ecs.node.gpus")
# Exit status of that process if a GPU is at fault; any other failure is of the image.
GPU_FAULT = 3
DRIVER = "libcuda.so.1"
DEVICE = re.compile(r"/dev/nvidia\d+")
SIDE = 256


def check(expected: int, seconds: float = TIMEOUT_SECONDS) -> None:
    """Check that this many GPUs compute.

    Args:
        expected: Number of GPUs that the task requested.
        seconds: Time that the check may take.

    Raises:
        GpuError: A GPU is missing, computes wrongly, or hangs for that time.
        StartError: The image can't use the GPUs.
    """
    if not expected:
        return
    process = subprocess.Popen([*CHECK, str(expected)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as cause:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver survives even SIGKILL
            process.communicate(timeout=1)
        raise GpuError(f"the GPUs did not compute within {seconds:.0f} s; one of them hangs") from cause
    if process.returncode:
        line = (stderr.strip() or f"the GPU check ended with {process.returncode}").splitlines()[-1]
        raise GpuError(line) if process.returncode == GPU_FAULT else StartError(line)


def load_driver() -> ctypes.CDLL:
    """Load the CUDA driver, which NVIDIA's container runtime puts into the container.

    Raises:
        StartError: It is not there.
    """
    try:
        return ctypes.CDLL(DRIVER)
    except OSError as cause:
        raise StartError(f"the CUDA driver is missing: {cause}; does the instance have NVIDIA's runtime?") from cause


def driver_error(driver: ctypes.CDLL, expected: int) -> str | None:
    """Return why the CUDA driver does not open the first `expected` GPUs, or None.

    The call opens the device files anew and makes no context, so a training beside it loses neither memory nor time. A
    container loses these files when systemd reloads its units on the host, and a GPU that fell off the bus is gone.
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__INITIALIZE.html
    """
    if status := driver.cuInit(0):
        return f"the CUDA driver does not start: cuInit returns {status}"
    count = ctypes.c_int()
    if status := driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the CUDA driver does not count its GPUs: cuDeviceGetCount returns {status}"
    if count.value < expected:
        return f"the task requested {counted(expected, 'GPU')} and has {count.value}"
    return None


def are_in_use(processes: Path = Path("/proc")) -> bool:
    """Return whether a process of this container has a GPU open."""
    for file in processes.glob("[0-9]*/fd/*"):
        with suppress(OSError):  # a process or its file may be gone
            if DEVICE.fullmatch(os.readlink(file)):
                return True
    return False


def gpu_error(expected: int) -> str | None:
    """Return what is wrong with the first `expected` GPUs of this container, or None.

    Raises:
        StartError: The image's PyTorch can't use GPUs that the driver has.
    """
    if fault := driver_error(load_driver(), expected):
        return fault
    import torch

    found = torch.cuda.device_count()
    if found < expected:
        raise StartError(
            f"PyTorch {torch.__version__} finds {found} of {counted(expected, 'GPU')}; is it one for CUDA?"
        )
    for index in range(expected):
        try:
            ones = torch.ones(SIDE, SIDE, device=f"cuda:{index}")
            total = (ones @ ones).sum().item()
        except Exception as cause:  # PyTorch's errors of CUDA have no class in common
            reason = str(cause).splitlines()[0]
            if "no kernel image" in reason:
                raise StartError(f"PyTorch {torch.__version__} has no code for GPU {index}: {reason}") from cause
            return f"GPU {index} does not compute: {reason}"
        if total != SIDE**3:
            return f"GPU {index} computes wrong: {total} instead of {SIDE**3}"
    return None


def _main() -> int:
    try:
        fault = gpu_error(int(sys.argv[1]))
    except StartError as cause:
        print(cause, file=sys.stderr)
        return StartError.exit_status
    if fault:
        print(fault, file=sys.stderr)
    return GPU_FAULT if fault else 0


if __name__ == "__main__":
    sys.exit(_main())
