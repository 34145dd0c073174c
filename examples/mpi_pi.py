"""mpi4py: processes that mpirun starts draw points, and save their sum.

mpirun -n 2 python -m mpi4py examples/mpi_pi.py
ray-on-ecs run --local --mpi --num-workers 2 --requirements examples/mpi.txt examples/mpi_pi.py

The file of packages brings an mpirun along: nothing has to be installed on the nodes.
"""

import argparse
import json
import random
from pathlib import Path

from mpi4py import MPI

POINTS = 100_000


def main() -> None:
    """Estimate pi from the share of random points that lie within the circle."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds

    world = MPI.COMM_WORLD
    file = Path("sums.json")
    saved = json.loads(file.read_text()) if world.rank == 0 and file.exists() else {"done": 0, "inside": 0, "drawn": 0}
    saved = world.bcast(saved)
    if saved["done"]:
        print(f"rank {world.rank}: resuming at round {saved['done']}")

    for done in range(saved["done"], rounds):
        draw = random.Random(f"{done} {world.rank}").random
        inside = sum(draw() ** 2 + draw() ** 2 < 1 for _ in range(POINTS))
        saved["inside"] += world.allreduce(inside)
        saved["drawn"] += world.allreduce(POINTS)
        saved["done"] = done + 1
        if world.rank == 0:
            print(f"round {done}: pi {4 * saved['inside'] / saved['drawn']:.4f}")
            file.with_suffix(".tmp").write_text(json.dumps(saved))
            file.with_suffix(".tmp").replace(file)  # whole or not at all


if __name__ == "__main__":
    main()
