"""What the cluster needs, by rule; tests/commands/test_ray.py has what a real Ray tells."""

import pytest

from raynode.demand import Demand


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (Demand(), 0),
        (Demand(gpus_waiting=3), 3),
        (Demand(gpus=4, gpus_waiting=1), 1),
        (Demand(gpus=4), 0),
        (Demand(gpus=4, gpus_used=1), 4),
        (Demand(gpus=4, cpus_used=1), 4),
        (Demand(gpus=4, gpus_used=3, gpus_waiting=1), 4),
        (Demand(gpus=4, gpus_used=4, gpus_waiting=2), 6),
        (Demand(cpus_waiting=8), 1),
        (Demand(cpus_waiting=2, gpus_waiting=2), 2),
        (Demand(gpus=1, gpus_used=1, cpus_waiting=8), 1),
        (Demand(gpus_waiting=0.5), 1),
        (Demand(gpus=1, gpus_used=0.1 + 0.2 + 0.7, gpus_waiting=0.1 + 0.2 + 0.7), 2),
        (Demand(gpus=4, gpus_requested=2), 2),
        (Demand(gpus_requested=2, gpus_waiting=3), 3),
    ],
    ids=[
        "an empty cluster needs none",
        "what waits comes",
        "with nothing in use what is too many goes",
        "with nothing in use all go",
        "while a GPU is in use none goes",
        "while a CPU is in use none goes",
        "what is free is used first",
        "what waits comes on top of what is used",
        "work for CPUs needs a worker",
        "which others that wait bring along",
        "or one that is there",
        "a part of a GPU is a GPU",
        "but no more for the way that computers add",
        "what is requested stays",
        "and more can be needed",
    ],
)
def test_the_gpus_that_are_wanted(demand: Demand, wanted: int) -> None:
    assert demand.gpus_wanted == wanted
