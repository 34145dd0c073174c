"""Fingerprint of the code, equal in an image and in a checkout with the same files.

It is a label of each node, so that the command line can warn if the cluster runs other code than the laptop's.
"""

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

LABEL = "code"
PACKAGES = ("ray_on_ecs", "training")
# Files that a build packs; others, such as caches, differ between machines.
SUFFIXES = (".py", ".j2")
DIGITS = 12


def fingerprint() -> str:
    """Return the first digits of a SHA-256 over the names and contents of the packages' files."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for name, file in _files(package):
            content = file.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:DIGITS]


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the names and files of a package, sorted by name, without importing it."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    for folder in map(Path, folders or ()):
        files = [file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        yield from sorted((f"{package}/{file.relative_to(folder).as_posix()}", file) for file in files)
