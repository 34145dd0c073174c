"""Task sizes: examples, and properties of all EC2 instance types."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.definitions.sizing import (
    GPUS_TOO_OLD,
    InstanceType,
    TaskSize,
    beside_mountpoint,
    cpu_size,
    disk_throughput,
    task_memory_mib,
    worker_size,
)
from infra.errors import SettingError
from tests.infra.fake_aws import instance_types

MIB = 2**20
HEAD, WORKER = "headInstanceType", "workerInstanceTypes"
G5_XLARGE = InstanceType(
    name="g5.xlarge",
    vcpus=4,
    memory_mib=16384,
    architectures=("x86_64",),
    gpus=1,
    gpu_name="A10G",
    gpu_manufacturer="NVIDIA",
)
M5_XLARGE = InstanceType(name="m5.xlarge", vcpus=4, memory_mib=16384, architectures=("x86_64",))


def nominal_sizes() -> list[int]:
    """Memory of every EC2 type that carries a task at all."""
    sizes = {facts["MemoryInfo"]["SizeInMiB"] for facts in instance_types().values()}
    return sorted(size for size in sizes if size >= 8192)


def test_a_worker_takes_its_whole_instance() -> None:
    size = worker_size(WORKER, [G5_XLARGE])
    assert size == TaskSize(vcpus=4, memory_mib=14336, gpus=1)
    assert size.cpu_units == 4096
    assert size.shared_memory_mib == 4300
    assert size.object_store_bytes == 2867 * MIB


@pytest.mark.parametrize(("vcpus", "memory_mib", "left_mib"), [(2, 2816, 2304), (4, 14336, 13824)])
def test_a_task_leaves_room_for_mountpoint(vcpus: int, memory_mib: int, left_mib: int) -> None:
    size = TaskSize(vcpus=vcpus, memory_mib=memory_mib, gpus=1)
    assert beside_mountpoint(size) == replace(size, memory_mib=left_mib)


def test_a_worker_with_four_gpus_asks_for_four() -> None:
    size = worker_size(WORKER, [replace(G5_XLARGE, name="g5.12xlarge", vcpus=48, memory_mib=196608, gpus=4)])
    assert (size.gpus, size.vcpus) == (4, 48)


def test_head_takes_no_gpu_of_its_type() -> None:
    assert cpu_size(HEAD, [G5_XLARGE]).gpus == 0


def test_task_memory_leaves_room_for_the_agent() -> None:
    for nominal in nominal_sizes():
        memory = task_memory_mib(nominal)
        kernel, agent = nominal * 3 // 100, 256
        assert 0 < memory <= nominal - kernel - agent, f"{nominal} MiB: task too large to be placed"
        assert memory >= nominal * 75 // 100, f"{nominal} MiB: unused memory"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"gpus": 0, "gpu_name": "", "gpu_manufacturer": ""}, "does not have a whole GPU"),
        ({"gpu_manufacturer": "AMD", "gpu_name": "Radeon Pro V520"}, "has AMD GPUs"),
        ({"gpu_name": "V100"}, "too old for PyTorch's CUDA 13"),
        ({"gpu_name": "K80"}, "too old for PyTorch's CUDA 13"),
        ({"gpu_name": "M60"}, "too old for PyTorch's CUDA 13"),
        ({"architectures": ("arm64",)}, "is arm64, but the image is built for x86_64"),
    ],
)
def test_unsupported_worker_types_are_refused(change: dict, rule: str) -> None:
    with pytest.raises(SettingError, match=rule) as refused:
        worker_size(WORKER, [replace(G5_XLARGE, **change)])
    assert str(refused.value).startswith("workerInstanceTypes: 'g5.xlarge' ")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"memory_mib": 2048}, "has 2048 MiB of memory, but a Ray node needs 4096"),
        ({"architectures": ("arm64",)}, "is arm64, but the image is built for x86_64"),
    ],
)
def test_unsuitable_head_types_are_refused(change: dict, rule: str) -> None:
    with pytest.raises(SettingError, match=rule) as refused:
        cpu_size(HEAD, [replace(M5_XLARGE, **change)])
    assert str(refused.value).startswith("headInstanceType: 'm5.xlarge' ")


def gpu_types() -> dict[str, InstanceType]:
    """Every type of EC2's with NVIDIA GPUs that the image runs on."""
    types = {}
    for name, facts in instance_types().items():
        gpus = facts.get("GpuInfo", {}).get("Gpus", [])
        architectures = tuple(facts["ProcessorInfo"]["SupportedArchitectures"])
        if gpus and gpus[0]["Manufacturer"] == "NVIDIA" and gpus[0]["Count"] and "x86_64" in architectures:
            types[name] = InstanceType(
                name=name,
                vcpus=facts["VCpuInfo"]["DefaultVCpus"],
                memory_mib=facts["MemoryInfo"]["SizeInMiB"],
                architectures=architectures,
                gpus=sum(gpu["Count"] for gpu in gpus),
                gpu_name=gpus[0]["Name"],
                gpu_manufacturer="NVIDIA",
            )
    return types


def test_every_instance_type_is_sized_or_refused() -> None:
    too_old = {name: instance for name, instance in gpu_types().items() if instance.gpu_name in GPUS_TOO_OLD}
    for instance in too_old.values():
        with pytest.raises(SettingError, match="too old"):
            worker_size(WORKER, [instance])
    sized = {name: worker_size(WORKER, [instance]) for name, instance in gpu_types().items() if name not in too_old}
    for name, size in sized.items():
        instance = gpu_types()[name]
        assert (size.gpus, size.vcpus) == (instance.gpus, instance.vcpus), name
        assert 0 < size.object_store_bytes < size.shared_memory_mib * MIB < size.memory_mib * MIB, name
    assert {"g4dn", "g5", "g6", "g6e", "p4d", "p5", "p5en"} <= {name.split(".")[0] for name in sized}


@pytest.mark.parametrize("gpu", ["T4", "A10G", "L4", "L40S", "A100", "H100", "H200", "B200", "RTX PRO Server 6000"])
def test_every_gpu_since_turing_is_taken(gpu: str) -> None:
    assert worker_size(WORKER, [replace(G5_XLARGE, gpu_name=gpu)]).gpus == 1


def test_one_task_fits_on_every_type() -> None:
    larger = replace(G5_XLARGE, name="g6.2xlarge", vcpus=8, memory_mib=32768)
    assert worker_size(WORKER, [larger, G5_XLARGE]) == worker_size(WORKER, [G5_XLARGE])


def test_types_with_unlike_numbers_of_gpus_are_refused() -> None:
    four = replace(G5_XLARGE, name="g5.12xlarge", gpus=4)
    with pytest.raises(SettingError) as refused:
        worker_size(WORKER, [G5_XLARGE, four])
    assert str(refused.value) == (
        "workerInstanceTypes: 'g5.12xlarge' has 4 GPUs, but g5.xlarge has 1; use types with the same number of GPUs"
    )


def test_types_with_unlike_gpus_and_numbers_are_refused_with_both() -> None:
    eight = replace(G5_XLARGE, name="p5.48xlarge", gpus=8, gpu_name="H100")
    with pytest.raises(SettingError) as refused:
        worker_size(WORKER, [eight, G5_XLARGE])
    assert "'g5.xlarge' has 1 x A10G, but p5.48xlarge has 8 x H100; " in str(refused.value)


def test_cpu_worker_accepts_any_x86_type() -> None:
    small = replace(M5_XLARGE, name="c6i.large", vcpus=2, memory_mib=4096)
    assert cpu_size("cpuWorkerInstanceTypes", [small, M5_XLARGE]) == TaskSize(vcpus=2, memory_mib=2816, gpus=0)
    with pytest.raises(SettingError, match="arm64"):
        cpu_size("cpuWorkerInstanceTypes", [replace(small, architectures=("arm64",))])


def test_task_cpus_respect_the_ecs_maximum() -> None:
    largest = replace(G5_XLARGE, gpus=0, vcpus=448)
    size = cpu_size("cpuWorkerInstanceTypes", [largest])
    assert (size.vcpus, size.cpu_units) == (192, 196608)


@pytest.mark.parametrize(
    ("disks", "throughput"),
    [((437.5,), 417), ((593.75, 437.5), 417), ((60.0,), 125), ((0,), 125), ((2500.0,), 750)],
    ids=["of the type", "of the slowest", "never less than gp3 has", "unknown to EC2", "of 3,000 IOPS"],
)
def test_disk_is_as_fast_as_its_instances(disks: tuple[float, ...], throughput: int) -> None:
    assert disk_throughput([replace(G5_XLARGE, disk_mb=disk) for disk in disks]) == throughput
