"""The names of the files and folders in a run's folder, and its format."""

# The format of the folder, the settings and the checkpoints included; a run of another one is refused.
FORMAT = 1

SETTINGS = "config.json"
METRICS = "metrics.jsonl"
# In S3 what is to be added to it while a script runs.
METRICS_PARTS = "metrics"
# The files that Ray Train and Ray Tune store for a Ray program.
RAY_FOLDER = "ray"
# Its trials of Ray Tune, with their parameters and last metrics.
TRIALS = "trials.json"
EVENTS = "tensorboard/events.out.tfevents.training"
RESULT = "result.json"
ERROR = "error.json"
STATUS = "status.json"
# States in it of a run that is not over.
UNDER_WAY = ("queued", "waiting", "training")
REPORT = "report.html"
LOCK = "run.lock"
# The versions that pip has chosen for a script's requirements file.
PACKAGES = "packages.json"
CURVES = "curves.png"
STACKS_FOLDER = "stalls"
# What each command on the run has printed, as a file named after the moment when it began.
LOGS = "logs"
# The files that a user's script has created or changed in its working directory: FILES is the manifest of the last
# complete snapshot, PARTS_FOLDER has those of single nodes.
FILES = "files.json"
FILES_FOLDER = "files"
VERSIONS_FOLDER = "versions"
PARTS_FOLDER = "parts"

# The checkpoints of a script's Checkpointer, each a folder `step-<number>` of torch.distributed.checkpoint: a file from
# each rank, METADATA and, written last, a MANIFEST.
CHECKPOINTS_FOLDER = "checkpoints"
METADATA = ".metadata"
MANIFEST = "checkpoint.json"
