"""Clients of ECS and EC2 Auto Scaling whose answers the simulator gives (tests/scaling_simulator.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.scaling_simulator import Simulator

EPOCH = 1_800_000_000  # Unix time of the simulator's begin


class Lost(Exception):
    """The call has succeeded, and its answer is lost."""


class Refused(Exception):
    """AWS refuses the call."""


class HeadDied(BaseException):
    """The head ends in the middle of a look, and its call has been made or not."""

    def __init__(self, is_made: bool = True) -> None:
        self.is_made = is_made


class Api:
    """boto3's clients of ECS and EC2 Auto Scaling, for the kinds of worker of these simulators."""

    def __init__(self, *parts: Simulator) -> None:
        self._parts = parts

    def _part(self, name: str) -> Simulator:
        """Return the simulator with this service, group or instance."""
        [part] = [
            part
            for part in self._parts
            if name in (part.kind, f"{part.kind}-group", *(instance.instance_id for instance in part.instances))
        ]
        return part

    def _change(self, part: Simulator, name: str, change: Callable[[], None], detail: Any) -> None:
        part.calls.append((part.now, name, detail))
        try:
            part.on_call(name)
        except (Lost, HeadDied) as end:
            if isinstance(end, Lost) or end.is_made:
                change()
            raise
        change()

    def describe_services(self, cluster: str, services: list[str]) -> dict[str, Any]:
        assert 0 < len(services) <= 10
        for part in self._parts:
            part.looks += 1
        return {"services": [self._part(name.removeprefix("arn/")).answers()[0] for name in services]}

    def describe_auto_scaling_groups(self, AutoScalingGroupNames: list[str]) -> dict[str, Any]:
        assert AutoScalingGroupNames
        return {"AutoScalingGroups": [self._part(name).answers()[1] for name in AutoScalingGroupNames]}

    def get_paginator(self, name: str) -> Any:
        pages = {"list_services": self._services, "list_container_instances": self._instances}
        return SimpleNamespace(paginate=lambda cluster: pages[name]())

    def _services(self) -> list[dict[str, Any]]:
        """Return pages with one service each, as AWS may."""
        return [{"serviceArns": [f"arn/{part.kind}"]} for part in self._parts]

    def _instances(self) -> list[dict[str, Any]]:
        known = [
            instance.instance_id
            for part in self._parts
            for instance in part.instances
            if instance.has_registered(part.now) and part.now < instance.ending_at
        ]
        return [{"containerInstanceArns": known}]

    def describe_container_instances(self, cluster: str, containerInstances: list[str]) -> dict[str, Any]:
        found = [(part, instance) for part in self._parts for instance in part.instances]
        return {
            "containerInstances": [
                {
                    "ec2InstanceId": each.instance_id,
                    "capacityProviderName": f"{part.kind}-provider",
                    "runningTasksCount": int(each.task_at <= part.now),
                    "pendingTasksCount": int(part.now < each.task_at < math.inf),
                    "registeredAt": datetime.fromtimestamp(EPOCH + each.registers_at, UTC),
                    "status": "ACTIVE",
                }
                for part, each in found
                if each.instance_id in containerInstances
            ]
        }

    def update_service(
        self, cluster: str, service: str, desiredCount: int | None = None, forceNewDeployment: bool = False
    ) -> None:
        part = self._part(service)

        def change() -> None:
            part.count = number

        number = part.count if desiredCount is None else desiredCount
        assert 0 <= number <= part.most
        if forceNewDeployment:
            self._change(part, "Redeploy", part.deploy, None)
        else:
            self._change(part, "SetCount", change, desiredCount)

    def set_desired_capacity(self, AutoScalingGroupName: str, DesiredCapacity: int, HonorCooldown: bool) -> None:
        part = self._part(AutoScalingGroupName)

        def change() -> None:
            part.capacity = DesiredCapacity

        assert 0 <= DesiredCapacity <= part.most
        assert not HonorCooldown
        self._change(part, "SetCapacity", change, DesiredCapacity)

    def terminate_instance_in_auto_scaling_group(self, InstanceId: str, ShouldDecrementDesiredCapacity: bool) -> None:
        assert ShouldDecrementDesiredCapacity
        part = self._part(InstanceId)
        self._change(part, "End", lambda: part.end_instance(InstanceId), InstanceId)
