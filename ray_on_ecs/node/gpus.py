"""Checks of the task's GPUs: a computation before the node joins, and their presence from then on.

The computation runs in a subprocess, `python -m ray_on_ecs.node.gpus 4`, so that it doesn't leave a CUDA context in
this process, and can be abandoned if a GPU hangs.
"""

import ctypes
import logging
import os
import re
import subprocess
import sys
from contextlib import suppress
from glob import iglob
from pathlib import Path

from ray_on_ecs.errors import GpuError, StartError, counted

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 120.0  # torch is read from a cold disk
CHECK = (sys.executable, "-m", "ray_on_ecs.node.gpus")
# Exit status of the subprocess if a GPU is at fault; any other failure is the image's.
GPU_FAULT = 3
SIDE = 256


def check(expected: int, seconds: float = TIMEOUT_SECONDS) -> None:
    """Raise GpuError unless this many GPUs compute within that time; StartError if the image can't use them."""
    if not expected:
        return
    logger.debug(f"checking {counted(expected, 'GPU')}, for up to {seconds:.0f} s")
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
    """Load the CUDA driver, which NVIDIA's container runtime puts into the container; StartError if it is missing."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as cause:
        raise StartError(f"the CUDA driver is missing: {cause}; does the instance have NVIDIA's runtime?") from cause


def driver_error(driver: ctypes.CDLL, expected: int) -> str | None:
    """Return the reason why the CUDA driver can't open `expected` GPUs, or None.

    cuInit opens the device files without a CUDA context, so a training on the GPU loses neither memory nor time. A
    container loses access to these files when systemd reloads its units on the host, and a GPU may fall off the bus.
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__INITIALIZE.html
    """
    status = driver.cuInit(0)
    if status:
        return f"the CUDA driver does not start: cuInit returns {status}"
    count = ctypes.c_int()
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"the CUDA driver does not count its GPUs: cuDeviceGetCount returns {status}"
    if count.value < expected:
        return f"the task requested {counted(expected, 'GPU')} and has {count.value}"
    return None


def are_in_use(processes: Path = Path("/proc")) -> bool:
    """Return True if a process of this container has a GPU open."""
    # Of the module glob, which passes over processes that have just ended; Path.glob fails at them.
    for name in iglob("[0-9]*/fd/*", root_dir=processes):
        with suppress(OSError):  # a process or its file may be gone
            if re.fullmatch(r"/dev/nvidia\d+", os.readlink(processes / name)):
                return True
    return False


def gpu_error(expected: int) -> str | None:
    """Return the fault of the first `expected` GPUs of this container, or None; StartError if PyTorch is at fault."""
    fault = driver_error(load_driver(), expected)
    if fault:
        return fault
    import torch

    count = torch.cuda.device_count()
    if count < expected:
        raise StartError(
            f"PyTorch {torch.__version__} finds {count} of {counted(expected, 'GPU')}; is it a build with CUDA?"
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


if __name__ == "__main__":
    try:
        fault = gpu_error(int(sys.argv[1]))
    except StartError as cause:
        sys.exit(str(cause))
    if fault:
        print(fault, file=sys.stderr)
        sys.exit(GPU_FAULT)
