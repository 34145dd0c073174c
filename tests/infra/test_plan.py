"""What AWS is asked before anything is planned, and how its answers are judged."""

from __future__ import annotations

import pytest

from infra.plan import Plan, cause, choose_zone, instance_type
from infra.settings import SettingError, Settings
from infra.sizing import TaskSize
from tests.infra.fake_aws import REGION, Cloud


def plan(cloud: Cloud, **settings: str | int) -> Plan:
    """The plan that follows from otherwise default settings."""
    return cloud.run(lambda: Plan.of(Settings(**settings)))  # ty: ignore[invalid-argument-type]


def test_the_defaults_give_two_gpus_in_the_first_zone(cloud: Cloud) -> None:
    assert plan(cloud) == Plan(
        region=REGION,
        zone="us-west-2a",
        head=TaskSize(vcpus=4, memory_mib=14336, gpus=0),
        worker=TaskSize(vcpus=4, memory_mib=14336, gpus=1),
        gpus=2,
    ), "local zones sort first and lack NAT gateways, so a zone is a region and a letter"


def test_gpus_are_counted_over_all_workers(cloud: Cloud) -> None:
    made = plan(cloud, worker_instance_type="g5.12xlarge", worker_count=4)
    assert (made.worker.gpus, made.gpus) == (4, 16), "the training job starts one worker on each"


def test_the_zone_offers_both_types(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2a",), "m5.xlarge": ("us-west-2b",)}
    assert plan(cloud).zone == "us-west-2c", "one subnet holds the head and the workers"


def test_a_zone_that_is_asked_for_is_taken(cloud: Cloud) -> None:
    assert plan(cloud, availability_zone="us-west-2b").zone == "us-west-2b", "capacity differs between zones"


def test_a_zone_without_the_gpus_is_refused_with_those_that_have_them(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2b",)}
    with pytest.raises(SettingError) as refused:
        plan(cloud, availability_zone="us-west-2b")
    assert str(refused.value) == (
        "availabilityZone: 'us-west-2b' does not offer g5.xlarge and m5.xlarge; "
        "give one of us-west-2a, us-west-2c, or leave it empty to have one chosen"
    )


def test_a_region_without_a_common_zone_is_said_so(cloud: Cloud) -> None:
    cloud.not_offered = {"g5.xlarge": ("us-west-2a", "us-west-2b"), "m5.xlarge": ("us-west-2c",)}
    with pytest.raises(SettingError, match=r"is not offered together with m5\.xlarge in any zone") as refused:
        plan(cloud)
    assert str(refused.value).startswith("workerInstanceType: 'g5.xlarge' "), "GPUs are what a region lacks"


def test_one_type_for_both_kinds_needs_one_zone() -> None:
    settings = Settings(head_instance_type="g5.xlarge")
    zone = choose_zone(settings, {"g5.xlarge": {"us-west-2b", "us-west-2a"}}, REGION)
    assert zone == "us-west-2a", "a set of one type is no special case"


@pytest.mark.parametrize(
    ("key", "field"), [("headInstanceType", "head_instance_type"), ("workerInstanceType", "worker_instance_type")]
)
def test_a_type_that_the_region_does_not_offer_is_refused(cloud: Cloud, key: str, field: str) -> None:
    with pytest.raises(SettingError) as refused:
        plan(cloud, **{field: "g99.huge"})
    assert str(refused.value) == f"{key}: 'g99.huge' is not offered in us-west-2; give another type or another region"


def test_a_type_that_ec2_does_not_describe_is_refused_with_its_cause(cloud: Cloud) -> None:
    with pytest.raises(SettingError) as refused:
        cloud.run(lambda: instance_type("workerInstanceType", "g99.huge", REGION))
    message = str(refused.value)
    assert message.startswith("workerInstanceType: 'g99.huge' could not be looked up in us-west-2 ("), "what and where"
    assert "g99.huge does not exist" in message, "the cause may as well be a missing permission"
    assert "\n" not in message, "the provider's answer has many lines, and the first one says it"


@pytest.mark.parametrize(
    ("worker", "rule"),
    [("p3dn.24xlarge", "V100"), ("g5g.xlarge", "arm64"), ("m5.xlarge", "no whole GPU"), ("g6f.large", "no whole GPU")],
)
def test_a_worker_type_without_usable_gpus_is_refused(cloud: Cloud, worker: str, rule: str) -> None:
    with pytest.raises(SettingError, match=rule):
        plan(cloud, worker_instance_type=worker)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            "invoke failed: 1 error occurred:\n\t* reading type: api error InvalidInstanceType\n\n",
            "reading type: api error InvalidInstanceType",
        ),
        ("ExpiredToken: sign in again\nrequest id: 1", "ExpiredToken: sign in again"),
        ("", "ValueError"),
    ],
)
def test_the_cause_is_the_line_that_says_why(answer: str, line: str) -> None:
    assert cause(ValueError(answer)) == line, "the provider's first line may only count its errors"
