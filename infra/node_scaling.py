"""Scaling of the GPU or the CPU workers: out to the number that jobs request, in to those that are in use.

Two alarms watch the metrics of head, runs and instances, and each sets the service's desired count through Application
Auto Scaling; the capacity provider starts and stops instances to match. Neither needs a laptop, and the scale-in needs
no head either. Nodes in use protect their tasks (ray_on_ecs/node/protection.py), so that ECS stops idle ones. While an
alarm is active its policy is applied each minute, and of several the largest number holds.
https://docs.aws.amazon.com/autoscaling/application/userguide/step-scaling-policy-overview.html
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.definitions.metrics import AUTO_SCALING, Metric, of_service
from infra.references import NodeSpec, Scale, ServiceRef
from infra.tags import metrics_namespace, tags

# A change is over when its tasks are, not after ECS's usual five minutes.
COOLDOWN_SECONDS = 60
PERIOD_SECONDS = 60
# https://docs.aws.amazon.com/autoscaling/application/userguide/application-auto-scaling-limits.html
MAX_STEPS = 20
Step = aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs


@dataclass(frozen=True, kw_only=True)
class NodeScalingArgs:
    """Inputs of NodeScaling: the services of nodes and head, the nodes' Auto Scaling group and their kind."""

    service: ServiceRef
    head: ServiceRef
    group_name: pulumi.Input[str]
    scale: Scale
    kind: str
    node: NodeSpec

    @property
    def resource(self) -> str:
        """What jobs ask Ray for, and what the head's metrics are called by."""
        return "GPUs" if self.node.task.gpus else "CPUs"

    @property
    def units(self) -> int:
        """How many of these each node has."""
        return self.node.task.gpus or self.node.task.vcpus


class NodeScaling(pulumi.ComponentResource):
    """The policies and alarms that move the number of one kind of task."""

    def __init__(self, name: str, args: NodeScalingArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:NodeScaling", name, None, opts)
        self._args = args
        self._most = args.scale.max_count * args.units
        self._target = self._scalable_target(name)
        self._metrics = _metrics(args)
        self._scale_out_alarm(name)
        if args.scale.idle_minutes and args.scale.min_count < args.scale.max_count:
            self._idle_alarm(name)
        self.register_outputs({})

    def _scalable_target(self, name: str) -> aws.appautoscaling.Target:
        # Without tags: it is a setting of the service, which has them, and costs nothing.
        return aws.appautoscaling.Target(
            f"{name}-target",
            service_namespace="ecs",
            scalable_dimension="ecs:service:DesiredCount",
            resource_id=pulumi.Output.concat("service/", self._args.service.cluster, "/", self._args.service.name),
            min_capacity=self._args.scale.min_count,
            max_capacity=self._args.scale.max_count,
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _scale_out_alarm(self, name: str) -> None:
        """Set the number to what jobs want while that is more than what is there, and to no less than what runs.

        What runs is counted in tasks: from zero ECS starts two instances at once, for a job that wants one, too. A
        service without tasks has no such metric, hence the 0; where it is late, the last number holds. The others are
        not filled: a minute that comes late is not one in which jobs want nothing.

        Nodes that a job takes into use while the number is being lowered are protected, but ECS renews no protection
        in a service with more protected tasks than it is to have. So the number also follows the nodes in use.
        """
        scale, units = self._args.scale, self._args.units
        steps = scale_out_steps(units=units, min_count=scale.min_count, max_count=scale.max_count)
        short = f"requested > available && available < {self._most}"
        wanted = f"IF({short}, MAX([requested, FILL(FILL(tasks, REPEAT), 0) * {units}]), 0)"
        self._alarm(
            name,
            "short",
            f"Jobs of the Ray cluster wait for {self._args.resource}",
            # MAX skips what is missing: each of the two decides by itself.
            expression=f"MAX([{wanted}, IF(nodes > desired, nodes * {units}, 0)])",
            above=0,
            minutes=1,
            policy=self._policy(f"{name}-short", steps),
        )

    def _idle_alarm(self, name: str) -> None:
        """Scale in to the nodes that are needed, once there have been more than those for `idle_minutes`.

        Needed are `min_count`; nodes on which Ray has work, whichever program it belongs to; and as many as hold what
        programs request, unless they request more than there can be, and all of that is there and idle. While a run
        reports progress and no node is in use, it is about to start its workers again, and all are needed. A head that
        runs and publishes nothing may have a run: its silence is not a reason to end one. A head that does not run has
        none.

        Instances are counted, since they are billed, also where no task comes to run on them. So are those that EC2 is
        asked for and does not have: they would start later. A metric that is missing counts as 0, even if it never had
        a value: MAX skips it, and `instances` always has one, where FILL of an empty metric may give nothing.
        """
        scale = self._args.scale
        step, steps = scale_in_steps(min_count=scale.min_count, max_count=scale.max_count)
        needed = self._needed()
        if step > 1:
            needed = f"{scale.min_count} + CEIL(({needed} - {scale.min_count}) / {step}) * {step}"
        self._alarm(
            name,
            "idle",
            f"More Ray {self._args.kind} than are needed for {scale.idle_minutes} minutes",
            # One more than are needed, so that it is 0 where none are to be stopped.
            expression=f"IF({self._all_stay()} || ({needed} >= MAX([instances, wanted])), 0, {needed} + 1)",
            above=0,
            minutes=scale.idle_minutes,
            policy=self._policy(f"{name}-idle", steps),
        )

    def _needed(self) -> str:
        """The number of nodes that are needed, as an expression."""
        most, requested = self._most, _or_zero("requested")
        beyond = f"{requested} > {most} && {_PUBLISHED} > {most} && {_or_zero('used')} == 0"
        requesting = f"CEIL(IF({beyond}, 0, {requested}) / {self._args.units})"
        return f"MAX([{_or_zero('nodes')}, {requesting}, instances * 0 + {self._args.scale.min_count}])"

    def _all_stay(self) -> str:
        """The condition under which no node is stopped, whatever is needed, as an expression."""
        silent = f"({_or_zero('head')} > 0 && {_PUBLISHED} == 0)"
        if not self._args.node.task.gpus:  # CPU workers may well be idle while GPUs train
            return silent
        return f"{silent} || ({_or_zero('progress')} > 0 && {_or_zero('used')} == 0)"

    def _policy(self, name: str, steps: list[Step]) -> aws.appautoscaling.Policy:
        return aws.appautoscaling.Policy(
            f"{name}-policy",
            policy_type="StepScaling",
            service_namespace=self._target.service_namespace,
            scalable_dimension=self._target.scalable_dimension,
            resource_id=self._target.resource_id,
            step_scaling_policy_configuration=aws.appautoscaling.PolicyStepScalingPolicyConfigurationArgs(
                # An exact number can be set again and again while instances are still starting.
                adjustment_type="ExactCapacity",
                cooldown=COOLDOWN_SECONDS,
                metric_aggregation_type="Maximum",
                step_adjustments=steps,
            ),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self._target]),
        )

    def _alarm(
        self,
        name: str,
        kind: str,
        description: str,
        *,
        expression: str,
        above: int,
        minutes: int,
        policy: aws.appautoscaling.Policy,
    ) -> None:
        used = {key: metric for key, metric in self._metrics.items() if re.search(rf"\b{key}\b", expression)}
        result = aws.cloudwatch.MetricAlarmMetricQueryArgs(
            id="result", expression=expression, label=description, return_data=True
        )
        aws.cloudwatch.MetricAlarm(
            f"{name}-{kind}-alarm",
            # By this name `ray-on-ecs status` finds it.
            name=pulumi.Output.concat(self._args.service.cluster, "-", self._args.kind, "-", kind),
            alarm_description=description,
            comparison_operator="GreaterThanThreshold",
            threshold=above,
            evaluation_periods=minutes * 60 // PERIOD_SECONDS,
            metric_queries=[result, *(_query(key, metric) for key, metric in used.items())],
            # No number at all: there is no service to move, or no head that asks.
            treat_missing_data="notBreaching",
            alarm_actions=[policy.arn],
            tags=tags(f"{name}-{kind}-alarm"),
            opts=pulumi.ResourceOptions(parent=self),
        )


def _or_zero(metric: str) -> str:
    return f"MAX([{metric}, instances * 0])"


# One more than there are, so that it is 0 where the metric is missing alone.
_PUBLISHED = _or_zero("available + 1")


def _metrics(args: NodeScalingArgs) -> dict[str, Metric]:
    """What the alarms' expressions speak of."""
    own = {
        "requested": f"{args.resource}Requested",
        "used": f"{args.resource}Used",
        "available": args.resource,
        "nodes": f"{args.resource.removesuffix('s')}NodesInUse",
        "progress": "RunProgress",
    }
    namespace, group = metrics_namespace(args.service.cluster), {"AutoScalingGroupName": args.group_name}
    return {
        **{key: Metric(namespace=namespace, name=name, stat="Maximum") for key, name in own.items()},
        "tasks": of_service("RunningTaskCount", args.service.cluster, args.service.name, "Maximum"),
        "desired": of_service("DesiredTaskCount", args.service.cluster, args.service.name, "Maximum"),
        "head": of_service("RunningTaskCount", args.head.cluster, args.head.name, "Maximum"),
        "instances": Metric(namespace=AUTO_SCALING, name="GroupInServiceInstances", stat="Maximum", dimensions=group),
        "wanted": Metric(namespace=AUTO_SCALING, name="GroupDesiredCapacity", stat="Maximum", dimensions=group),
    }


def _query(query_id: str, metric: Metric) -> aws.cloudwatch.MetricAlarmMetricQueryArgs:
    """The metric as a variable of an alarm's expression."""
    return aws.cloudwatch.MetricAlarmMetricQueryArgs(
        id=query_id,
        metric=aws.cloudwatch.MetricAlarmMetricQueryMetricArgs(
            namespace=metric.namespace,
            metric_name=metric.name,
            stat=metric.stat,
            period=PERIOD_SECONDS,
            dimensions=metric.dimensions,
        ),
    )


def scale_out_steps(*, units: int, min_count: int, max_count: int) -> list[Step]:
    """The number of nodes for each number of GPUs or CPUs that is requested, of which each node has `units`.

    A policy has at most 20 steps; for more workers than that, a step stands for several and takes the largest of them.
    """
    stride = -(-max_count // MAX_STEPS)
    numbers = [min(number, max_count) for number in range(stride, max_count + stride, stride)]
    return _steps([max(number, min_count) for number in numbers], [number * units for number in numbers])


def scale_in_steps(*, min_count: int, max_count: int) -> tuple[int, list[Step]]:
    """The distance between the numbers of nodes to which a policy scales in, and the number for each value.

    The value is one more than the number. For more workers than a policy may have steps the distance is more than one,
    and the expression has to be rounded up to it: a step that stood for several could start nodes.
    """
    stride = -(-(max_count - min_count) // (MAX_STEPS - 1))
    numbers = [min(number, max_count) for number in range(min_count, max_count + stride, stride)]
    return stride, _steps(numbers, [number + 1 for number in numbers])


def _steps(numbers: list[int], values: list[int]) -> list[Step]:
    """One step for each number, which ends with its value; the last one has no end."""
    # Half a unit beside the whole numbers, as a step begins at its lower bound and ends before its upper one.
    edges = ["0", *(str(value + 0.5) for value in values[:-1]), None]
    return [
        Step(metric_interval_lower_bound=lower, metric_interval_upper_bound=upper, scaling_adjustment=number)
        for number, lower, upper in zip(numbers, edges[:-1], edges[1:], strict=True)
    ]
