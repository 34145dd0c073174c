"""The archive of a user's code: stored next to the runs under the hash of its content, and unpacked on every node."""

from __future__ import annotations

import gzip
import hashlib
import os
import shlex
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import DISK_FULL, StorageError, UsageError, one_line
from ray_on_ecs.names import conflicts, fault_of, is_inside, leads_out
from ray_on_ecs.run.code import git
from ray_on_ecs.run.code.files import KEY, CodeFiles, beyond_limit, check_size, describe_linked, list_code
from ray_on_ecs.run.code.ignore import IGNORE_FILES
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import PIECE_BYTES, is_ignored, make_ignored
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.storage.run_storage import RunStorage

FOLDER, SUFFIX = ".code", ".tar.gz"
# Code is small; a higher level takes several times as long for a tenth less.
GZIP_LEVEL = 1
MAX_NAMES = 50  # of what is left out, in the run's document
LARGE_BYTES = 32 * 2**20  # larger files are not in the archive if the storage is a folder of this machine


@dataclass(frozen=True, kw_only=True)
class Code:
    """Stored code of a run: the name of the user's folder, and the address of the archive.

    Attributes:
        copies: The large files of this machine that the archive lacks, by their names.
        links: Those for which code has no room: the run has links to them.
        left_out: The names of files that .gitignore or .rayignore leaves out, for the line of a script that misses one.
        git: The commit as environment variables; empty outside a repository.
        version: The commit as a version of PEP 440, for packages that take theirs from git; empty outside a repository.
    """

    name: str
    archive: str
    copies: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    git: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    def place(self, folder: Path) -> None:
        """Write the code into a new folder.

        Raises:
            StorageError: The archive is missing or damaged, or the disk has no room for the large files.
            OSError: A file can't be read or written.
        """
        base, _, digest = self.archive.removesuffix(SUFFIX).rpartition(f"/{FOLDER}/")
        fetch(RunStorage.open(base, FOLDER), digest, folder)
        for original in (*self.copies.values(), *self.links.values()):
            if not os.path.exists(original):
                raise FileNotFoundError(f"{original} is not on this node; give s3://bucket/prefix as --storage-path")
        if (size := sum(map(os.path.getsize, self.copies.values()))) > shutil.disk_usage(folder).free:
            where = f"the disk of {folder} has no room"
            raise StorageError(
                f"the large files are {size:,} bytes, for which {where}; free some space, or --exclude files"
            )
        for name, original in self.copies.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, path)
            path.chmod(0o755 if os.stat(original).st_mode & stat.S_IXUSR else 0o644)
        for name, original in self.links.items():  # last, so that nothing is written through one
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(original)


def store(config: RunConfig, storage: RunStorage, say: Callable[[str], None], *, is_here: bool) -> Code:
    """Store the files of the working directory next to the runs, and say what is not uploaded.

    If the run `is_here`, on this machine, and the storage is a folder, large files are copied from where they are.
    """
    folder = config.folder
    results = Path(storage.base)
    inside = storage.is_local and results.is_relative_to(folder)
    own = [*(_of_runs(results) if inside else ()), *_of_others(folder)]
    never = [f"/{GitIgnoreSpecPattern.escape(each.relative_to(folder).as_posix())}/" for each in own]
    code = list_code(folder, config.include, config.exclude, never)
    for line in code.describe_left_out():
        say(line)
    _check_script(config, code)
    stays = is_here and storage.is_local
    linked = beyond_limit(code.files) if stays else []
    files = [file for file in code.files if file not in linked]
    if not (config.include or config.exclude):
        check_size(folder, files)
    if linked:
        say(describe_linked(linked))
    copied = [file for file in files if stays and file.size > LARGE_BYTES]
    code = replace(code, files=tuple(file for file in files if file not in copied))
    base = storage.storage_path
    try:
        if storage.is_local:
            make_ignored(results)
        digest = put(code, storage.sibling(FOLDER))
    except OSError as cause:
        raise UsageError(f"--storage-path: the code can't be stored in {base} ({short_reason(cause)})") from cause
    ignored = [entry.name for entry in code.left_out if entry.why in IGNORE_FILES and entry.name.isprintable()]
    return Code(
        name=folder.name or "code",
        archive=f"{base}/{FOLDER}/{digest}{SUFFIX}",
        copies={file.name: str(folder / file.name) for file in copied},
        links={file.name: str(folder / file.name) for file in linked},
        left_out=ignored[:MAX_NAMES],
        git=git.revision(folder),
        version=git.version(folder),
    )


def _of_runs(results: Path) -> list[Path]:
    """Return the results in the folder with the code: all, or the runs in a folder of the user's."""
    with suppress(OSError):
        if not is_ignored(results):
            return [entry for entry in results.iterdir() if entry.name == FOLDER or (entry / layout.SETTINGS).exists()]
    return [results]


def _of_others(folder: Path) -> list[Path]:
    """Return the runs of other commands in the folder with the code: of `fetch`, `open` and another storage path."""
    found: list[Path] = []
    with suppress(OSError):
        for entry in sorted(folder.iterdir()):
            if (entry / FOLDER).is_dir():
                found += _of_runs(entry)
            elif is_ignored(entry) and any(entry.glob(f"*/{layout.SETTINGS}")):
                found.append(entry)
    return found


def _check_script(config: RunConfig, code: CodeFiles) -> None:
    """Raise UsageError if the script is a file of the folder that is not uploaded."""
    path = code.folder / config.command[0]
    if config.module or not path.is_file() or (config.no_python and "/" not in config.command[0]):
        return
    name = os.path.relpath(os.path.realpath(path), code.folder)
    if any(file.name == name for file in code.files):
        return
    names = (f"{os.path.normpath(config.command[0])}/", f"{name}/")
    above = (entry.why for entry in code.left_out for each in names if each.startswith(f"{entry.name.rstrip('/')}/"))
    why = next(above, "")
    hint = f"; --include {shlex.quote(name)} brings it" if why in (*IGNORE_FILES, KEY) else ""
    raise UsageError(f"SCRIPT: {config.command[0]!r} is left out of the upload{f' ({why})' if why else ''}{hint}")


def put(code: CodeFiles, folder: RunStorage) -> str:
    """Store the archive in a folder, unless it is there; return the SHA-256 by which it is fetched."""
    with tempfile.TemporaryFile() as archive:
        pack(code, archive)
        size = archive.tell()
        archive.seek(0)
        digest = hashlib.file_digest(archive, "sha256").hexdigest()
        name = digest + SUFFIX
        info = folder.find(name)
        if info is None or info.size != size:
            archive.seek(0)
            with folder.open_writer(name) as stream:
                shutil.copyfileobj(archive, stream, PIECE_BYTES)
    return digest


def pack(code: CodeFiles, target: BinaryIO) -> None:
    """Write the archive, whose bytes only depend on the names, contents, links and executable bits.

    A file that has changed since it was listed is taken as it is; one that has vanished is not taken.

    Raises:
        UsageError: A file can't be read, or is cut off meanwhile.
        OSError: The archive can't be written.
    """
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=target, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar,
    ):
        for file in code.files:
            entry = tarfile.TarInfo(file.name)
            if file.link is not None:
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, file.link, 0o777
                tar.addfile(entry)
                continue
            try:
                with suppress(FileNotFoundError), open(code.folder / file.name, "rb") as source:
                    status = os.fstat(source.fileno())
                    entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
                    entry.size = status.st_size
                    tar.addfile(entry, source)
            except OSError as cause:
                if cause.errno in DISK_FULL:  # the disk of the archive
                    raise
                reason = f"{file.name} can't be read, or changes meanwhile ({short_reason(cause)})"
                raise UsageError(f"--working-dir: {reason}; try again, or leave it out by --exclude") from cause


def fetch(folder: RunStorage, digest: str, target: Path) -> None:
    """Unpack an archive that `put` has stored into a folder that is empty or not there.

    Raises:
        StorageError: The archive is missing or damaged.
        OSError: It can't be read, the disk is full, or the folder is not empty.
    """
    name = digest + SUFFIX
    path = folder.path(name)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; code is unpacked into an empty folder")
    with tempfile.TemporaryFile(dir=target.parent) as archive:
        try:
            with folder.open_reader(name) as source:
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
            shutil.rmtree(target)  # links of links may lead out of it
            raise StorageError(f"the run's code, {path}, is refused: {one_line(cause)}; start the run again") from cause


def _unpack(archive: BinaryIO, target: Path) -> None:
    """Write the files of an archive, and then its links, so that nothing is written through one.

    Without tarfile's data filter, which Debian 12's Python 3.11.2 lacks: the names are checked, and of a file only its
    content and the owner's permission to execute it are taken. Its time is now: older than what is compiled from it, it
    would count as unchanged.
    """
    with tarfile.open(fileobj=archive, mode="r:gz", encoding="utf-8") as tar:
        entries = tar.getmembers()
        if (size := sum(entry.size for entry in entries)) > shutil.disk_usage(target).free:
            raise tarfile.TarError(f"its files are {size:,} bytes, for which the disk has no room")
        for entry in entries:
            if fault := fault_of(entry.name):
                raise tarfile.TarError(f"{entry.name!r} {fault}")
            if entry.issym() and leads_out(entry.name, entry.linkname):
                raise tarfile.TarError(f"{entry.name!r} leads out of the folder, to {entry.linkname!r}")
        for name in conflicts((entry.name for entry in entries), target):
            raise tarfile.TarError(f"{name!r} is there twice, or is a folder, too")
        for entry in entries:
            source = tar.extractfile(entry) if entry.isreg() else None
            if source is not None:
                path = target / entry.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with source, path.open("xb") as file:
                    shutil.copyfileobj(source, file, PIECE_BYTES)
                path.chmod(0o755 if entry.mode & 0o100 else 0o644)
    links = [entry for entry in entries if entry.issym()]
    for entry in links:
        (target / entry.name).parent.mkdir(parents=True, exist_ok=True)
        (target / entry.name).symlink_to(entry.linkname)
    for entry in links:
        if not is_inside(target / entry.name, target):
            raise tarfile.TarError(f"{entry.name!r} leads out of the folder, over other links")
