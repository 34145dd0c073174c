"""Reports of a failure: one line for the user, `error.json` and the stacks of a hang in the run's folder."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from ray_on_ecs.config import SETTINGS, RunConfig
from ray_on_ecs.errors import TrainingError, one_line, resume_line
from ray_on_ecs.flags import flags_of
from ray_on_ecs.run.crashes import CRASHES
from ray_on_ecs.run.failure_policy import Failure, Raise
from ray_on_ecs.run.group import WorkerRank, WorkerStatus, WorkerStatuses
from ray_on_ecs.run.memory import OUT_OF_MEMORY
from ray_on_ecs.run.stacks import Stacks
from ray_on_ecs.run.stacks_request import SILENT
from ray_on_ecs.run.stuck import Picture, picture
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.filesystem import short_reason
from ray_on_ecs.storage.run_storage import RunStorage

# A rank that left with 0 at least this long before the others failed is named with them.
EARLY_SECONDS = 0.5
# How parsers of arguments name one that they don't know, and the flags of a run.
REFUSAL = re.compile(r"(?i)unrecogni[sz]ed|no such option|unknown|unexpected|could not consume")
FLAGS = {name for spec in SETTINGS for name in flags_of(spec)}
# Files in a hint.
MAX_HINTS = 3


def describe(workers: WorkerStatuses, config: RunConfig, left_out: Sequence[str]) -> Failure:
    """Return the failure of scripts that have ended: the rank that failed first is to blame.

    A rank that had ended before with exit status 0 is named, because the others may have waited for it. With --per-node
    the processes have no ranks here, and are named by their nodes.
    """
    ranks = sorted(workers, key=lambda rank: (workers[rank].ended_at or 0.0, rank))
    failed_rank = next(rank for rank in ranks if workers[rank].status)
    failed = workers[failed_rank]
    status = failed.status or 0
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
    nodes = {rank: worker.peer.node_rank for rank, worker in workers.items() if worker.peer}
    if config.per_node and any(nodes.values()):
        how += f" on node {nodes.get(failed_rank)}"
    reason = failed.words.text or "it printed nothing"
    explains = not failed.words.text or reason.startswith((*CRASHES, OUT_OF_MEMORY))
    if status < 0 and not explains:
        reason = f"its last line was {reason!r}"
    what = one_line(f"{config.command[0]} {how}: {reason}")
    finished_rank = next((rank for rank in ranks if workers[rank].status == 0 and workers[rank].ended_at), None)
    if finished_rank is not None and failed.ended_at:
        seconds = failed.ended_at - (workers[finished_rank].ended_at or 0.0)
        if seconds >= EARLY_SECONDS:
            name = f"node {nodes.get(finished_rank)}" if config.per_node else f"rank {finished_rank}"
            what += f"; {name} had ended with exit status 0, {seconds:.0f} s before"
    what += missing_file_hint(failed.words.text, left_out) + access_denied_hint(failed.words.text, config)
    what += bus_error_hint(status, failed.words.text) + misplaced_flag_hint(failed.words.text, config)
    where, rank = "\n".join(failed.log), rank_of(failed_rank, config)
    return Failure(what, rank=rank, status=failed.status, words=failed.words, where=where, log=failed.log)


def describe_lost(lost: Mapping[int, str], errors: WorkerStatuses, config: RunConfig) -> Failure:
    """Return the failure of workers that have ended themselves, by an error or without one."""
    rank = min(errors or lost)
    if not errors:
        return Failure(lost[rank], rank=rank_of(rank, config))
    worker, cause = errors[rank], errors[rank].error
    return Failure(one_line(cause), rank=rank_of(rank, config), cause=cause, where=worker.where, log=worker.log)


def rank_of(rank: int | None, config: RunConfig) -> int | None:
    """Return a rank, or None for a Ray program and for --per-node, whose processes are not ranks."""
    return None if config.driver or config.per_node else rank


def missing_file_hint(text: str, left_out: Sequence[str]) -> str:
    """Return a hint if a script's last words name files that were left out of the upload, else nothing."""
    if "No such file" not in text and "not found" not in text:
        return ""
    names = [name for name in left_out if re.search(rf"(?<![\w.-]){re.escape(name)}", text)][:MAX_HINTS]
    if not names:
        return ""
    was, it = ("was", "it") if len(names) == 1 else ("were", "them")
    flags = " ".join(f"--include '{name}'" for name in names)
    return f"; {', '.join(names)} {was} left out of the upload, and {flags} brings {it}"


def misplaced_flag_hint(text: str, config: RunConfig) -> str:
    """Return a hint if a script refuses an argument that is a flag of the run, else nothing."""
    typed = [word.partition("=")[0] for word in config.command[1:]]
    forms = {
        word: rf"(?<![\w-]){word}(?![\w-])|(?:flag|argument) '{word.strip('-')}'" for word in typed if word in FLAGS
    }
    refused = [word for word, form in forms.items() if re.search(form, text)]
    if not refused or not REFUSAL.search(text):
        return ""
    return f"; {refused[0]} is a flag of ray-on-ecs run, and belongs before {config.command[0]}"


def bus_error_hint(status: int, text: str) -> str:
    """Return the likely cause of a bus error, else nothing; PyTorch's own message may have it."""
    is_bus_error = status in (-signal.SIGBUS, 128 + signal.SIGBUS) or "Bus error" in text
    return "; the shared memory (/dev/shm) may be full" if is_bus_error and "shared memory" not in text else ""


def access_denied_hint(text: str, config: RunConfig) -> str:
    """Return what tasks may do if a script's last words say that AWS refused it, else nothing."""
    if not re.search("ACCESS_DENIED|AccessDenied", text) or not config.storage_path.startswith("s3://"):
        return ""
    default = ", where Ray's results are if the program names no storage_path" if config.driver else ""
    return f"; tasks may write below {config.storage_path}{default}, and read the buckets of dataBuckets"


def picture_of(workers: WorkerStatuses, ranks: Sequence[WorkerRank], config: RunConfig, request: str = "") -> Picture:
    """Return the places of all ranks by the stacks of the workers, which answer a request or are of a hang.

    With --mpi and --per-node the first worker of a node has the processes of all its ranks.
    """
    having = [each.rank for each in ranks if each.local_rank == 0 or not (config.mpi or config.per_node)]
    stacks = {rank: _stacks_or_reason(workers.get(rank), request) for rank in having}
    silent = min((worker.silent_seconds for worker in workers.values()), default=0.0)
    return picture(stacks, silent)


def _stacks_or_reason(worker: WorkerStatus | None, request: str) -> Stacks | str:
    if worker is None or worker.started_at is None:
        return "has not started"
    if worker.stacks and worker.stacks.request == request:
        return worker.stacks
    if worker.has_ended:
        return f"has ended with exit status {worker.status}"
    return "has not answered"


def store_stacks(found: Picture, workers: WorkerStatuses, storage: RunStorage, request: str = "") -> str:
    """Store the stacks of the ranks together, then by workers; return the folder, or why there is none.

    The ID of a command's request names the folder.
    """
    name = request if request not in ("", SILENT) else f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder = f"{layout.STACKS_FOLDER}/{name}"
    try:
        storage.write(f"{folder}/{layout.STACKS}", found.text())
        for rank, worker in workers.items():
            stacks = _stacks_or_reason(worker, request)
            if isinstance(stacks, Stacks):
                storage.write(f"{folder}/rank_{rank}.txt", str(stacks) or "It runs no Python process.\n")
            elif worker.status != 0:
                storage.write(f"{folder}/rank_{rank}.txt", f"It {stacks}.\n")
    except OSError as cause:
        return f"no place: they could not be stored ({short_reason(cause)})"
    return f"{storage.uri}/{folder}"


def write_error(failure: Failure, decision: Raise, config: RunConfig, storage: RunStorage) -> TrainingError:
    """Write `error.json`, and return the error to raise: the cause, the file, and the command that resumes the run."""
    if not decision.is_recorded:
        return decision.error(decision.line)
    document = {
        "run_name": storage.run_name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": failure.what,
        "rank": failure.rank,
        "where": failure.where,
        "log": list(failure.log),
        "stacks": failure.stacks,
        "next": shlex.join(config.next_command()),
    }
    try:
        storage.write_json(layout.ERROR, document)
        see = f"see {storage.uri}/{layout.ERROR}"
    except OSError as cause:
        see = f"{layout.ERROR} could not be written to {storage.uri} ({one_line(cause)})"
    correct = "correct the script; " if (failure.status or 0) > 0 else ""  # it ended by itself, and would do so again
    return decision.error(f"{decision.line}; {see}; {correct}{resume_line(config.run_name)}")
