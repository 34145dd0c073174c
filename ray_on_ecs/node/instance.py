"""Instance type, zone and market of a worker as labels of its Ray node, from which a run's cost is computed.

The instance writes them into the file of INSTANCE_FILE when it starts, `{"instance_type": "g5.xlarge", "zone":
"us-west-2a", "market": "spot", "instance_id": "i-0abc"}`, because a task can't ask the instance's metadata service.
"""

import json
import os
import re
import sys
from pathlib import Path

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, INSTANCE_LABELS

LABEL_VALUE = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"


def labels() -> dict[str, str]:
    """Return the labels; if the file can't be used, print the reason and return none."""
    name = os.environ.get(INSTANCE_FILE_VARIABLE)
    if not name:
        return {}
    try:
        return read(Path(name))
    except (OSError, ValueError) as cause:
        reason = " ".join(str(cause).split())
        line = f"ray-worker: {INSTANCE_FILE_VARIABLE}: {reason}; this node gets no instance labels"
        print(line, file=sys.stderr, flush=True)
        return {}


def read(file: Path) -> dict[str, str]:
    """Read the labels.

    Raises:
        OSError: The file can't be read.
        ValueError: A key is missing, or Ray would refuse a value as a label.
    """
    try:
        document = json.loads(file.read_text())
        labels = {label: document[key] for key, label in INSTANCE_LABELS.items()}
    except (KeyError, TypeError, ValueError) as cause:
        raise ValueError(f"{file} does not describe this instance ({cause!r})") from cause
    for label, value in labels.items():
        if not isinstance(value, str) or not re.fullmatch(LABEL_VALUE, value):
            raise ValueError(f"{file} has {value!r} for {label}, which is not a valid Ray label")
    return labels
