"""Scaling of the workers by the head: a thread that sets ECS's and Auto Scaling's numbers as soon as demand is seen.

The scaling alarms do the same some minutes later (infra/node_scaling.py), and without a head. So a failure costs one
line, and the alarms go on. The thread runs in a stack, which describes its workers in the cluster info.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from ray_on_ecs.aws import client
from ray_on_ecs.cluster_info import ClusterInfo, NodeGroup, read_cluster_info
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE
from ray_on_ecs.jobs.record import RUN, THEN_STOP, Job, goes_on, last_jobs
from ray_on_ecs.node import demand, numbers, ports
from ray_on_ecs.node.demand import Need
from ray_on_ecs.node.numbers import COMPLETED, FAILED, IN_PROGRESS, Call, End, Host, Member, Memory, SetCount, View
from ray_on_ecs.node.outage import Outage
from ray_on_ecs.pools import Request
from ray_on_ecs.starting import deployments
from ray_on_ecs.starting.launches import at
from ray_on_ecs.starting.look import MOST, MOST_SERVICES, provider_of
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.places import pools_in

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
# Between two looks at AWS while nothing is requested, and nothing is left to be ended.
QUIET_SECONDS = 60.0
# After its end a run with --then-stop stops its workers for this long; the idle alarm has the rest.
THEN_STOP_SECONDS = 300.0
# The time after which Ray has freed what the run used, and in which other runs that are under way make their demand
# known, such as one that was queued behind it.
FREE_SECONDS, SETTLE_SECONDS = 15.0, 60.0
# Short, and without boto3's own repetitions: the next look tries again.
LIMITS = {"connect_seconds": 5, "read_seconds": 10, "attempts": 1}


def start(list_jobs: Callable[[], list[Job]], is_up: threading.Event) -> None:
    """Start the thread, if this is the head of a stack; it waits until Ray is up, and ends with this process."""
    if os.environ.get(CLUSTER_INFO_VARIABLE):
        threading.Thread(target=Scaler(list_jobs).run, args=(is_up,), name="scaling", daemon=True).start()


def pools_of(job: Job) -> list[str]:
    """Return the names of the pools that a job's run has used, by its record; any error if that can't be read."""
    name, storage_path = (job["metadata"][key] for key in RUN)
    return pools_in(RunStorage.open(storage_path, name, **LIMITS).read_json(layout.STATUS) or {})


class Scaler:
    """Scaling of all kinds of workers.

    `release` tells the idle nodes to release their tasks; `pools_of` returns the names of the pools that a job's run
    has used, none if they are not known.
    """

    def __init__(
        self,
        list_jobs: Callable[[], list[Job]],
        connect: Callable[[str], Any] = lambda service: client(service, **LIMITS),
        now: Callable[[], float] = time.time,
        release: Callable[[], None] = lambda: demand.release_idle(ports.own_gcs()),
        pools_of: Callable[[Job], Collection[str]] = pools_of,
    ) -> None:
        self._list_jobs, self._connect, self._now, self._release = list_jobs, connect, now, release
        self._pools_of = pools_of
        self._services: dict[str, str] = {}  # names by capacity provider
        self._memory: dict[str, Memory] = {}
        # Workers that each run with --then-stop has left, by the ID of its job and kind.
        self._left: dict[str, dict[str, int]] = {}
        self._unmet: set[str] = set()
        self._quiet_until = float("-inf")
        self._outages: dict[str, Outage] = {}

    def run(self, is_up: threading.Event) -> None:
        """Look until the process ends, from when Ray is up."""
        is_up.wait()
        while True:
            time.sleep(LOOK_SECONDS)
            self.try_to("read demand and numbers", self.look_at_ray)

    def look_at_ray(self) -> None:
        """Look at the demand and scale; any of Ray's or boto3's errors if one doesn't answer."""
        if (info := read_cluster_info()) and info["cluster"]:
            current = demand.read(ports.own_gcs(), info)
            self._name_unmet(current.unmet)
            self.look(info, current.needs)

    def _name_unmet(self, requests: Sequence[Request]) -> None:
        unmet = {str(request) for request in requests}
        for request in sorted(unmet - self._unmet):
            logger.warning(f"scaling: a program waits for {request} on one node, which no pool has")
        self._unmet = unmet

    def look(self, info: ClusterInfo, needs: Mapping[str, Need]) -> None:
        """Scale each kind of worker to its need, by the stack's description of them."""
        now = self._now()
        limits = numbers.in_pools(info, needs)
        if not limits:
            return
        jobs = self._list_jobs()
        ended = just_ended(jobs, now)
        is_short = any(numbers.is_short(needs[kind], each) for kind, each in limits.items())
        if not (is_short or ended or now >= self._quiet_until):
            return
        self._quiet_until = now + QUIET_SECONDS
        left = self._left_after(ended, jobs, needs, limits) | dict.fromkeys(numbers.giving_way(needs, limits), 0)
        services = self._read_services(info["cluster"], limits)
        groups = self._read_groups(limits)
        read_hosts = cache(partial(self._read_hosts, info["cluster"]))
        for kind, each in limits.items():
            if kind in services and kind in groups:
                scale = partial(self._scale, info["cluster"], kind, each, needs[kind], services[kind], groups[kind])
                self.try_to(f"read the instances of the {kind}", partial(scale, left.get(kind), read_hosts))

    def _left_after(
        self, ended: Sequence[Job], jobs: list[Job], needs: Mapping[str, Need], limits: Mapping[str, NodeGroup]
    ) -> dict[str, int]:
        """Return the workers to leave after runs with --then-stop that have ended, of the kinds that these used."""
        if new := [job for job in ended if job["submission_id"] not in self._left]:
            # Once: ECS may stop other idle nodes, and the run's nodes stay in their place.
            left = self._left_by(new, needs, limits)
            self._left |= {job["submission_id"]: left for job in new}
            if not any(map(goes_on, last_jobs(jobs))):  # else one may be between two starts of its workers
                self.try_to("release idle nodes", self._release)
        stopped = {job["submission_id"] for job in ended}
        merged: dict[str, int] = {}
        for job_id, left in self._left.items():  # the last look at a kind counts
            merged |= left if job_id in stopped else {}
        return merged

    def _left_by(
        self, jobs: Sequence[Job], needs: Mapping[str, Need], limits: Mapping[str, NodeGroup]
    ) -> dict[str, int]:
        """Return the workers that runs with --then-stop leave, of the kinds of their pools, or of all kinds."""
        left: dict[str, int] = {}
        for job in jobs:
            pools: Collection[str] = ()
            with suppress(Exception):  # without its record, which may be broken, it may have used any
                pools = self._pools_of(job)
            for kind, each in limits.items():
                if not pools or each["pool"] in pools:
                    number = numbers.left_by(needs[kind], each, job["start_time"] / 1000, self._now())
                    left[kind] = min(number, left.get(kind, number))
        return left

    def _scale(
        self,
        cluster: str,
        kind: str,
        limits: NodeGroup,
        need: Need,
        service: dict[str, Any],
        group: dict[str, Any],
        left: int | None,
        read_hosts: Callable[[], dict[str, dict[str, Host]]],
    ) -> None:
        memory = self._memory.get(kind, Memory())
        view = view_of(service, group)
        has_surplus = numbers.surplus(need, limits, view, memory) > 0
        if has_surplus or numbers.of_former_types(limits, view, memory):
            view = view_of(service, group, read_hosts().get(limits["provider"], {}))
        calls, self._memory[kind] = numbers.decide(need, limits, view, memory, self._now(), left)
        if calls or has_surplus or view.capacity > len(numbers.counted(view, memory)):
            self._quiet_until = float("-inf")  # the next look sees the effect
        for call in calls:
            name = type(call).__name__
            if not self.try_to(f"{name} of the {kind}", lambda call=call: self._make(call, cluster, service, group)):
                break

    def _make(self, call: Call, cluster: str, service: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        logger.debug(f"scaling: {service['serviceName']}: {call}")
        if isinstance(call, SetCount | numbers.Redeploy):
            change = {"desiredCount": call.number} if isinstance(call, SetCount) else {"forceNewDeployment": True}
            self._connect("ecs").update_service(cluster=cluster, service=service["serviceName"], **change)
        elif isinstance(call, End):
            self._connect("autoscaling").terminate_instance_in_auto_scaling_group(
                InstanceId=call.instance_id, ShouldDecrementDesiredCapacity=True
            )
        else:
            self._connect("autoscaling").set_desired_capacity(
                AutoScalingGroupName=group["AutoScalingGroupName"], DesiredCapacity=call.number, HonorCooldown=False
            )

    def try_to(self, what: str, call: Callable[[], None]) -> bool:
        """Call a function; print a failure that lasts, and its end. Return False if it fails."""
        return self._outages.setdefault(what, Outage(f"scaling: {what}")).attempt(call, self._now())

    def _read_services(self, cluster: str, limits: Mapping[str, NodeGroup]) -> dict[str, dict[str, Any]]:
        """Return ECS's description of the active services, by kind of worker."""
        ecs = self._connect("ecs")
        providers = {each["provider"]: kind for kind, each in limits.items()}

        def described(names: Sequence[str]) -> list[dict[str, Any]]:
            parts = (names[begin : begin + MOST_SERVICES] for begin in range(0, len(names), MOST_SERVICES))
            return [
                each for part in parts for each in ecs.describe_services(cluster=cluster, services=part)["services"]
            ]

        if not providers.keys() <= self._services.keys():
            pages = ecs.get_paginator("list_services").paginate(cluster=cluster)
            arns = [arn for page in pages for arn in page["serviceArns"]]
            self._services = {provider_of(service): service["serviceName"] for service in described(arns)}
        names = [name for provider, name in self._services.items() if provider in providers]
        active = [each for each in described(names) if each["status"] == "ACTIVE" and provider_of(each) in providers]
        if len(active) < len(names):
            self._services = {}  # `pulumi up` has replaced one
        return {providers[provider_of(service)]: service for service in active}

    def _read_groups(self, limits: Mapping[str, NodeGroup]) -> dict[str, dict[str, Any]]:
        """Return Auto Scaling's description of the groups that are not being deleted, by kind of worker."""
        kinds = {each["group"]: kind for kind, each in limits.items()}
        answer = self._connect("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[*kinds])
        groups = [group for group in answer["AutoScalingGroups"] if not group.get("Status")]
        return {kinds[group["AutoScalingGroupName"]]: group for group in groups}

    def _read_hosts(self, cluster: str) -> dict[str, dict[str, Host]]:
        """Return ECS's description of the instances, by capacity provider and instance ID."""
        ecs = self._connect("ecs")
        pages = ecs.get_paginator("list_container_instances").paginate(cluster=cluster)
        arns = [arn for page in pages for arn in page["containerInstanceArns"]]
        hosts: defaultdict[str, dict[str, Host]] = defaultdict(dict)
        for begin in range(0, len(arns), MOST):
            some = arns[begin : begin + MOST]
            found = ecs.describe_container_instances(cluster=cluster, containerInstances=some)["containerInstances"]
            for each in found:
                tasks = each["runningTasksCount"] + each["pendingTasksCount"]
                registered = each.get("registeredAt")
                since = registered.timestamp() if registered else math.inf  # it is still to register
                provider = each.get("capacityProviderName") or ""
                hosts[provider][each["ec2InstanceId"]] = Host(tasks, since, each["status"])
        return dict(hosts)


def just_ended(jobs: list[Job], now: float) -> list[Job]:
    """Return the last jobs of the runs with --then-stop that ended a moment ago, and are not submitted again."""
    others_run = any(map(goes_on, last_jobs(jobs)))
    least = SETTLE_SECONDS if others_run else FREE_SECONDS
    return [
        job
        for job in last_jobs(jobs)
        if job["metadata"].get(THEN_STOP)
        and not goes_on(job)
        and least <= now - (job["end_time"] or 0) / 1000 < THEN_STOP_SECONDS
    ]


def view_of(service: Mapping[str, Any], group: Mapping[str, Any], hosts: Mapping[str, Host] | None = None) -> View:
    """Return a view from the answers of DescribeServices and DescribeAutoScalingGroups."""
    members = [
        Member(
            member["InstanceId"],
            member["LifecycleState"],
            member["ProtectedFromScaleIn"],
            member["HealthStatus"] == "Healthy",
            member.get("InstanceType", ""),
        )
        for member in group["Instances"]
    ]
    failed = deployments.failed(service)
    return View(
        count=service["desiredCount"],
        rollout=_rollout(service),
        failed_at=at(failed, "updatedAt").timestamp() if failed else 0.0,
        capacity=group["DesiredCapacity"],
        least=group["MinSize"],
        most=group["MaxSize"],
        suspended=frozenset(process["ProcessName"] for process in group.get("SuspendedProcesses", ())),
        members=tuple(members),
        hosts=hosts,
    )


def _rollout(service: Mapping[str, Any]) -> str:
    """Return the state of a service's deployments: those that are not completed, the last one's failure first."""
    if deployments.failed(service):
        return FAILED
    states = {each.get("rolloutState", COMPLETED) for each in service.get("deployments", ())}
    return COMPLETED if states <= {COMPLETED} else IN_PROGRESS
