"""Files on a disk, with the methods of `Bucket`."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple
from uuid import uuid4

PIECE_BYTES = 16 * 2**20
# The file of a folder of results, and its text, that keeps git from taking checkpoints.
IGNORED = (".gitignore", "*\n")
PART = re.compile(r"\.[0-9a-f]{32}\.part")
# A disk can't have such a path, or has something else there.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


class StoredFile(NamedTuple):
    """File on a disk, or object in S3."""

    path: str  # on the disk, or `bucket/key`
    size: int
    mtime_ns: int = 0  # S3 has whole seconds
    version: str = ""  # the inode or the ETag, by which a replaced one is noticed


@dataclass(frozen=True)
class Listing:
    """Content of a folder: files by their paths in it, and the names of its subfolders."""

    files: dict[str, StoredFile] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    now: float = 0.0  # by the storage's clock (Unix time)


class Changed(OSError):
    """A file was replaced or has become shorter while it was read."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} was replaced, or has become shorter, while it was read")


class Disk:
    """Files on a disk."""

    def find(self, path: str) -> StoredFile | None:
        """Return a file, or None if there is not a file of this path."""
        try:
            status = os.stat(path)
        except OSError as cause:
            if cause.errno in ABSENT:
                return None
            raise
        return _stored(path, status) if stat.S_ISREG(status.st_mode) else None

    def age(self, path: str) -> tuple[str, float]:
        """Return the version of a file, and the seconds since it was written; "" and 0 without one."""
        info = self.find(path)
        if info is None:
            return "", 0.0
        # A file that was replaced twice may have its first inode again.
        return f"{info.version} {info.mtime_ns}", max(time.time() - info.mtime_ns / 1e9, 0.0)

    def listing(self, path: str, *, recursive: bool = False) -> Listing:
        """List a folder, or all files below it; a missing folder is empty."""
        found = Listing(now=time.time())
        for name, entry in _entries(path, "", (), recursive=recursive):
            if entry.is_dir():
                found.folders.append(name)
            elif entry.is_file():
                with suppress(FileNotFoundError):  # deleted since it was listed
                    found.files[name] = _stored(entry.path, entry.stat())
        return Listing(dict(sorted(found.files.items())), sorted(found.folders), found.now)

    def has_files(self, path: str) -> bool:
        """Return whether a path is a file, or has one below it; the first is enough, as there may be millions."""
        return bool(self.find(path)) or any(entry.is_file() for _, entry in _entries(path, "", (), recursive=True))

    def read(self, path: str, start: int = 0, size: int | None = None, version: str = "") -> bytes:
        """Read a file, or a part of it; FileNotFoundError if it is missing, and Changed if it has another version."""
        with open(path, "rb") as file:
            if version and version != _version(os.fstat(file.fileno())):
                raise Changed(path)
            file.seek(start)
            return file.read(-1 if size is None else size)

    def open_reader(self, path: str) -> io.BufferedIOBase:
        """Open a file for random access."""
        return open(path, "rb")

    @contextmanager
    def writing(self, path: str) -> Generator[IO[bytes]]:
        """Write a file, which has its name as soon as it is complete, and not if the block fails."""
        part = part_of(Path(path))
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as file:
                yield file
            part.replace(path)
        finally:
            with suppress(OSError):
                part.unlink()

    def write_if(self, path: str, content: bytes, version: str | None) -> str | None:
        """Write a file if it has this version, None for a missing one; return the new version, or None if it had not.

        Two that replace the same version at once both succeed, and the later one wins.
        """
        new = part_of(Path(path))
        new.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_bytes(content)
            if version is None:
                os.link(new, path)  # exclusive, also on NFS
            elif self.read_version(path)[0] == version:
                new.replace(path)
            else:
                return None
        except FileExistsError:
            return None
        except FileNotFoundError:  # over NFS, whose answers may get lost
            if not new.parent.exists():
                raise
            return None
        finally:
            new.unlink(missing_ok=True)
        return content.decode()

    def read_version(self, path: str) -> tuple[str | None, bytes]:
        """Return the version of a file, here its content, and the content; None for a missing file."""
        try:
            content = self.read(path)
        except FileNotFoundError:
            return None, b""
        return content.decode(errors="replace"), content

    def copy(self, source: StoredFile, target: str) -> None:
        """Copy a file that is not written any longer, as a hard link if the disk has them."""
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source.path, target)
        except OSError:
            shutil.copyfile(source.path, target)

    def delete(self, path: str) -> None:
        """Delete a file if it exists."""
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)

    def delete_folder(self, path: str) -> None:
        """Delete a folder and its content if it exists."""
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def part_of(path: Path) -> Path:
    """Return the path of a file while it is written; listings leave it out.

    It is random: a user's files may be a.pt and a.pt.part, and a name may be as long as the disk allows.
    """
    return path.with_name(f".{uuid4().hex}.part")


def is_part(name: str) -> bool:
    """Return True if `part_of` makes such names."""
    return bool(PART.fullmatch(name))


def make_ignored(folder: Path) -> None:
    """Make a folder that git and the uploads of code ignore; one that is there stays as it is."""
    with suppress(FileExistsError):
        folder.mkdir(parents=True)
        (folder / IGNORED[0]).write_text(IGNORED[1])


def nearest(path: Path) -> Path:
    """Return an absolute path, or the nearest one above it that is there: a link that leads nowhere is."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def is_ignored(folder: Path) -> bool:
    """Return whether `make_ignored` has made a folder."""
    try:
        return (folder / IGNORED[0]).read_text() == IGNORED[1]
    except (OSError, ValueError):
        return not folder.exists()


def _entries(
    path: str, prefix: str, above: tuple[str, ...], *, recursive: bool
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Return the entries of a folder, and those below its subfolders; links are followed, but not in circles."""
    real = os.path.realpath(path)
    if real in above:
        return
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            if is_part(entry.name):
                continue
            yield f"{prefix}{entry.name}", entry
            if recursive and entry.is_dir():
                yield from _entries(entry.path, f"{prefix}{entry.name}/", (*above, real), recursive=True)


def _stored(path: str, status: os.stat_result) -> StoredFile:
    return StoredFile(path, status.st_size, status.st_mtime_ns, _version(status))


def _version(status: os.stat_result) -> str:
    return f"{status.st_dev}-{status.st_ino}"
