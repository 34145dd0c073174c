"""Labels of a Ray node: a worker's instance type, zone and market, and the fingerprint of the code.

A run's cost is computed from the first three. The instance writes them into the file of INSTANCE_FILE when it starts,
`{"instance_type": "g5.xlarge", "zone": "us-west-2a", "market": "spot", "instance_id": "i-0abc"}`, because a task can't
ask the instance's metadata service. By the fingerprint, equal in an image and in a checkout with the same files, the
command line can warn if the cluster runs other code than the laptop's.
"""

import hashlib
import json
import logging
import os
from importlib.util import find_spec
from pathlib import Path

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, INSTANCE_LABELS
from ray_on_ecs.errors import one_line

logger = logging.getLogger(__name__)

CODE = "code"
PACKAGES = ("ray_on_ecs", "training")
# Files that a build packs; others, such as caches, differ between machines.
SUFFIXES = (".py", ".j2")


def flags() -> list[str]:
    """Return the labels as an argument of `ray start`."""
    labels = {CODE: fingerprint(), **of_instance()}
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
        return {label: document[key] for key, label in INSTANCE_LABELS.items()}
    except (LookupError, OSError, TypeError, ValueError) as cause:
        line = f"{name} does not describe this instance ({one_line(cause)}); this node gets no instance labels"
        logger.warning(f"{INSTANCE_FILE_VARIABLE}: {line}")
        return {}
