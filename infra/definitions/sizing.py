"""What one task may take of its instance: CPU, memory, GPUs, shared memory and Ray's object store.

Pure arithmetic on the facts of an instance type; plan.py asks EC2 for them. One task fills one instance, so every
number follows from the instance type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.errors import SettingError

MIB = 2**20
# The image is built for this architecture alone.
ARCHITECTURE = "x86_64"
SMALLEST_HEAD_MIB = 8192
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task_definition_parameters_ec2.html
MOST_VCPUS = 192
# Below compute capability 7.5, the lowest that PyTorch's CUDA 13 builds hold kernels for.
# https://docs.pytorch.org/get-started/ and https://developer.nvidia.com/cuda-gpus
GPUS_TOO_OLD = ("GRID K520", "K80", "M60", "V100")


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """The facts of an EC2 instance type that decide what runs on it."""

    name: str
    vcpus: int
    memory_mib: int
    architectures: tuple[str, ...]
    gpus: int = 0
    gpu_name: str = ""
    gpu_manufacturer: str = ""
    gpu_memory_mib: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskSize:
    """What one task takes; the rest is derived, so that the numbers cannot contradict each other."""

    vcpus: int
    memory_mib: int
    gpus: int

    @property
    def cpu_units(self) -> int:
        """ECS's unit, 1024 to a vCPU."""
        return self.vcpus * 1024

    @property
    def shared_memory_mib(self) -> int:
        """Size of /dev/shm, which counts against the task's memory: Ray's object store and data loaders' batches."""
        return self.memory_mib * 30 // 100

    @property
    def object_store_bytes(self) -> int:
        """Size of Ray's object store, which lies in /dev/shm and leaves a third of that to data loaders."""
        return self.memory_mib * 20 // 100 * MIB


def head_size(key: str, instances: Sequence[InstanceType]) -> TaskSize:
    """Size of the head's task; SettingError, which names `key`, where a type cannot carry it."""
    for instance in instances:
        if instance.memory_mib < SMALLEST_HEAD_MIB:
            problem = (
                f"has {instance.memory_mib} MiB of memory, less than the {SMALLEST_HEAD_MIB} that Ray's head needs"
            )
            raise SettingError(key, instance.name, problem, "give a larger type, such as m5.xlarge")
    return cpu_worker_size(key, instances)


def cpu_worker_size(key: str, instances: Sequence[InstanceType]) -> TaskSize:
    """Size of a CPU worker's task; SettingError where the image does not run on a type."""
    for instance in instances:
        _check_architecture(key, instance)
    return _fits_all(instances, gpus=0)


def worker_size(key: str, instances: Sequence[InstanceType]) -> TaskSize:
    """Size of one worker's task, with every GPU of the instance; SettingError where PyTorch cannot use a type.

    One task definition serves all types, and ECS gives a task the number of GPUs that this says.
    """
    for instance in instances:
        _check_architecture(key, instance)
        _check_gpus(key, instance)
    first, *others = instances
    for other in others:
        if other.gpus != first.gpus:
            problem = f"has {other.gpus} GPU{'s' if other.gpus > 1 else ''}, and {first.name} has {first.gpus}"
            raise SettingError(key, other.name, problem, "give types with as many GPUs each")
    return _fits_all(instances, gpus=first.gpus)


def _fits_all(instances: Sequence[InstanceType], *, gpus: int) -> TaskSize:
    memory_mib = min(task_memory_mib(each.memory_mib) for each in instances)
    return TaskSize(vcpus=min(MOST_VCPUS, *(each.vcpus for each in instances)), memory_mib=memory_mib, gpus=gpus)


def task_memory_mib(nominal_mib: int) -> int:
    """Memory that a task can ask for on an instance of this nominal size.

    ECS places a task on what the kernel reports, some 3 % below the nominal size, less what the agent holds back: a
    task that asks for more is never placed, and the service waits without an error.
    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/memory-management.html
    """
    usable = nominal_mib - 1024 - nominal_mib * 5 // 100
    return usable // 256 * 256


def _check_architecture(key: str, instance: InstanceType) -> None:
    if ARCHITECTURE not in instance.architectures:
        problem = f"runs {', '.join(instance.architectures)} and the image is built for {ARCHITECTURE}"
        raise SettingError(key, instance.name, problem, "give an Intel or AMD type")


def _check_gpus(key: str, instance: InstanceType) -> None:
    hint = "give a type with NVIDIA GPUs, such as g5.xlarge (1 GPU) or g5.12xlarge (4 GPUs)"
    if instance.gpus == 0:
        raise SettingError(key, instance.name, "has no whole GPU", hint)
    if instance.gpu_manufacturer != "NVIDIA":
        raise SettingError(
            key, instance.name, f"has GPUs of {instance.gpu_manufacturer}, which CUDA does not run on", hint
        )
    if instance.gpu_name in GPUS_TOO_OLD:
        raise SettingError(key, instance.name, f"has {instance.gpu_name} GPUs, too old for PyTorch's CUDA 13", hint)
