"""See that the GPUs which the task was promised are there and compute, before the node joins with them.

It runs in a process of its own, which leaves no CUDA context behind in this one, and which can be given up when a GPU
hangs: `python -m raynode.gpus 4`.
"""

import subprocess
import sys
from contextlib import suppress

from raynode.errors import GpuError

PATIENCE_SECONDS = 120.0
PROBE = (sys.executable, "-m", "raynode.gpus")
SIDE = 256


def check(promised: int) -> None:
    """Raise GpuError unless this many GPUs compute."""
    if not promised:
        return
    probe = subprocess.Popen([*PROBE, str(promised)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = probe.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired as cause:
        probe.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that is stuck in the driver survives even that
            probe.communicate(timeout=1)
        raise GpuError(f"the GPUs did not compute within {PATIENCE_SECONDS:.0f} s; one of them hangs") from cause
    if probe.returncode:
        raise GpuError((said.strip() or f"the GPU check ended with {probe.returncode}").splitlines()[-1])


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
