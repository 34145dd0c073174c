"""`ray-on-ecs fetch`: copy a run's folder, or what is new in it, to this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import click
from rich import filesize

from ray_on_ecs.cli import local_copy
from ray_on_ecs.cli.cluster_flags import on_cluster
from ray_on_ecs.cli.screen import note, out, print_json
from ray_on_ecs.cli.target import check_target
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.history import find_run
from ray_on_ecs.errors import ResourceError, UsageError, counted, one_line
from ray_on_ecs.names import conflicts, folders_of, is_refused, leads_out, of_bare_repositories
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.disk import StoredFile
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import keys_outside, read_snapshot, stored_files

FOLDER = "runs"
# The manifest of a script's files, and the folders that hold them.
OF_SNAPSHOTS = (layout.FILES, layout.FILES_FOLDER, layout.VERSIONS_FOLDER, layout.PARTS_FOLDER)
# Files that runs keep for themselves: the lock, and parts of files.
INTERNAL = (layout.LOCK, ".write-check*", ".snapshot/*", "*.part")
NAMES_SHOWN = 8


@dataclass(frozen=True)
class Fetched:
    """Requested files of a run that are here, by their paths in its folder, and the new ones among them."""

    folder: Path
    files: list[str]
    copied: list[str]
    size: int

    def __str__(self) -> str:
        """Say what is where."""
        tops = list(dict.fromkeys(f"{name.partition('/')[0]}{'/' * ('/' in name)}" for name in self.files))
        names = ", ".join(tops[:NAMES_SHOWN]) + (", …" if len(tops) > NAMES_SHOWN else "")
        new = "nothing new" if not self.copied else f"{len(self.copied)} new"
        return f"{self.folder}: {counted(len(self.files), 'file')}, {filesize.decimal(self.size)}, {new}: {names}"


@click.command("fetch")
@click.argument("run")
@click.argument("folder", metavar="[DIR]", default=FOLDER)
@click.option("--checkpoints", is_flag=True, help="Copy the checkpoints, too.")
@click.option(
    "--only", metavar="GLOB", multiple=True, help="Copy only matching files, such as '*.json'; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print the fetched files as JSON.")
@on_cluster
def command(cluster: Cluster, run: str, folder: str, checkpoints: bool, only: tuple[str, ...], as_json: bool) -> None:
    """Copy RUN into DIR/RUN (default: runs/RUN): its results, logs and files.

    Repeated, it copies what has changed. Do not edit the files there: it may overwrite them.
    """
    fetched = copy_run(cluster, run, Path(folder), checkpoints=checkpoints, only=only)
    if as_json:
        document = {"run": run, "folder": str(fetched.folder), "files": fetched.files, "copied": fetched.copied}
        print_json({**document, "bytes": fetched.size})
    else:
        out.print(str(fetched))


def copy_run(
    cluster: Cluster, name: str, folder: Path, *, checkpoints: bool = False, only: Sequence[str] = ()
) -> Fetched:
    """Copy a run into a folder of its name.

    Files that already have the size and the time of the storage are skipped; others appear when they are complete, with
    that time. The time of a script's file is when the script wrote it, wherever it is stored now. The report is made
    here: the one in the storage may be a page of others.
    """
    target = folder.expanduser() / name
    storage = find_run(cluster, name)
    check_target(storage, target)
    copied: set[str] = set()
    try:
        for _ in range(local_copy.ATTEMPTS):  # a run that is under way replaces its files
            listing = _list(storage, target)
            skipped = set() if checkpoints else _checkpoints(listing.files)
            requested = {path: info for path, info in listing.files.items() if _is_requested(path, skipped, only)}
            new = {
                path: info
                for path, info in requested.items()
                if path != layout.REPORT and not local_copy.is_here(target, path, info, listing.written_at.get(path))
            }
            if not new:
                break
            local_copy.check_room(target, sum(info.size for info in new.values()))
            missed = local_copy.copy_all(storage, target, new, listing.written_at)
            copied |= new.keys() - missed.keys()
        else:
            if missed:
                raise next(iter(missed.values()))
        if only and not requested:
            all_files = cluster.command(f"fetch {name}")
            raise UsageError(f"--only: no file of run {name} matches {' or '.join(only)}; {all_files} copies all")
        links = {path: text for path, text in listing.links.items() if _is_requested(path, skipped, only)}
        refused = [*listing.refused, *local_copy.make_links(target, links)]
        if layout.CURVES in requested:
            refused += local_copy.delete_false_curves(target)
        if layout.REPORT in requested and local_copy.write_report(storage, target):
            copied.add(layout.REPORT)
    except OSError as cause:
        raise ResourceError(f"run {name} can't be copied ({one_line(cause)}); the same command continues") from cause
    if refused:
        more = f" and {len(refused) - NAMES_SHOWN} more" if len(refused) > NAMES_SHOWN else ""
        names = ", ".join(map(repr, refused[:NAMES_SHOWN]))
        note(f"left out, as they are not safe on this machine, or can't be files here: {names}{more}")
    here = [path for path in requested if (target / path).exists()]
    size = sum((target / path).stat().st_size for path in here)
    return Fetched(target, here, [path for path in here if path in copied], size)


@dataclass(frozen=True)
class _Listing:
    """Content of a run's folder, by paths."""

    files: dict[str, StoredFile]
    links: dict[str, str]  # their targets
    written_at: dict[str, int]  # times at which a script wrote (ns)
    refused: list[str]  # names that the disk can't have, files of git's repositories, and links out of the folder


def _list(storage: RunStorage, target: Path) -> _Listing:
    """List a run's folder, as the target can have it; the files of the script are from the last snapshot."""
    snapshot = read_snapshot(storage)
    top = storage.listing()
    files = {name: info for name, info in top.files.items() if name not in OF_SNAPSHOTS}
    for folder in top.folders:
        if folder not in OF_SNAPSHOTS:
            files |= {f"{folder}/{name}": info for name, info in storage.files(folder).items()}
    stored = stored_files(storage, snapshot.keys)
    refused = keys_outside(storage, files)
    links, written_at = {}, {}
    for name, entry in snapshot.files.items():
        path = f"{layout.FILES_FOLDER}/{name}"
        if entry.key in stored:
            files[path] = stored[entry.key]
        if entry.link is not None:
            links[path] = entry.link
        if entry.written_at:
            written_at[path] = entry.written_at
    refused |= {name for name in (*files, *links) if is_refused(name)}
    refused |= {name for name, text in links.items() if leads_out(name, text)}
    refused |= of_bare_repositories((*files, *links), target)
    refused |= set(conflicts([name for name in (*files, *links) if name not in refused], target))
    for name in refused:
        files.pop(name, None)
        links.pop(name, None)
    of_manifest = (f"{layout.FILES_FOLDER}/{name}" for name in snapshot.refused)
    return _Listing(files, links, written_at, sorted({*refused, *of_manifest}))


def _checkpoints(files: Iterable[str]) -> set[str]:
    """Return the folders of Checkpointers, by their names and files; an export may be in a folder of such a name."""
    found = {layout.CHECKPOINTS_FOLDER}
    for path in files:
        folder, _, name = path.rpartition("/")
        is_part = name in (layout.MANIFEST, layout.METADATA) or name.endswith(layout.CHECKPOINT_SUFFIX)
        if is_part and layout.step_order(folder.rpartition("/")[2]) and path.split("/")[0] not in layout.NO_CHECKPOINTS:
            found.add(folder)
    return found


def _is_requested(path: str, skipped: set[str], only: Sequence[str]) -> bool:
    is_internal = any(fnmatch(path, pattern) for pattern in INTERNAL)
    if (is_internal and not path.startswith(f"{layout.FILES_FOLDER}/")) or not skipped.isdisjoint(folders_of(path)):
        return False
    return not only or any(fnmatch(path, pattern) for pattern in only)
