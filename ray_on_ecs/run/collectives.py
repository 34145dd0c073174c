"""The collectives that the processes of a script join, as PyTorch's flight recorder notes them.

`flight_recorder.py` runs in the script's processes and leaves a file for each rank; this is the reader of these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_on_ecs.node.labels import instance_id
from ray_on_ecs.run import flight_recorder

# A distribution with this name and one entry point, which `import torch` calls.
# https://docs.pytorch.org/docs/stable/accelerator/autoload.html
NAME = "ray_on_ecs_flight_recorder"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # 0 switches it off
ENTRY_POINTS = f"[torch.backends]\nray_on_ecs = {NAME}:start\n"
METADATA = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n"


@dataclass(frozen=True)
class Last:
    """The last collective that a rank has joined.

    Attributes:
        kind: Its name, such as `all_reduce`; nothing with NCCL, which does not say it.
        sequence: Its number in its process group, from 1.
        group: The name of the group; `0` or `default_pg` is all ranks.
        began: When the rank joined it (Unix time).
    """

    kind: str
    sequence: int
    group: str
    began: float


@dataclass(frozen=True)
class Reading:
    """One reading of a rank's flight recorder.

    Attributes:
        rank: The rank in the script's default process group.
        number: Counts the readings of this process from 1.
        groups: The ranks of each process group, by its key.
        p2p: The number of sends and receives since the reading before, as between the stages of a pipeline.
        arrivals: The collectives that the rank has joined since the reading before, or the last of them: the key of the
            group, the number in it, and when the rank joined it (Unix time), in the order of joining.
        instance: The ID of its EC2 instance, if that is known.
    """

    rank: int
    number: int
    groups: Mapping[str, tuple[int, ...]]
    p2p: int
    arrivals: Sequence[tuple[str, int, float]]
    instance: str = ""


def last(folder: Path) -> Last | None:
    """Return the last collective that the rank of this folder has joined; of several ranks, the latest; else None."""
    found = [document["last"] for document in _documents(folder) if document.get("last")]
    return Last(**max(found, key=lambda each: each["began"])) if found else None


def readings(folder: Path) -> list[Reading]:
    """Return the last reading of each rank that has this folder."""
    return [
        Reading(
            document["rank"],
            document["number"],
            {key: tuple(ranks) for key, ranks in document["groups"].items()},
            document["p2p"],
            [(key, sequence, began) for key, sequence, began in document["arrivals"]],
            instance_id(),
        )
        for document in _documents(folder)
        if document["number"]
    ]


def install(folder: Path) -> Path:
    """Write what makes `import torch` start the reader of the flight recorder; return the folder for PYTHONPATH.

    The reader needs only the standard library, so it also runs in a Python without this package.
    """
    path = folder / "autoload"
    about = path / f"{NAME}-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (path / f"{NAME}.py").write_bytes(Path(flight_recorder.__file__).read_bytes())
    return path


def _documents(folder: Path) -> list[dict[str, Any]]:
    """Return the files of the ranks; they are replaced, never rewritten, so each is whole."""
    documents = []
    for path in sorted(folder.glob(flight_recorder.FILES.format("*"))):
        with suppress(OSError, ValueError):
            documents.append(json.loads(path.read_text()))
    return documents
