"""Application Auto Scaling of one kind of worker: out to the number that jobs request, in to the nodes in use.

Two CloudWatch alarms watch the metrics of head, runs and instances, and each sets the service's desired count; the
capacity provider starts and stops instances to match. A head sets the same numbers sooner (ray_on_ecs/node/scaling.py),
and the alarms have the last word without it. Neither needs a client, and the scale-in works without a head.
A pool's kinds in several zones share its maximum: each may reach it, and the head's queue requests no more in all.
Nodes in use protect their tasks (ray_on_ecs/node/protection.py), so ECS stops idle nodes. While an alarm is active, its
policy is applied every minute; of several policies, the largest capacity wins.
https://docs.aws.amazon.com/autoscaling/application/userguide/step-scaling-policy-overview.html
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.definitions.metrics import Metric, of_group, of_service
from infra.scaling import PERIOD_SECONDS, Step, queries, scalable_target, step_policy
from infra.tags import metrics_namespace
from infra.types import NodeSpec, ResourceRef, Scale, ServiceRef
from ray_on_ecs.contract import CPU_WORKERS, KIND_DIMENSION, MAX_STEPS, WORKERS, scale_out_stride


@dataclass(frozen=True, kw_only=True)
class NodeScalingArgs:
    """Inputs of NodeScaling: ECS cluster, services of nodes and head, the head's role, Auto Scaling group, kind."""

    cluster: ResourceRef
    service: ServiceRef
    head: ServiceRef
    head_role: pulumi.Input[str]
    group: ResourceRef
    scale: Scale
    kind: str
    node: NodeSpec

    @property
    def resource(self) -> str:
        """Ray resource that jobs request, and prefix of the head's metrics."""
        return "GPUs" if self.node.task.gpus else "CPUs"


class NodeScaling(pulumi.ComponentResource):
    """Step scaling policies and alarms for the service of one kind of worker."""

    def __init__(self, name: str, args: NodeScalingArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:NodeScaling", name, None, opts)
        self._args = args
        self._most = args.scale.max_count * args.node.units
        scale = args.scale
        # The program does not change the count. A maximum of 0 stops the idle workers of a pool that had some.
        # https://docs.aws.amazon.com/autoscaling/application/APIReference/API_RegisterScalableTarget.html
        self._target = scalable_target(name, args.service, fewest=scale.min_count, most=scale.max_count, parent=self)
        self._metrics = _metrics(args)
        if scale.max_count:
            self._scale(name)
        self.register_outputs({})

    def _scale(self, name: str) -> None:
        """Alarms with their policies, and the head's permission to set the numbers."""
        args, scale = self._args, self._args.scale
        self._scale_out_alarm(name)
        if scale.idle_minutes and scale.min_count < scale.max_count:
            self._idle_alarm(name)
        # Lets the head set the same numbers at once: this service's and this group's.
        policy = pulumi.Output.all(
            cluster_arn=args.cluster.arn, service_name=args.service.name, group_arn=args.group.arn
        ).apply(lambda values: json.dumps(policies.scaling(**values)))
        child = pulumi.ResourceOptions(parent=self)
        aws.iam.RolePolicy(f"{name}-head-policy", role=args.head_role, policy=policy, opts=child)

    def _scale_out_alarm(self, name: str) -> None:
        """Scale out while jobs request more than is available: to the requested number, at least to the running one.

        Running nodes are counted in tasks, because from zero ECS starts two instances even for a job that requests one.
        A service without tasks has no such metric, hence FILL with 0; a late data point repeats the last value. Other
        metrics are not filled: a late data point does not mean that jobs request nothing.

        Nodes that a job starts to use during a scale-in are protected, but ECS does not renew the protection of more
        tasks than the desired count. So the count also follows the nodes in use.
        https://docs.aws.amazon.com/AmazonECS/latest/developerguide/task-scale-in-protection.html
        """
        scale, units = self._args.scale, self._args.node.units
        steps = scale_out_steps(units=units, min_count=scale.min_count, max_count=scale.max_count)
        short = f"requested > available && available < {self._most}"
        demand = f"IF({short}, MAX([requested, FILL(FILL(tasks, REPEAT), 0) * {units}]), 0)"
        self._alarm(
            name,
            "short",
            f"Ray jobs wait for {self._args.resource} (scale out)",
            # MAX skips missing values, so each term works without the other.
            expression=f"MAX([{demand}, IF(nodes > desired, nodes * {units}, 0)])",
            minutes=1,
            policy=step_policy(f"{name}-short", self._target, steps, parent=self),
        )

    def _idle_alarm(self, name: str) -> None:
        """Scale in to the needed nodes, after more than those have been up for `idle_minutes`.

        Needed are `min_count` nodes; all nodes in use by Ray, for any program; and the nodes that programs request,
        unless they request more than the maximum while all of it is up and idle. While a run reports progress and no
        node is in use, it is about to restart its workers, so all nodes are needed. A running head that publishes
        nothing may have a run, so its silence stops no node; a head that is not running has no run.

        Instances are counted instead of tasks, since they are billed even without a task. Requested instances count as
        well: EC2 would start them later. A missing metric counts as 0, even if it never had a value: MAX skips it, and
        `instances` always has a value, whereas FILL of an empty metric may return nothing.
        """
        scale = self._args.scale
        step, steps = scale_in_steps(min_count=scale.min_count, max_count=scale.max_count)
        needed = self._needed()
        if step > 1:
            needed = f"{scale.min_count} + CEIL(({needed} - {scale.min_count}) / {step}) * {step}"
        self._alarm(
            name,
            "idle",
            f"Ray {self._args.kind} unused for {scale.idle_minutes} minutes (scale in)",
            # One more than the needed number, so that 0 means no scale-in.
            expression=f"IF({self._all_stay()} || ({needed} >= MAX([instances, wanted])), 0, {needed} + 1)",
            minutes=scale.idle_minutes,
            policy=step_policy(f"{name}-idle", self._target, steps, parent=self),
        )

    def _needed(self) -> str:
        """Metric math expression for the number of needed nodes."""
        most, requested = self._most, _or_zero("requested")
        beyond = f"{requested} > {most} && {_PUBLISHED} > {most} && {_or_zero('used')} == 0"
        requesting = f"CEIL(IF({beyond}, 0, {requested}) / {self._args.node.units})"
        return f"MAX([{_or_zero('nodes')}, {requesting}, instances * 0 + {self._args.scale.min_count}])"

    def _all_stay(self) -> str:
        """Metric math condition under which no node is stopped, whatever is needed."""
        silent = f"({_or_zero('head')} > 0 && {_PUBLISHED} == 0)"
        if not self._args.node.task.gpus:  # CPU workers may be idle while GPUs train
            return silent
        return f"{silent} || ({_or_zero('progress')} > 0 && {_or_zero('used')} == 0)"

    def _alarm(
        self,
        name: str,
        kind: str,
        description: str,
        *,
        expression: str,
        minutes: int,
        policy: aws.appautoscaling.Policy,
    ) -> None:
        metrics = {key: metric for key, metric in self._metrics.items() if re.search(rf"\b{key}\b", expression)}
        aws.cloudwatch.MetricAlarm(
            f"{name}-{kind}-alarm",
            # `ray-on-ecs status` finds the alarm by this name.
            name=pulumi.Output.concat(self._args.service.cluster, "-", self._args.kind, "-", kind),
            alarm_description=description,
            comparison_operator="GreaterThanThreshold",
            threshold=0,
            evaluation_periods=minutes * 60 // PERIOD_SECONDS,
            metric_queries=queries(expression, description, metrics),
            # If all data is missing, the service does not exist or the head does not run.
            treat_missing_data="notBreaching",
            alarm_actions=[policy.arn],
            opts=pulumi.ResourceOptions(parent=self),
        )


def _or_zero(metric: str) -> str:
    return f"MAX([{metric}, instances * 0])"


# One more than the available number, so that 0 means a missing metric.
_PUBLISHED = _or_zero("available + 1")


def _metrics(args: NodeScalingArgs) -> dict[str, Metric]:
    """CloudWatch metrics by their name in the alarms' expressions."""
    head_metrics = {
        "requested": f"{args.resource}Requested",
        "used": f"{args.resource}Used",
        "available": args.resource,
        "nodes": f"{args.resource.removesuffix('s')}NodesInUse",
        "progress": "RunProgress",
    }
    namespace = metrics_namespace(args.service.cluster)
    own = {} if args.kind in (WORKERS, CPU_WORKERS) else {KIND_DIMENSION: args.kind}
    return {
        **{
            key: Metric(namespace=namespace, name=of, stat="Maximum", dimensions=own)
            for key, of in head_metrics.items()
        },
        "tasks": of_service("RunningTaskCount", args.service.cluster, args.service.name, "Maximum"),
        "desired": of_service("DesiredTaskCount", args.service.cluster, args.service.name, "Maximum"),
        "head": of_service("RunningTaskCount", args.head.cluster, args.head.name, "Maximum"),
        **of_group(args.group.name),
    }


def scale_out_steps(*, units: int, min_count: int, max_count: int) -> list[Step]:
    """Step adjustments from requested GPUs or CPUs to nodes with `units` of them each.

    A policy has at most 20 steps; for more workers, a step covers several numbers and sets the largest of them.
    """
    stride = scale_out_stride(max_count)
    numbers = [min(number, max_count) for number in range(stride, max_count + stride, stride)]
    return _steps([max(number, min_count) for number in numbers], [number * units for number in numbers])


def scale_in_steps(*, min_count: int, max_count: int) -> tuple[int, list[Step]]:
    """Stride between the numbers of nodes to which a policy scales in, and its step adjustments.

    The alarm's value is one more than the number of nodes. With more workers than steps the stride exceeds one, and the
    expression must be rounded up to it: a step that covered several numbers could start nodes.
    """
    stride = -(-(max_count - min_count) // (MAX_STEPS - 1))
    numbers = [min(number, max_count) for number in range(min_count, max_count + stride, stride)]
    return stride, _steps(numbers, [number + 1 for number in numbers])


def _steps(numbers: list[int], values: list[int]) -> list[Step]:
    """Step adjustments: one per number of nodes, up to and including its value; the last one is unbounded."""
    # Half a unit off the integers, because a step includes its lower bound and excludes its upper bound.
    edges = ["0", *(str(value + 0.5) for value in values[:-1]), None]
    return [
        Step(metric_interval_lower_bound=lower, metric_interval_upper_bound=upper, scaling_adjustment=number)
        for number, lower, upper in zip(numbers, edges[:-1], edges[1:], strict=True)
    ]
