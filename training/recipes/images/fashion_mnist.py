"""Fashion-MNIST from a folder or a download, read by torchvision."""

import gzip
import os
import shutil
import socket
import tempfile
import urllib.request
from pathlib import Path

from filelock import FileLock
from torchvision.datasets import FashionMNIST

from ray_on_ecs.errors import UsageError
from ray_on_ecs.filesystem import fetch, short_reason
from training.recipes.images.config import ImageConfig
from training.recipes.images.dataset import Dataset, Split

PROBE_TIMEOUT = 5.0
FILES = tuple(Path(name).stem for name, _ in FashionMNIST.resources)
ALTERNATIVES = "use --data-dir with its four IDX files, or --dataset digits, which needs no network"


def load(config: ImageConfig) -> Dataset:
    """Load both splits, from `--data-dir` or from a download, which is kept.

    Raises:
        UsageError: The files are missing, broken or can't be downloaded.
    """
    if config.data_dir is None:
        return _read(_download())
    folder = _here(config.data_dir)
    with tempfile.TemporaryDirectory() as root:
        _unpack(_idx_files(folder, config.data_dir), Path(root) / "FashionMNIST" / "raw")
        return _read(Path(root))


def _here(data_dir: str) -> Path:
    """Return the folder on this node."""
    try:
        return fetch(data_dir, "--data-dir")
    except (OSError, ValueError) as cause:
        raise UsageError(
            f"--data-dir: {data_dir!r} can't be read ({short_reason(cause)}); give a folder or s3://bucket/prefix"
        ) from cause


def download_error() -> str | None:
    """Return why it can't be downloaded, or None if it is here already or a mirror answers within seconds."""
    return None if _is_cached() else _mirror_error()


def _cache() -> Path:
    """Return this node's folder for downloads."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ray-on-ecs"


def _is_cached() -> bool:
    raw = _cache() / "FashionMNIST" / "raw"
    return all((raw / name).is_file() for name in FILES)


def _mirror_error() -> str | None:
    """Return why no mirror answers, or None if one does."""
    smallest = FashionMNIST.resources[-1][0]
    reason = "it has no mirror"
    for mirror in FashionMNIST.mirrors:
        try:
            with urllib.request.urlopen(mirror + smallest, timeout=PROBE_TIMEOUT):
                return None
        except OSError as cause:
            reason = f"{mirror}: {getattr(cause, 'reason', cause)}"
    return reason


def _idx_files(folder: Path, given: str) -> list[Path]:
    """Find Fashion-MNIST's four files in a folder or in torchvision's `FashionMNIST/raw` below it."""
    for place in (folder, folder / "FashionMNIST" / "raw"):
        found = [path for name in FILES if (path := _find(place, name))]
        if len(found) == len(FILES):
            return found
    names = ", ".join(FILES)
    raise UsageError(f"--data-dir: {given!r} must hold {names}, each as it is or with .gz; it does not")


def _find(folder: Path, name: str) -> Path | None:
    """Return the file's path, gzipped or not, if it is in the folder."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _download() -> Path:
    """Download once per node: the first process does, the others wait for its lock. Returns the folder."""
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    default_timeout = socket.getdefaulttimeout()
    with FileLock(cache / "download.lock"):
        try:
            socket.setdefaulttimeout(30)  # torchvision sets none, so a mirror that hangs would hang the run
            FashionMNIST(cache, download=True)
        except (OSError, RuntimeError) as cause:
            raise UsageError(f"--dataset fashion-mnist: the download failed ({cause}); {ALTERNATIVES}") from cause
        finally:
            socket.setdefaulttimeout(default_timeout)
    return cache


def _unpack(files: list[Path], raw: Path) -> None:
    """Copy the files to `raw`, unzipped, as torchvision expects them."""
    raw.mkdir(parents=True)
    for path in files:
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rb") as source, open(raw / path.name.removesuffix(".gz"), "wb") as target:
                shutil.copyfileobj(source, target)
        except (OSError, EOFError) as cause:
            raise UsageError(f"--data-dir: {str(path)!r} can't be read ({cause}); fetch it again") from cause


def _read(root: Path) -> Dataset:
    try:
        parts = [FashionMNIST(root, train=train) for train in (True, False)]
    except (OSError, ValueError, RuntimeError, AssertionError) as cause:
        reason = f"{type(cause).__name__} {cause}".strip()
        raise UsageError(f"the Fashion-MNIST files are broken ({reason}): no IDX files; fetch them again") from cause
    splits = [Split(part.data.unsqueeze(1), part.targets) for part in parts]
    for split in splits:
        if len(split.images) != len(split.labels):
            raise UsageError(
                f"{len(split.images)} Fashion-MNIST images have {len(split.labels)} labels; fetch them again"
            )
    return Dataset.from_splits("fashion-mnist", *splits, classes=len(FashionMNIST.classes), flip_invariant=True)
