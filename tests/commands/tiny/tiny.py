"""A training of a few steps that needs no PyTorch: it logs a loss, waits on request, and writes a model."""

import argparse
import os
import time
from pathlib import Path

import ray_on_ecs

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--hold", nargs=2, action="append", default=[], metavar=("STEP", "FILE"))
parser.add_argument("--refuse", action="store_true", help="end like a script that refuses its flags")
options = parser.parse_args()
if options.refuse:
    parser.exit(2, "tiny.py: error: refused\n")
holds = {int(step): Path(file) for step, file in options.hold}
for step in range(1, options.steps + 1):
    loss = 1 / step
    ray_on_ecs.progress(step)
    ray_on_ecs.log(loss=loss)
    print(f"step {step}: loss {loss:.2f}", flush=True)
    while step in holds and holds[step].exists():
        time.sleep(0.1)
if os.environ["RANK"] == "0":
    Path("model.txt").write_text(f"{loss:.2f}\n")
