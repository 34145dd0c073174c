"""Picture of a report: trains the image classifier on digits, and draws the top of the run's page by Chromium.

python docs/pictures/report.py writes report.png beside it. It needs Chromium and an installed ray-on-ecs with PyTorch.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
TRAINING = HERE.parents[1] / "training"
RUN = ("ray-on-ecs", "run", "--local", "--num-workers", "2", "--run-name", "first", f"--working-dir={TRAINING}")
SCRIPT = ("image_classifier.py", "--data", "digits", "--epochs", "10")
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1.5")
SIZE = (1000, 560)  # CSS pixels: the outcome and the first curves
COLORS = 128


def train(folder: Path) -> Path:
    """Train with the results in a folder, and return the report."""
    subprocess.run((*RUN, f"--storage-path={folder}", *SCRIPT), check=True)
    page = folder / "first" / "report.html"
    page.write_text(page.read_text().replace(str(folder), "~/results"))
    return page


def draw(page: Path, picture: Path) -> None:
    """Draw the top of a page as a PNG with few colors."""
    size = f"--window-size={SIZE[0]},{SIZE[1]}"
    subprocess.run((*CHROMIUM, size, f"--screenshot={picture}", page.as_uri()), check=True)
    Image.open(picture).convert("RGB").quantize(COLORS, Image.Quantize.FASTOCTREE).save(picture, optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        draw(train(Path(name).resolve()), HERE / "report.png")
