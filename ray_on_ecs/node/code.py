"""Which code this is: a fingerprint that is the same wherever the same files are, in an image or in a checkout.

A node shows it as a label, so a laptop can tell that the cluster runs other code than is there.
"""

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

LABEL = "code"
PACKAGES = ("ray_on_ecs", "training")
# Of what a build packs; the rest, such as caches, differs between machines.
SUFFIXES = (".py", ".j2")
DIGITS = 12


def fingerprint() -> str:
    """Return the first digits of a hash over all files of the packages and their names."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for name, file in _files(package):
            content = file.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:DIGITS]


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a package, which is not imported, and their names, in the order of the names."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    for folder in map(Path, folders or ()):
        found = (file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        yield from sorted((f"{package}/{file.relative_to(folder).as_posix()}", file) for file in found)
