"""EFA (Elastic Fabric Adapter): network interfaces of an instance, devices of its task, and the driver on the host."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# ECS attaches the network interface of a task in awsvpc mode to the first network card, beside the primary one.
# https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-networking-awsvpc.html
TASK_SLOTS = 2


def cards(*, interfaces: int, network_cards: int, slots: int) -> tuple[int, ...]:
    """Network cards that can have an EFA beside a task, which needs one of the `slots` of the first card.

    P6-B300 has 17 cards, and no EFA on the first. Other types have one EFA on each card; another number is not known.
    https://github.com/aws/aws-parallelcluster/issues/7143
    """
    without = network_cards - interfaces
    return tuple(range(without, network_cards)) if without in (0, 1) and slots >= TASK_SLOTS else ()


def interfaces(efa_cards: Collection[int]) -> dict[int, str]:
    """Type of the network interface on each card, all of device index 0; `interface` is an ordinary one (ENA).

    AWS recommends `interface` and `efa-only` on the first card. These take both slots of a p5.48xlarge, and leave none
    for the task, so there it is `efa`, which is both in one. The others have no IP address.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    first = "efa" if 0 in efa_cards else "interface"
    return {0: first} | {card: "efa-only" for card in efa_cards if card}


def devices(number: int) -> list[dict[str, Any]]:
    """Devices of a container; its task does not start if the host lacks one.

    https://docs.aws.amazon.com/batch/latest/userguide/efa.html
    """
    paths = [f"/dev/infiniband/uverbs{index}" for index in range(number)]
    permissions = ["read", "write", "mknod"]
    return [{"hostPath": path, "containerPath": path, "permissions": permissions} for path in paths]


def load_driver(number: int) -> str:
    """Shell commands that load the driver at each boot, before ECS's agent.

    The kernel of Amazon Linux 2023 has the driver, and udev loads it. AWS does not say so of the ECS-optimized AMI. An
    instance that lacks a device, whose task could not start, says so on its console and shuts down before it joins.
    https://github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/313
    """
    return f"""
echo efa > /etc/modules-load.d/efa.conf
modprobe efa
udevadm settle --timeout 60
found=$(compgen -G '/dev/infiniband/uverbs*' | wc -l)
if ((found < {number})); then
  echo "EFA: $found of {number} devices: this instance does not join, and shuts down (docs/efa.md)" > /dev/console
  shutdown -h now
  exit 1
fi
"""
