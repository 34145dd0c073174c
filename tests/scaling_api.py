"""Clients of ECS and EC2 Auto Scaling whose answers the simulator gives (tests/scaling_simulator.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
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
    """boto3's clients of ECS and EC2 Auto Scaling."""

    def __init__(self, simulator: Simulator) -> None:
        self._of = simulator

    def _change(self, name: str, change: Callable[[], None], detail: Any) -> None:
        self._of.calls.append((self._of.now, name, detail))
        try:
            self._of.on_call(name)
        except (Lost, HeadDied) as end:
            if isinstance(end, Lost) or end.is_made:
                change()
            raise
        change()

    def list_services(self, cluster: str, maxResults: int) -> dict[str, Any]:
        return {"serviceArns": ["arn/workers"]}

    def describe_services(self, cluster: str, services: list[str]) -> dict[str, Any]:
        return {"services": [self._of.answers()[0]]}

    def describe_auto_scaling_groups(self, AutoScalingGroupNames: list[str]) -> dict[str, Any]:
        return {"AutoScalingGroups": [self._of.answers()[1]]}

    def get_paginator(self, name: str) -> Api:
        assert name == "list_container_instances"
        return self

    def paginate(self, cluster: str) -> list[dict[str, Any]]:
        known = [each for each in self._of.instances if each.has_registered(self._of.now)]
        return [{"containerInstanceArns": [each.instance_id for each in known if self._of.now < each.ending_at]}]

    def describe_container_instances(self, cluster: str, containerInstances: list[str]) -> dict[str, Any]:
        found = [each for each in self._of.instances if each.instance_id in containerInstances]
        return {
            "containerInstances": [
                {
                    "ec2InstanceId": each.instance_id,
                    "capacityProviderName": "workers-provider",
                    "runningTasksCount": int(each.task_at <= self._of.now),
                    "pendingTasksCount": int(self._of.now < each.task_at < math.inf),
                    "registeredAt": datetime.fromtimestamp(EPOCH + each.registers_at, UTC),
                    "status": "ACTIVE",
                }
                for each in found
            ]
        }

    def update_service(self, cluster: str, service: str, desiredCount: int) -> None:
        def change() -> None:
            self._of.count = desiredCount

        assert 0 <= desiredCount <= self._of.most
        self._change("SetCount", change, desiredCount)

    def set_desired_capacity(self, AutoScalingGroupName: str, DesiredCapacity: int, HonorCooldown: bool) -> None:
        def change() -> None:
            self._of.capacity = DesiredCapacity

        assert 0 <= DesiredCapacity <= self._of.most
        assert not HonorCooldown
        self._change("SetCapacity", change, DesiredCapacity)

    def terminate_instance_in_auto_scaling_group(self, InstanceId: str, ShouldDecrementDesiredCapacity: bool) -> None:
        assert ShouldDecrementDesiredCapacity
        self._change("End", lambda: self._of.end_instance(InstanceId), InstanceId)
