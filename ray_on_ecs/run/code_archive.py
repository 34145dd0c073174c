"""The archive of a user's code: stored next to the runs under the hash of its content, and unpacked on every node."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ray_on_ecs.errors import StorageError, one_line
from ray_on_ecs.names import conflicts, fault_of, is_inside, leads_out
from ray_on_ecs.run.code_files import CodeFile, CodeFiles
from ray_on_ecs.run.ignore_files import ask_git, has_filters
from ray_on_ecs.storage.bucket import Bucket
from ray_on_ecs.storage.disk import Disk

FOLDER, SUFFIX = ".code", ".tar.gz"
# Code is small; a higher level takes several times as long for a tenth less.
GZIP_LEVEL = 1
PIECE_BYTES = 16 * 2**20
GIT_SECONDS = 10
# The file has been deleted, or replaced by a link, a folder or a socket.
VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)

OnBytes = Callable[[int], None]


def pack(code: CodeFiles, target: BinaryIO, on_bytes: OnBytes | None = None) -> None:
    """Write the archive, whose bytes only depend on the names, contents, links and executable bits.

    A file that has changed since it was listed is taken as it is; one that has vanished is not taken.

    Args:
        code: The files.
        target: A stream that is open for writing.
        on_bytes: Called with the number of bytes of each piece that was read.

    Raises:
        OSError: A file can't be read, or the disk is full.
    """
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=target, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar,
    ):
        for file in code.files:
            _add(tar, code.folder, file, on_bytes or (lambda _: None))


def store(code: CodeFiles, filesystem: Disk | Bucket, base: str, on_bytes: OnBytes | None = None) -> str:
    """Store the archive below `base`, a storage path, unless it is there; return the SHA-256 by which it is fetched.

    Raises:
        OSError: It can't be packed or stored.
    """
    with tempfile.TemporaryFile() as archive:
        pack(code, archive, on_bytes)
        size = archive.tell()
        archive.seek(0)
        digest = hashlib.file_digest(archive, "sha256").hexdigest()
        path = _path(base, digest)
        info = filesystem.find(path)
        if info is None or info.size != size:
            archive.seek(0)
            with filesystem.writing(path) as stream:
                shutil.copyfileobj(archive, stream, PIECE_BYTES)
    return digest


def fetch(filesystem: Disk | Bucket, base: str, digest: str, target: Path) -> None:
    """Unpack an archive; its files are as new as the call, and so none is older than what is compiled from it.

    Args:
        filesystem: The one that it was stored on.
        base: The storage path.
        digest: The SHA-256 that `store` returned.
        target: A folder that is empty or not there.

    Raises:
        StorageError: The archive is missing or damaged.
        OSError: It can't be read, the disk is full, or the folder is not empty.
    """
    path = _path(base, digest)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; code is unpacked into an empty folder")
    with tempfile.TemporaryFile(dir=target.parent) as archive:
        try:
            with filesystem.open_reader(path) as source:
                shutil.copyfileobj(source, archive, PIECE_BYTES)
        except FileNotFoundError as cause:
            raise StorageError(f"the run's code, {path}, is missing; start the run again") from cause
        archive.seek(0)
        if hashlib.file_digest(archive, "sha256").hexdigest() != digest:
            raise StorageError(f"the run's code, {path}, is damaged; delete it, and start the run again")
        archive.seek(0)
        try:
            _unpack(archive, target)
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as cause:
            raise StorageError(f"the run's code, {path}, is refused: {one_line(cause)}; start the run again") from cause


def revision(folder: Path) -> dict[str, str]:
    """Return environment variables with the git commit of a folder and whether its files differ from it.

    The result is empty if git is missing or slow, or if there is not a commit. GIT_DIRTY is missing if git does not
    answer, or if the repository has filters: to compare the files would run them.
    """
    commit = ask_git(folder, "rev-parse", "--verify", "HEAD", timeout=GIT_SECONDS)
    if commit is None:
        return {}
    variables = {"GIT_COMMIT": commit.strip()}
    if not has_filters(folder):
        status = ("status", "--porcelain", "--ignore-submodules=all", "--", ".")
        changes = ask_git(folder, *status, timeout=GIT_SECONDS)
        if changes is not None:
            variables["GIT_DIRTY"] = "1" if changes else "0"
    return variables


def _path(base: str, digest: str) -> str:
    return f"{base}/{FOLDER}/{digest}{SUFFIX}"


def _add(tar: tarfile.TarFile, folder: Path, file: CodeFile, on_bytes: OnBytes) -> None:
    entry = tarfile.TarInfo(file.name)
    if file.link is not None:
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, file.link, 0o777
        tar.addfile(entry)
        return
    try:
        with open(folder / file.name, "rb", opener=_open) as source:
            status = os.fstat(source.fileno())
            if stat.S_ISREG(status.st_mode):
                entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
                content = _Content(source, status.st_size, on_bytes)
                entry.size = content.size
                tar.addfile(entry, content)
    except OSError as cause:
        if cause.errno not in VANISHED:
            raise


def _open(path: str, flags: int) -> int:
    # A pipe that has taken the file's place would block. Windows has neither flag.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


class _Content(io.RawIOBase):
    """A file's content, cut or padded to its initial length, which the archive has already stored."""

    def __init__(self, source: BinaryIO, size: int, on_bytes: OnBytes) -> None:
        if size < PIECE_BYTES:
            source = io.BytesIO(source.read())
            size = len(source.getvalue())
        self.size, self._source, self._on_bytes = size, source, on_bytes

    def read(self, size: int = -1, /) -> bytes:
        piece = self._source.read(size)
        self._on_bytes(len(piece))
        return piece.ljust(size, b"\0")  # a large file that is cut off while it is read


def _unpack(archive: BinaryIO, target: Path) -> None:
    """Write the files of an archive, and then its links, so that nothing is written through one.

    (The filters of tarfile are not in every Python 3.11.)
    """
    with tarfile.open(fileobj=archive, mode="r:gz", encoding="utf-8") as tar:
        entries = tar.getmembers()
        size = sum(entry.size for entry in entries)
        if size > shutil.disk_usage(target).free:
            raise tarfile.TarError(f"its files are {size:,} bytes, for which the disk has no room")
        for entry in entries:
            if fault := fault_of(entry.name):
                raise tarfile.TarError(f"{entry.name!r} {fault}")
            if entry.issym() and leads_out(entry.name, entry.linkname):
                raise tarfile.TarError(f"{entry.name!r} leads out of the folder, to {entry.linkname!r}")
        for name in conflicts((entry.name for entry in entries), target):
            raise tarfile.TarError(f"{name!r} is there twice, or is a folder, too")
        for entry in entries:
            if entry.isreg() and (content := tar.extractfile(entry)):
                path = target / entry.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with content, path.open("xb") as file:
                    shutil.copyfileobj(content, file, PIECE_BYTES)
                path.chmod(entry.mode & 0o755)
    links = [entry for entry in entries if entry.issym()]
    for entry in links:
        (target / entry.name).parent.mkdir(parents=True, exist_ok=True)
        (target / entry.name).symlink_to(entry.linkname)
    outside = [entry.name for entry in links if not is_inside(target / entry.name, target)]  # over other links
    if outside:
        for entry in links:
            (target / entry.name).unlink()
        raise tarfile.TarError(f"{outside[0]!r} leads out of the folder, over other links")
