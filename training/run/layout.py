"""The names of the files and folders in a run's folder."""

SETTINGS = "config.json"
METRICS = "metrics.jsonl"
EVENTS = "tensorboard/events.out.tfevents.training"
RESULT = "result.json"
ERROR = "error.json"
LOCK = "run.lock"
CURVES = "curves.png"
WEIGHTS = "model.pt"
BEST_WEIGHTS = "best/model.pt"
STACKS_FOLDER = "stalls"

# A checkpoint is a folder `checkpoint_<step>`: the model's WEIGHTS, the TRAINING_STATE and, written last, a MANIFEST.
CHECKPOINT_PREFIX = "checkpoint_"
TRAINING_STATE = "training_state.pt"
MANIFEST = "checkpoint.json"
