"""Calls to AWS at the same time: answers, errors, equal calls, and what else Pulumi's event loop has to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pulumi
import pulumi_aws as aws
import pytest

from infra.config import RayClusterArgs, lookups
from infra.config.location import Caller
from infra.config.together import AT_ONCE, in_threads, together
from infra.errors import SettingError
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud

# Of a condition that is met at once, or never.
SECONDS = 60
POLICY, OTHER = (f"arn:aws:iam::{ACCOUNT}:policy/{name}" for name in ("a", "b"))
CALLER = Caller(account=ACCOUNT, region=REGION, partition="aws")


class Meeting(Cloud):
    """AWS that answers the functions in `together` only when all of them have been called."""

    def __init__(self, *together: str, **more: Any) -> None:
        super().__init__(**more)
        self.names, self.barrier = together, threading.Barrier(len(together))

    def call(self, args: Any) -> Any:
        if args.token.rpartition(":")[2] in self.names:
            self.barrier.wait(SECONDS)
        return super().call(args)


def type_of(name: str, opts: pulumi.InvokeOptions | None = None) -> Callable[[], Any]:
    return partial(aws.ec2.get_instance_type, instance_type=name, opts=opts)


def test_calls_wait_for_aws_at_the_same_time() -> None:
    cloud = Meeting("getInstanceType", "getPolicy", "getVpcs")
    calls = [type_of("g5.xlarge"), partial(aws.iam.get_policy, arn=POLICY), aws.ec2.get_vpcs]
    kinds, policy, vpcs = cloud.run(lambda: [answer.result() for answer in together(*calls)])
    assert (kinds.instance_type, policy.arn, vpcs.ids) == ("g5.xlarge", POLICY, ["vpc-0"])


def test_equal_calls_are_made_once(cloud: Cloud) -> None:
    names = ["g5.xlarge", "g6.xlarge", "g5.xlarge"]
    answers = cloud.run(lambda: [answer.result().instance_type for answer in together(*map(type_of, names))])
    assert answers == names
    assert len(cloud.calls) == 2


def test_each_call_has_its_error(cloud: Cloud) -> None:
    def fails() -> None:
        raise ValueError("before any call")

    found = cloud.run(lambda: together(fails, type_of("g5.xlarge"), type_of("g5.unknown"), type_of("m5.xlarge")))
    errors = [str(answer.exception() or "").split("\n")[0] for answer in found]
    assert errors[0] == "before any call"
    assert "g5.unknown does not exist" in errors[2]
    assert [errors[1], errors[3]] == ["", ""]


def test_any_number_of_calls(cloud: Cloud) -> None:
    assert cloud.run(together) == []
    zones = [str(number) for number in range(10 * AT_ONCE + 1)]
    calls = [partial(aws.ec2.get_subnet, id=zone) for zone in zones]
    assert cloud.run(lambda: [answer.result().id for answer in together(*calls)]) == zones


def test_calls_wait_for_a_provider_that_is_not_up_yet(cloud: Cloud) -> None:
    def program() -> list[str]:
        opts = pulumi.InvokeOptions(provider=aws.Provider("other", region=REGION))
        answers = together(type_of("g5.xlarge", opts), type_of("g6.xlarge", opts))
        return [answer.result().instance_type for answer in answers]

    assert cloud.run(program) == ["g5.xlarge", "g6.xlarge"]
    assert len(cloud.providers) == 1
    assert "other" in cloud.providers.pop()


def test_calls_of_several_callbacks_of_outputs(cloud: Cloud) -> None:
    names = ["g5.xlarge", "g6.xlarge", "m5.xlarge"]
    found: list[list[str]] = []

    def program() -> pulumi.Output[Any]:
        topics = [aws.sns.Topic(f"topic-{number}") for number in range(3)]

        def ask(arn: str) -> None:
            found.append([answer.result().instance_type for answer in together(*map(type_of, names))])

        return pulumi.Output.all(*(topic.arn.apply(ask) for topic in topics))

    cloud.run(program)
    assert found == [names] * 3


def test_boto3_is_called_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    assert sorted(answer.result() for answer in in_threads(*3 * [partial(barrier.wait, SECONDS)])) == [0, 1, 2]


class Reversed(Cloud):
    """AWS that answers about POLICY last."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.others = threading.Event()

    def call(self, args: Any) -> Any:
        if args.args.get("arn") == POLICY:
            assert self.others.wait(SECONDS)
        answer = super().call(args)
        if args.args.get("arn") == OTHER:
            self.others.set()
        return answer


def test_the_first_setting_is_refused_and_not_the_first_answer() -> None:
    cloud = Reversed(absent=("getPolicy",))
    args = RayClusterArgs(permissions_boundary=POLICY, task_policy_arns=(OTHER,))
    with pytest.raises(SettingError, match=rf"^permissions_boundary: '{POLICY}' could not be found"):
        cloud.run(lambda: lookups.check(args, CALLER))


def test_warnings_are_in_the_order_of_settings(warnings: list[str]) -> None:
    cloud = Reversed(silent=("getPolicy",))
    args = RayClusterArgs(permissions_boundary=POLICY, task_policy_arns=(OTHER,), instance_policy_arns=(OTHER,))
    cloud.run(lambda: lookups.check(args, CALLER))
    assert [line.split(":")[0] for line in warnings] == [
        "permissions_boundary",
        "task_policy_arns",
        "instance_policy_arns",
    ]
