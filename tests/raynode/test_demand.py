"""The number of GPUs that the cluster needs, by rule; tests/commands/test_ray.py reads them from a real Ray."""

import pytest

from raynode.demand import GpuDemand


@pytest.mark.parametrize(
    ("demand", "wanted"),
    [
        (GpuDemand(), 0),
        (GpuDemand(gpus_waiting=3), 3),
        (GpuDemand(gpus=4, gpus_waiting=1), 1),
        (GpuDemand(gpus=4), 0),
        (GpuDemand(gpus=4, gpus_used=1), 4),
        (GpuDemand(gpus=4, cpus_used=1), 4),
        (GpuDemand(gpus=4, gpus_used=3, gpus_waiting=1), 4),
        (GpuDemand(gpus=4, gpus_used=4, gpus_waiting=2), 6),
        (GpuDemand(cpus_waiting=8), 1),
        (GpuDemand(cpus_waiting=2, gpus_waiting=2), 2),
        (GpuDemand(gpus=1, gpus_used=1, cpus_waiting=8), 1),
        (GpuDemand(gpus_waiting=0.5), 1),
        (GpuDemand(gpus=1, gpus_used=0.1 + 0.2 + 0.7, gpus_waiting=0.1 + 0.2 + 0.7), 2),
        (GpuDemand(gpus=4, gpus_requested=2), 2),
        (GpuDemand(gpus_requested=2, gpus_waiting=3), 3),
    ],
    ids=[
        "an empty cluster needs none",
        "pending work is served",
        "with nothing in use the unused are stopped",
        "with nothing in use and nothing pending all are stopped",
        "while a GPU is in use none is stopped",
        "while a CPU is in use none is stopped",
        "free GPUs are used first",
        "pending work is added to what is used",
        "work for CPUs needs a worker",
        "which pending GPUs bring along",
        "or a worker that is there",
        "a fraction of a GPU is a GPU",
        "but a rounding error is none",
        "requested GPUs are kept",
        "and more can be needed",
    ],
)
def test_the_number_of_gpus_that_the_cluster_should_have(demand: GpuDemand, wanted: int) -> None:
    assert demand.gpus_needed == wanted
