"""Labels of a Ray node: a worker's instance type, zone and market, how it started, and the fingerprint of the code.

A run's cost is computed from the first three, and the parts of its start from the times. The instance writes them into
the file of INSTANCE_FILE when it starts, `{"instance_type": "g5.xlarge", "zone": "us-west-2a", "market": "spot",
"instance_id": "i-0abc", "launched": "2026-01-01T00:00:00Z", "booted": "1767225630"}`, because a task can't ask the
instance's metadata service; ECS's agent knows when the image was pulled. By the fingerprint, equal in an image and in a
checkout with the same files, the command line can warn if the cluster runs other code than the laptop's.
"""

import hashlib
import json
import logging
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, INSTANCE_ID, INSTANCE_LABELS, INSTANCE_MOMENTS, LOCAL_DISKS_FILE
from ray_on_ecs.errors import one_line
from ray_on_ecs.node import task_metadata
from ray_on_ecs.tracking.starts import moment

logger = logging.getLogger(__name__)

CODE = "code"
PACKAGES = ("ray_on_ecs", "training")
# Files that a build packs; others, such as caches, differ between machines.
SUFFIXES = (".py", ".j2", ".css", ".js")


def flags() -> list[str]:
    """Return the labels as an argument of `ray start`."""
    pulled = {name: f"{seconds:.3f}" for name, seconds in task_metadata.read_pull().items()}
    labels = {CODE: fingerprint(), **of_instance(), **pulled}
    return [f"--labels={','.join(f'{label}={value}' for label, value in labels.items())}"]


def fingerprint() -> str:
    """Return the first digits of a SHA-256 over the names and contents of the files of the packages."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)  # does not import it
        for folder in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
            files = {f"{package}/{file.relative_to(folder).as_posix()}": file for file in folder.rglob("*")}
            for name, file in sorted(files.items()):
                if file.suffix in SUFFIXES and file.is_file():
                    content = file.read_bytes()
                    digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def of_instance() -> dict[str, str]:
    """Return the labels of the instance; if the file can't be used, print the reason and return none."""
    name = os.environ.get(INSTANCE_FILE_VARIABLE)
    if not name:
        return {}
    try:
        document = json.loads(Path(name).read_text())
        times = {name: moment(document.get(name)) for name in INSTANCE_MOMENTS}
        return {
            **{label: document[key] for key, label in INSTANCE_LABELS.items()},
            **{name: f"{seconds:.3f}" for name, seconds in times.items() if seconds is not None},
        }
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as cause:
        line = f"{name} does not describe this instance ({one_line(cause)}); this node gets no instance labels"
        logger.warning(f"{INSTANCE_FILE_VARIABLE}: {line}")
        return {}


@cache
def instance_id() -> str:
    """Return the ID of this instance; empty if it is not known. Workers need it each second."""
    try:
        return str(json.loads(Path(os.environ[INSTANCE_FILE_VARIABLE]).read_text())[INSTANCE_ID])
    except (LookupError, OSError, TypeError, ValueError):
        return ""


def local_disks() -> str:
    """Return the instance's line about its local disks; empty without one."""
    try:
        return Path(os.environ[INSTANCE_FILE_VARIABLE]).with_name(LOCAL_DISKS_FILE).read_text().strip()
    except (LookupError, OSError, ValueError):
        return ""
