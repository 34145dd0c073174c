"""AWS's answers about the nodes of one kind. A question that AWS refuses is noted, and the others are asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ray_on_ecs.aws import DENIED, Refused, client, translated
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.contract import DOCUMENTS_VARIABLE
from ray_on_ecs.errors import TrainingError, one_line
from ray_on_ecs.pools import gpus_of, siblings
from ray_on_ecs.starting.cause import Document, Nodes

# Number of scaling activities to read, the newest first.
ACTIVITIES = 50
# Number that DescribeContainerInstances and DescribeTasks take, and DescribeServices.
MOST, MOST_SERVICES = 100, 10
# Asks AWS by service and operation, with arguments; raises TrainingError.
Ask = Callable[..., Any]


def ask_soon(service: str, operation: str, **arguments: Any) -> Any:
    """Ask AWS as a driver, which gives up soon with a TrainingError: it waits on the same thread, and asks again."""
    with translated(service):
        return getattr(client(service, connect_seconds=2, read_seconds=3, attempts=1), operation)(**arguments)


class Look:
    """One look at a cluster; `unknown` has the reason why AWS has not answered a question, by IAM action."""

    def __init__(self, ask: Ask, cluster: str) -> None:
        self._ask, self._cluster = ask, cluster
        self._instances: list[Document] | None = None
        self.unknown: dict[str, str] = {}

    def listed(self, service: str, operation: str, key: str, **arguments: Any) -> list[Any] | None:
        """Return a list of AWS's answer, with all its pages; None if AWS has not answered."""
        found: list[Any] = []
        try:
            while True:
                answer = self._ask(service, operation, **arguments)
                found += answer[key]
                if not answer.get("nextToken"):
                    return found
                arguments["nextToken"] = answer["nextToken"]
        except (TrainingError, LookupError) as cause:
            action = f"{service}:{''.join(word.capitalize() for word in operation.split('_'))}"
            is_denied = isinstance(cause, Refused) and cause.code in DENIED
            self.unknown[action] = "is denied" if is_denied else f"failed ({one_line(cause)})"
            return None

    def services(self, names: Sequence[str] | None = None) -> list[Document]:
        """Return these services, by default all, as far as they are active."""
        if names is None:
            names = self.listed("ecs", "list_services", "serviceArns", cluster=self._cluster) or ()
        found = self._described("describe_services", "services", names, MOST_SERVICES)
        return [service for service in found or () if service.get("status") == "ACTIVE"]

    def group_of(self, service: Document | None) -> str | None:
        """Return the name of a service's Auto Scaling group."""
        provider = provider_of(service)
        which = {"capacityProviders": [provider]}
        found = self.listed("ecs", "describe_capacity_providers", "capacityProviders", **which) if provider else ()
        arns = [(each.get("autoScalingGroupProvider") or {}).get("autoScalingGroupArn") for each in found or ()]
        return arns[0].rpartition("autoScalingGroupName/")[2] if arns and arns[0] else None

    def group(self, name: str) -> Document | None:
        """Return an Auto Scaling group."""
        which = {"AutoScalingGroupNames": [name]}
        groups = self.listed("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", **which)
        return groups[0] if groups else None

    def nodes(self, service: Document | None, group: Document | None, **known: Any) -> Nodes:
        """Return what AWS tells of the nodes of a service and its group; `known` has answers and facts of the stack."""
        name = (group or {}).get("AutoScalingGroupName")
        if name and "activities" not in known:
            which = {"AutoScalingGroupName": name, "MaxRecords": ACTIVITIES}
            known["activities"] = self.listed("autoscaling", "describe_scaling_activities", "Activities", **which)
        if service:
            which = {"serviceName": service.get("serviceName"), "desiredStatus": "STOPPED"}
            arns = self.listed("ecs", "list_tasks", "taskArns", cluster=self._cluster, **which)
            known["stopped"] = self._described("describe_tasks", "tasks", arns)
        known["instances"] = self._instances_of(provider) if (provider := provider_of(service)) else None
        return Nodes(service=service, group=group, unknown=self.unknown, **known)

    def _instances_of(self, provider: str) -> list[Document] | None:
        if self._instances is None:  # those of all kinds
            arns = self.listed("ecs", "list_container_instances", "containerInstanceArns", cluster=self._cluster)
            self._instances = self._described("describe_container_instances", "containerInstances", arns)
        found = self._instances
        return found and [each for each in found if each.get("capacityProviderName") == provider]

    def _described(
        self, operation: str, key: str, names: Sequence[str] | None, most: int = MOST
    ) -> list[Document] | None:
        described: list[Document] = []
        for start in range(0, len(names or ()), most):
            part = {key: [*(names or ())][start : start + most]}
            described += self.listed("ecs", operation, key, cluster=self._cluster, **part) or ()
        return None if names is None or (names and not described) else described


def provider_of(service: Document | None) -> str:
    """Return the name of a service's capacity provider; empty without one."""
    strategy = (service or {}).get("capacityProviderStrategy") or ()
    return strategy[0].get("capacityProvider") or "" if strategy else ""


def facts_of(info: ClusterInfo, kind: str) -> dict[str, Any]:
    """Return the values of `Nodes` that the stack knows of a kind of node; none of the head's."""
    group = info["groups"].get(kind)
    return {"kind": kind, "pool": group["pool"], "types": group["types"], "gpus": gpus_of(group)} if group else {}


class WorkersLook:
    """Looks of a driver at the stack's workers of one kind."""

    def __init__(self, info: ClusterInfo, kind: str, ask: Ask = ask_soon) -> None:
        self._info, self._kind, self._ask = info, kind, ask
        self._services: list[str] = []  # names of those of the pool

    def nodes(self, group: Document | None, activities: Sequence[Document] | None) -> Nodes:
        """Return what AWS tells of the workers, with what it has told of their group."""
        known: dict[str, Any] = {"activities": activities, **facts_of(self._info, self._kind)}
        cluster = os.environ.get(DOCUMENTS_VARIABLE, "").rpartition("/")[2]
        if not cluster:
            return Nodes(group=group, **known)
        look = Look(self._ask, cluster)
        of_pool = (self._kind, *siblings(self._kind, self._info))
        kinds = {self._info["groups"][kind]["provider"]: kind for kind in of_pool}
        found = {kinds.get(provider_of(each)): each for each in look.services(self._services or None)}
        service = found.get(self._kind)
        self._services = [str(found[kind].get("serviceName")) for kind in of_pool if service and kind in found]
        known["elsewhere"] = sum(found[kind].get("runningCount", 0) for kind in of_pool[1:] if kind in found)
        return look.nodes(service, group, **known)
