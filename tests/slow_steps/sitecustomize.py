"""Slows and logs the steps of a script with a Checkpointer, for runs that tests and drills disturb.

Python imports this file when a process starts whose PYTHONPATH has this folder; the script itself is not changed. In
the folder that SLOW_STEPS names, `<run>.json` has `seconds`, which each step takes in addition, `fail_at`, the step of
each process that raises ValueError, or null, and the Checkpointer's `every_seconds`. Each rank appends the Unix time of
each of its steps to `<run>.steps`.
"""

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from ray_on_ecs import Checkpointer

RUN = Path(os.environ["SLOW_STEPS"], os.environ["RUN_NAME"])
SETTINGS = json.loads(RUN.with_suffix(".json").read_text())
STEPS = itertools.count(1)
after_step = Checkpointer.after_step


def after_slow_step(self: Checkpointer, samples: int = 0, **metrics: Any) -> bool:
    if next(STEPS) == SETTINGS["fail_at"]:
        print("about to fail", flush=True)
        raise ValueError("this step is broken")
    time.sleep(SETTINGS["seconds"])
    with RUN.with_suffix(".steps").open("a") as log:
        log.write(f"{time.time()}\n")
    return after_step(self, samples=samples, **metrics)


Checkpointer.after_step = after_slow_step
Checkpointer.__init__.__kwdefaults__["every_seconds"] = SETTINGS["every_seconds"]  # ty: ignore[invalid-assignment]
