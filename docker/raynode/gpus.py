"""See that the GPUs which the task was promised are there and compute, before the node joins with them.

It runs in a process of its own, which PyTorch leaves no CUDA context behind in, and which can be given up when a GPU
hangs: `python -m raynode.gpus 4`.
"""

import subprocess
import sys

from raynode.errors import GpuError

PATIENCE_SECONDS = 120
SIDE = 256


def check(promised: int) -> None:
    """Raise GpuError unless this many GPUs compute."""
    if not promised:
        return
    try:
        probe = subprocess.run(
            [sys.executable, "-m", "raynode.gpus", str(promised)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as cause:
        raise GpuError(f"the GPUs did not compute within {PATIENCE_SECONDS} s; one of them hangs") from cause
    if probe.returncode:
        raise GpuError((probe.stderr.strip() or f"the GPU check ended with {probe.returncode}").splitlines()[-1])


def fault(promised: int) -> str | None:
    """What is wrong with the first `promised` GPUs of this container, or None."""
    import torch

    found = torch.cuda.device_count()
    if found < promised:
        return f"the task was promised {promised} GPUs and has {found}"
    for index in range(promised):
        try:
            ones = torch.ones(SIDE, SIDE, device=f"cuda:{index}")
            total = (ones @ ones).sum().item()
        except (AssertionError, RuntimeError) as cause:
            return f"GPU {index} does not compute: {str(cause).splitlines()[0]}"
        if total != SIDE**3:
            return f"GPU {index} computes wrong: {total} instead of {SIDE**3}"
    return None


if __name__ == "__main__":
    sys.exit(fault(int(sys.argv[1])))
