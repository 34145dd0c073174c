"""Checks of `drills.aws`: each makes one change, and returns what AWS answers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from drills.aws_site import SCRIPT, Site
from ray_on_ecs.contract import DEFAULT_POOL
from ray_on_ecs.errors import ResourceError, one_line
from ray_on_ecs.pools import kinds_by_pool

POLL_SECONDS, START_SECONDS, DEPLOYMENT_SECONDS, DRAIN_SECONDS = 2.0, 1800.0, 180.0, 300.0
# A Spot Instance ends 120 s after its notice, and a worker's checkpoint takes some of them.
SIGTERM_SECONDS = 60.0
STEPS = ("createdAt", "connectivityAt", "pullStartedAt", "pullStoppedAt", "startedAt")
SLEEP = "import time\n\ntime.sleep(3600)\n"
Answer = tuple[bool | None, str]  # passed, or None if this stack can't answer; and AWS's answer in words


class NotStarted(ResourceError):
    """The drill's run has no worker."""


def start(site: Site) -> Answer:
    """Start the drill's run, and read ECS's time stamps of its worker."""
    site.check_unused()
    site.at_end(f"ray-on-ecs stop {site.name}", site.stop)
    site.command(
        "run", "--detach", "--run-name", site.name, "--pool", "default", "--num-workers", "1", SCRIPT, script=SLEEP
    )
    # EC2 may have an instance in any of the pool's zones.
    kinds = kinds_by_pool(site.info)[DEFAULT_POOL]
    services = [name for kind, name in site.stack.services.items() if kind in kinds]
    for _ in every(START_SECONDS):
        if arns := [arn for each in services for arn in site.ecs("list_tasks", serviceName=each)["taskArns"]]:
            for found in site.ecs("get_task_protection", tasks=arns)["protectedTasks"]:
                if found["protectionEnabled"]:
                    site.task = site.ecs("describe_tasks", tasks=[found["taskArn"]])["tasks"][0]
                    times = [(step, site.task[step]) for step in STEPS if step in site.task]
                    seconds = [f"{step} +{(at - times[0][1]).total_seconds():.0f} s" for step, at in times]
                    return len(times) == len(STEPS), ", ".join(seconds)
    return False, f"no worker is protected after {START_SECONDS:.0f} s; ray-on-ecs status says why"


def agent(site: Site) -> Answer:
    """Read the pull's seconds, and the reasons of stopped tasks."""
    task = present(site)
    started, stopped = task.get("pullStartedAt"), task.get("pullStoppedAt")
    pull = f"pull {(stopped - started).total_seconds():.0f} s" if started and stopped else "no time of a pull"
    arns = site.ecs("list_tasks", serviceName=service_of(task), desiredStatus="STOPPED")["taskArns"]
    ended = site.ecs("describe_tasks", tasks=arns)["tasks"] if arns else []
    failed = [why for each in ended if re.search("(?i)timed out|CannotPull", why := str(each.get("stoppedReason")))]
    return not failed, f"{pull}; {len(failed)} of {len(ended)} stopped tasks failed so: {one_line(', '.join(failed))}"


def deploy(site: Site) -> Answer:
    """Deploy the workers' service while the run goes on: the protected task stays."""
    service = service_of(present(site))
    site.check_unused()
    site.ecs("update_service", service=service, forceNewDeployment=True)
    for _ in every(DEPLOYMENT_SECONDS):
        if (task := present(site))["desiredStatus"] != "RUNNING":
            return False, f"ECS stops the protected task: {task.get('stoppedReason')}"
    found = site.ecs("describe_services", services=[service])["services"][0]["deployments"]
    states = [f"{each['status']} {each.get('rolloutState')}, {each['runningCount']} running" for each in found]
    which = {"ServiceNamespace": "ecs", "ResourceId": f"service/{site.stack.cluster_name}/{service}"}
    scaled = site.ask(
        "application-autoscaling", "describe_scaling_activities", IncludeNotScaledActivities=True, **which
    )
    last = [f"{each['StatusCode']} {each.get('NotScaledReasons', '')}" for each in scaled["ScalingActivities"][:1]]
    return True, f"{', '.join(states)}; last scaling: {', '.join(last) or 'none'}"


def drain(site: Site) -> Answer:
    """Drain the instance of the protected task, and wait for its SIGTERM."""
    instance = present(site)["containerInstanceArn"]
    site.check_unused()
    put = partial(site.ecs, "update_container_instances_state", containerInstances=[instance])
    site.at_end(f"set {instance} to ACTIVE", lambda: put(status="ACTIVE"))
    put(status="DRAINING")
    started = time.monotonic()
    for _ in every(DRAIN_SECONDS):
        if (task := present(site)).get("stoppingAt"):
            seconds = time.monotonic() - started
            return seconds <= SIGTERM_SECONDS, f"SIGTERM after {seconds:.0f} s: {task.get('stoppedReason')}"
    return False, f"the protected task got no SIGTERM within {DRAIN_SECONDS:.0f} s"


def present(site: Site) -> dict[str, Any]:
    """Return the worker's task as ECS describes it now; ResourceError without one."""
    if not site.task:
        raise NotStarted("no worker has started: this check needs F")
    found = site.ecs("describe_tasks", tasks=[site.task["taskArn"]])["tasks"]
    if not found:
        raise ResourceError("ECS no longer knows the worker's task")
    return found[0]


def service_of(task: dict[str, Any]) -> str:
    """Return the name of the service that runs a task."""
    return task["group"].removeprefix("service:")


def every(seconds: float) -> Iterator[None]:
    """Yield after each pause until this time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        yield
