"""EFA devices of a worker's container, which NCCL uses through libfabric: one line of the log, and no setting.

NCCL's plugin for EFA chooses libfabric's provider and options by itself. Without a device or a library, NCCL uses TCP.
https://github.com/aws/aws-ofi-nccl/blob/master/doc/efa-env-var.md
"""

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path

from ray_on_ecs.errors import counted

logger = logging.getLogger(__name__)

DEVICES = Path("/dev/infiniband")
LIBRARY = "libfabric.so.1"


def report(folder: Path = DEVICES, load: Callable[[str], object] = ctypes.CDLL) -> None:
    """Log the number of devices, or why they can't be used; nothing without a device."""
    devices = list(folder.glob("uverbs*"))
    if not devices:
        return
    found = f"EFA: {counted(len(devices), 'device')}"
    closed = [device.name for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if closed:
        logger.warning(f"{found}, of which user {os.getuid()} can't open {', '.join(sorted(closed))}; NCCL may use TCP")
        return
    try:
        load(LIBRARY)
    except OSError as cause:
        logger.warning(f"{found}, but {LIBRARY} is missing in the image ({cause}); NCCL uses TCP (docs/efa.md)")
        return
    logger.info(found)
