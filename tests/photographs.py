"""Folders of small JPEG files, one color a class, for tests of data sets of photographs."""

import random
from pathlib import Path

from PIL import Image

COLORS = {"red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 220)}


def write_photographs(folder: Path, count: int, classes: tuple[str, ...] = ("red", "green")) -> Path:
    """Write train/CLASS with that many files, and test/CLASS with five; return the folder."""
    numbers = random.Random(0)
    for part, files in (("train", count), ("test", 5)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for number in range(files):
                size = (numbers.randrange(30, 60), numbers.randrange(30, 60))
                color = tuple(max(0, min(255, value + numbers.randrange(-30, 30))) for value in COLORS[name])
                Image.new("RGB", size, color).save(folder / part / name / f"{number}.jpg")
    return folder
