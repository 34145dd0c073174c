"""A small data set in torchvision's folder FashionMNIST/raw: https://github.com/zalandoresearch/fashion-mnist."""

import struct
from pathlib import Path

from ray_on_ecs.recipes.images import FILES


def write_small_images(folder: Path, train: int = 128, test: int = 32) -> Path:
    """Write images of ten classes, each class of one brightness; return the folder."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name in FILES:
        count = train if name.startswith("train") else test
        labels = bytes(number % 10 for number in range(count))
        if "labels" in name:
            content = struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels
        else:
            content = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28) + b"".join(
                bytes([25 * label]) * 784 for label in labels
            )
        (raw / name).write_bytes(content)
    return folder
