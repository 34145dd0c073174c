"""The number of workers, moved by AWS: up to what Ray is short of, down when no job wants any or makes no progress.

Three alarms watch the metrics of head, job and ECS, and each sets the service's number through Application Auto
Scaling; the capacity provider starts and stops instances to match. None of it needs the laptop, and going down needs no
head either: a metric that nobody publishes counts as 0. While an alarm rings its policy is applied each minute, and of
several the largest number holds.
https://docs.aws.amazon.com/autoscaling/application/userguide/step-scaling-policy-overview.html
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra.alarms import PERIOD_SECONDS, Metric, of_service, own
from infra.handles import EcsService
from infra.settings import Workers
from infra.tags import tags

# How long nobody has to want the workers before they go: the next run often follows soon.
UNWANTED_MINUTES = 10
# https://docs.aws.amazon.com/autoscaling/application/userguide/application-auto-scaling-limits.html
MOST_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class WorkerScalingArgs:
    """Inputs of WorkerScaling; each worker has `gpus`."""

    service: EcsService
    workers: Workers
    gpus: int


class WorkerScaling(pulumi.ComponentResource):
    """The policies and alarms that move the number of worker tasks."""

    def __init__(self, name: str, args: WorkerScalingArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:WorkerScaling", name, None, opts)
        workers = args.workers
        self._args = args
        self._tasks = of_service("DesiredTaskCount", "Maximum", args.service)
        self._target = self._scalable_target(name)
        self._when_short(name)
        if workers.fewest < workers.most:
            self._without(name, "unwanted", "GPUsWanted", minutes=UNWANTED_MINUTES, to=workers.fewest)
        if workers.idle_minutes:
            self._without(name, "idle", "TrainingSteps", minutes=workers.idle_minutes, to=0)
        self.register_outputs({})

    def _scalable_target(self, name: str) -> aws.appautoscaling.Target:
        # Without tags: it is a setting of the service, which has them, and costs nothing.
        return aws.appautoscaling.Target(
            f"{name}-target",
            service_namespace="ecs",
            scalable_dimension="ecs:service:DesiredCount",
            resource_id=pulumi.Output.concat("service/", self._args.service.cluster, "/", self._args.service.name),
            min_capacity=0 if self._args.workers.idle_minutes else self._args.workers.fewest,
            max_capacity=self._args.workers.most,
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _when_short(self, name: str) -> None:
        """Set the number to what jobs want, while that is more than what is there."""
        workers = self._args.workers
        steps = wanted_steps(gpus=self._args.gpus, fewest=workers.fewest, most=workers.most)
        self._alarm(
            f"{name}-short",
            "Jobs of the Ray cluster wait for GPUs",
            expression="IF(wanted > there, wanted, 0)",
            metrics={"wanted": own("GPUsWanted", "Maximum"), "there": own("GPUs", "Maximum")},
            above=0,
            minutes=1,
            policy=self._policy(f"{name}-grow", steps),
        )

    def _without(self, name: str, kind: str, metric: str, *, minutes: int, to: int) -> None:
        """Set the number to `to` once ECS has been asked for more all the time, and the metric has been 0."""
        step = aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs(
            metric_interval_lower_bound="0", scaling_adjustment=to
        )
        self._alarm(
            f"{name}-{kind}",
            f"More than {to} workers of the Ray cluster, and no {metric} for {minutes} minutes",
            # ECS's number may come some minutes late; the job's missing one means that nobody publishes it.
            expression="IF(FILL(sign, 0) > 0, 0, FILL(tasks, REPEAT))",
            metrics={"sign": own(metric, "Maximum"), "tasks": self._tasks},
            above=to,
            minutes=minutes,
            policy=self._policy(f"{name}-{kind}", [step]),
        )

    def _policy(
        self, name: str, steps: list[aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs]
    ) -> aws.appautoscaling.Policy:
        return aws.appautoscaling.Policy(
            f"{name}-policy",
            policy_type="StepScaling",
            service_namespace=self._target.service_namespace,
            scalable_dimension=self._target.scalable_dimension,
            resource_id=self._target.resource_id,
            step_scaling_policy_configuration=aws.appautoscaling.PolicyStepScalingPolicyConfigurationArgs(
                # An exact number can be set again and again while instances are still starting.
                adjustment_type="ExactCapacity",
                metric_aggregation_type="Maximum",
                step_adjustments=steps,
            ),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self._target]),
        )

    def _alarm(
        self,
        name: str,
        description: str,
        *,
        expression: str,
        metrics: dict[str, Metric],
        above: int,
        minutes: int,
        policy: aws.appautoscaling.Policy,
    ) -> None:
        result = aws.cloudwatch.MetricAlarmMetricQueryArgs(
            id="result", expression=expression, label=description, return_data=True
        )
        aws.cloudwatch.MetricAlarm(
            f"{name}-alarm",
            alarm_description=description,
            comparison_operator="GreaterThanThreshold",
            threshold=above,
            evaluation_periods=minutes * 60 // PERIOD_SECONDS,
            metric_queries=[result, *(metric.query(key) for key, metric in metrics.items())],
            # No number at all: there is no service to move, or no head that asks.
            treat_missing_data="notBreaching",
            alarm_actions=[policy.arn],
            tags=tags(f"{name}-alarm"),
            opts=pulumi.ResourceOptions(parent=self),
        )


def wanted_steps(
    *, gpus: int, fewest: int, most: int
) -> list[aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs]:
    """The number of workers for each number of GPUs that are wanted, of which each worker has `gpus`.

    A policy has at most 20 steps; for more workers than that, a step stands for several and takes the largest of them.
    """
    stride = -(-most // MOST_STEPS)
    numbers = [min(number, most) for number in range(stride, most + stride, stride)]
    # Half a GPU beside the whole numbers, as a step begins at its lower bound and ends before its upper one.
    edges = ["0", *(str(number * gpus + 0.5) for number in numbers[:-1]), None]
    return [
        aws.appautoscaling.PolicyStepScalingPolicyConfigurationStepAdjustmentArgs(
            metric_interval_lower_bound=lower, metric_interval_upper_bound=upper, scaling_adjustment=max(number, fewest)
        )
        for number, lower, upper in zip(numbers, edges[:-1], edges[1:], strict=True)
    ]
