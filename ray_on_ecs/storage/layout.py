"""Layout of a run's folder: file names and format version."""

import re

# Version of the folder and its settings (checkpoints and snapshots have other numbers); a run with another one is
# refused.
FORMAT = 1

SETTINGS = "run.json"
METRICS = "metrics.jsonl"
# The records since the last merge into METRICS.
METRICS_PARTS = "metrics"
# The files that Ray Train and Ray Tune store for a Ray program.
RAY_FOLDER = "ray"
# Ray Tune's trials, with their parameters and last metrics.
TRIALS = "trials.json"
EVENTS = "tensorboard/events.out.tfevents.training"
RESULT = "result.json"
ERROR = "error.json"
STATUS = "status.json"
# Values of its `state` while a command runs.
UNDER_WAY = ("queued", "waiting", "training")
REPORT = "report.html"
LOCK = "run.lock"
# The versions that pip resolved for a script's requirements file.
PACKAGES = "packages.json"
CURVES = "curves.png"
# The first bytes of such a picture: a browser that opens it runs nothing.
PNG = b"\x89PNG\r\n\x1a\n"
# Stacks of all ranks, in a folder for each hang and each request; in it, STACKS has them by groups.
STACKS_FOLDER, STACKS = "stalls", "stacks.txt"
# A log file per command on the run, named by its start time.
LOGS = "logs"
# The files that a user's script has created or changed in its working directory: FILES is the manifest of the last
# complete snapshot, and PARTS_FOLDER has the manifests of single nodes.
FILES = "files.json"
FILES_FOLDER = "files"
VERSIONS_FOLDER = "versions"
PARTS_FOLDER = "parts"

# The checkpoints of a script's Checkpointer: a torch.distributed.checkpoint folder `step-<number>` each, with a file
# per rank, METADATA and, written last, a MANIFEST.
CHECKPOINTS_FOLDER = "checkpoints"
METADATA, CHECKPOINT_SUFFIX = ".metadata", ".distcp"
MANIFEST = "checkpoint.json"
STEP_FOLDER = re.compile(r"step-(\d{9,18})(?:-(\d{1,9}))?", re.ASCII)
# A Checkpointer with a folder has its checkpoints in that folder of the run, which is none of these.
NO_CHECKPOINTS = (
    FILES_FOLDER,
    VERSIONS_FOLDER,
    PARTS_FOLDER,
    LOGS,
    METRICS_PARTS,
    RAY_FOLDER,
    STACKS_FOLDER,
    "tensorboard",
)


def step_order(name: str) -> tuple[int, ...]:
    """Return the step of a checkpoint's folder and its number among those of that step; () for another name."""
    found = STEP_FOLDER.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else ()


def page_url(value: object) -> str | None:
    """Return the address in a run's status of its page at an experiment tracker, if a browser may open it, or None."""
    is_page = isinstance(value, str) and re.fullmatch(r"https?://[!-~]+", value) and not re.search(r"[\"'<>\\]", value)
    return str(value) if is_page else None
