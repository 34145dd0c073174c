"""Task sizes: CPU, memory, GPUs, shared memory and Ray's object store, from the instance type; and its disk's speed.

One task fills one instance, so every number follows from EC2's description of the type, which plan.py looks up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infra.errors import SettingError

MIB = 2**20
# Platform of the training image.
ARCHITECTURE = "x86_64"
# Memory of the smallest node without GPUs, whose task has 2.7 GiB: on a head, eight runs of scripts, the dashboard and
# a quarter more take 2.1. docs/design/measurements.md
SMALLEST_MIB = 4096
# Prefetch window of Mountpoint for S3 for each reader of a file (2 GiB by default), and the memory that it needs beside
# that. It takes up to 95 % of the instance's memory. Version 1.24 is the first with an option for less
# (--memory-target).
# https://github.com/awslabs/mountpoint-s3/blob/main/doc/CONFIGURATION.md#maximum-prefetch-window-size
PREFETCH_MIB, MOUNTPOINT_MIB = 64, 256
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task_definition_parameters_ec2.html
MOST_VCPUS = 192
# Throughput of a gp3 volume in MiB/s that its price includes, the most that can be provisioned, and the IOPS that the
# price includes, of which each allows a quarter of a MiB/s.
# https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html
GP3_MIB, GP3_MOST_MIB, GP3_IOPS = 125, 1000, 3000
# Below compute capability 7.5, the lowest that PyTorch's CUDA 13 builds hold kernels for.
# https://docs.pytorch.org/get-started/ and https://developer.nvidia.com/cuda-gpus
GPUS_TOO_OLD = ("GRID K520", "K80", "M60", "V100")


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """Attributes of an EC2 instance type that determine task size, disk and machine image.

    `disk_mb` is the most that EBS reads or writes for it, in MB/s; some types have it for half an hour a day.
    `local_disk_gb` is the size of its local SSDs together.
    `accelerators` are the names of those that are not GPUs: AWS Trainium and Inferentia, FPGAs, video. `efa_cards` are
    the network cards of instances with GPUs that can have an EFA. `network_gbits` is its baseline bandwidth in
    Gbit/s.
    """

    name: str
    vcpus: int
    memory_mib: int
    architectures: tuple[str, ...]
    gpus: int = 0
    gpu_name: str = ""
    gpu_manufacturer: str = ""
    gpu_memory_mib: int = 0
    boot_modes: tuple[str, ...] = ()
    tpm: bool = False
    disk_mb: float = 0
    local_disk_gb: int = 0
    accelerators: tuple[str, ...] = ()
    efa_cards: tuple[int, ...] = ()
    network_gbits: float = 0


@dataclass(frozen=True, kw_only=True)
class TaskSize:
    """Size of one task; shared memory and object store are derived from its memory."""

    vcpus: int
    memory_mib: int
    gpus: int

    @property
    def cpu_units(self) -> int:
        """CPU units of ECS, 1024 per vCPU."""
        return self.vcpus * 1024

    @property
    def shared_memory_mib(self) -> int:
        """Size of /dev/shm, which counts against the task's memory: Ray's object store and batches of data loaders."""
        return self.memory_mib * 30 // 100

    @property
    def object_store_bytes(self) -> int:
        """Size of Ray's object store in /dev/shm, of which a third is left to data loaders."""
        return self.memory_mib * 20 // 100 * MIB


def beside_mountpoint(size: TaskSize) -> TaskSize:
    """Size of a task whose instance also has Mountpoint for S3, with a reader on each vCPU."""
    taken = MOUNTPOINT_MIB + PREFETCH_MIB * size.vcpus
    return replace(size, memory_mib=(size.memory_mib - taken) // 256 * 256)


def network_gbits(cards: Sequence[float], performance: str) -> float:
    """Baseline bandwidth in Gbit/s of network cards with these; EC2 names some types' whole bandwidth for each card.

    `performance` is EC2's name of the whole, such as `Up to 10 Gigabit`, `4x 100 Gigabit` or `400 Gigabit`.
    """
    found = re.fullmatch(r"(?:Up to )?(?:(\d+)x )?([\d.]+) Gigabit", performance)
    most = int(found[1] or 1) * float(found[2]) if found else math.inf
    return min(sum(cards), most)


def disk_throughput(instances: Sequence[InstanceType]) -> int:
    """Throughput of the root volume in MiB/s, which bounds how fast an instance unpacks the image.

    One launch template serves all types. The slowest counts: its instances would pay for more and not have it.
    """
    slowest = min(instance.disk_mb for instance in instances) * 10**6 / MIB
    return round(max(GP3_MIB, min(slowest, GP3_MOST_MIB, GP3_IOPS / 4)))


def cpu_size(key: str, instances: Sequence[InstanceType]) -> TaskSize:
    """Size of the task of the head or a CPU worker; SettingError for `key` if a type is unsuitable."""
    for instance in instances:
        _check_processors(key, instance)
        if instance.memory_mib < SMALLEST_MIB:
            problem = f"has {instance.memory_mib} MiB of memory, but a Ray node needs {SMALLEST_MIB}"
            raise SettingError(key, instance.name, problem, "use a larger type, e.g. m5.large")
    return _fits_all(instances, gpus=0)


def worker_size(key: str, instances: Sequence[InstanceType]) -> TaskSize:
    """Size of a GPU worker's task, with all GPUs of the instance; SettingError for `key` if a type is unsuitable.

    All types share one task definition, which has a fixed number of GPUs.
    """
    for instance in instances:
        _check_processors(key, instance)
        _check_gpus(key, instance)
    first, *others = instances
    for other in others:
        if other.gpus != first.gpus:
            if other.gpu_name == first.gpu_name:
                problem = f"has {other.gpus} GPU{'s' if other.gpus > 1 else ''}, but {first.name} has {first.gpus}"
                raise SettingError(key, other.name, problem, "use types with the same number of GPUs")
            problem = f"has {other.gpus} x {other.gpu_name}, but {first.name} has {first.gpus} x {first.gpu_name}"
            raise SettingError(key, other.name, problem, "use types with equal GPUs, and a pool for each other kind")
    return _fits_all(instances, gpus=first.gpus)


def _fits_all(instances: Sequence[InstanceType], *, gpus: int) -> TaskSize:
    memory_mib = min(task_memory_mib(instance.memory_mib) for instance in instances)
    vcpus = min(MOST_VCPUS, *(instance.vcpus for instance in instances))
    return TaskSize(vcpus=vcpus, memory_mib=memory_mib, gpus=gpus)


def task_memory_mib(nominal_mib: int) -> int:
    """Memory that a task can request on an instance with this nominal memory.

    ECS places tasks by the memory that the kernel reports, some 3 % below the nominal size, minus ECS_RESERVED_MEMORY.
    A task that requests more is never placed, and its service waits without an error.
    https://docs.aws.amazon.com/AmazonECS/latest/developerguide/memory-management.html
    """
    usable = nominal_mib - 1024 - nominal_mib * 5 // 100
    return usable // 256 * 256


def _check_processors(key: str, instance: InstanceType) -> None:
    if ARCHITECTURE not in instance.architectures:
        problem = f"is {', '.join(instance.architectures)}, but the image is built for {ARCHITECTURE}"
        raise SettingError(key, instance.name, problem, "use an Intel or AMD type")
    if instance.accelerators:
        problem = f"has {' and '.join(instance.accelerators)}, which the image does not support"
        raise SettingError(key, instance.name, problem, "use a type with NVIDIA GPUs, or without accelerators")


def _check_gpus(key: str, instance: InstanceType) -> None:
    hint = "use a type with NVIDIA GPUs, e.g. g5.xlarge (1 GPU) or g5.12xlarge (4 GPUs)"
    if instance.gpus == 0:  # also for a fraction of a GPU
        raise SettingError(key, instance.name, "does not have a whole GPU", hint)
    if instance.gpu_manufacturer != "NVIDIA":
        problem = f"has {instance.gpu_manufacturer} GPUs, which do not support CUDA"
        raise SettingError(key, instance.name, problem, hint)
    if instance.gpu_name in GPUS_TOO_OLD:
        raise SettingError(key, instance.name, f"has {instance.gpu_name} GPUs, too old for PyTorch's CUDA 13", hint)
