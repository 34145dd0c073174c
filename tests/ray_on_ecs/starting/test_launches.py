"""EC2's refusals of launches, as real groups have them and issues on GitHub quote them."""

import pytest

from ray_on_ecs.starting.launches import launch_line, way_out, zones_with_capacity
from ray_on_ecs.starting.states import CAPACITY, LAUNCH_ERRORS, OF_PLACE, QUOTA, SPOT, launch_error
from tests.refusals import (
    NO_CAPACITY,
    NO_CAPACITY_OF_SEVERAL,
    NO_QUOTA,
    NO_QUOTA_OF_SEVERAL,
    NO_SPOT,
    NO_SPOT_IN_POOL,
    NO_SPOT_OF_SEVERAL,
    NO_SPOT_QUOTA,
    NO_SPOT_QUOTA_OF_SEVERAL,
    UNSUPPORTED,
    no_capacity,
)


@pytest.mark.parametrize(
    ("message", "error", "on_spot"),
    [
        (NO_CAPACITY, CAPACITY, False),
        (NO_CAPACITY_OF_SEVERAL, CAPACITY, False),
        (NO_SPOT, CAPACITY, True),
        (NO_SPOT_OF_SEVERAL, CAPACITY, True),
        (NO_SPOT_IN_POOL, CAPACITY, True),
        (NO_QUOTA, QUOTA, False),
        (NO_QUOTA_OF_SEVERAL, QUOTA, False),
        (NO_SPOT_QUOTA, QUOTA, True),
        (NO_SPOT_QUOTA_OF_SEVERAL, QUOTA, True),
        (UNSUPPORTED, LAUNCH_ERRORS["type"], True),
    ],
)
def test_messages_are_classified(message: str, error: object, on_spot: bool) -> None:
    assert launch_error(message) is error
    assert error in OF_PLACE
    assert bool(SPOT.search(message)) == on_spot


@pytest.mark.parametrize(
    "message",
    [
        "You are not authorized to perform this operation. Encoded authorization failure message: aB3-x",
        "User: arn:aws:sts::1:assumed-role/x is not authorized to perform: iam:PassRole",
        "Client.InternalError: Client error on launch",
        "The security group 'sg-1' does not exist",
        "The image id '[ami-1]' does not exist",
        "The service-linked role AWSServiceRoleForEC2Spot: ServiceLinkedRole cannot be created",
        "Your account is currently blocked. Contact aws-verification@amazon.com",
        "InternalError - An internal error has occurred",
        "Request limit exceeded: RequestLimitExceeded",
        "Something that AWS has never said before",
    ],
)
def test_faults_that_stay_in_any_zone_move_no_run(message: str) -> None:
    assert launch_error(message) not in OF_PLACE


REQUEST = "You can currently get p5.48xlarge capacity by not specifying an Availability Zone in your request"


@pytest.mark.parametrize(
    ("text", "zones"),
    [
        (NO_CAPACITY, ["us-east-1b", "us-east-1c"]),
        (NO_CAPACITY_OF_SEVERAL, ["us-east-1b", "us-east-1c"]),
        (f"{REQUEST} or choosing us-west-2b. Launching EC2 instance failed.", ["us-west-2b"]),
        (f"{REQUEST} or choosing us-west-2b.", ["us-west-2b"]),
        (f"{REQUEST} or choosing us-west-2b", ["us-west-2b"]),
        (f"{REQUEST} or choosing us-west-2a, us-west-2b, us-west-2c, us-west-2d.", [f"us-west-2{x}" for x in "abcd"]),
        (f"{REQUEST} or choosing us-west-2b or us-west-2c.", ["us-west-2b", "us-west-2c"]),
        (f"{REQUEST} or choosing us-west-2b, us-west-2c, or us-west-2d.", ["us-west-2b", "us-west-2c", "us-west-2d"]),
        (f"{REQUEST} or choosing us-west-2b and us-west-2c.", ["us-west-2b", "us-west-2c"]),
        (f"{REQUEST} or choosing\n us-west-2b,\n us-west-2c.", ["us-west-2b", "us-west-2c"]),
        (f"{REQUEST} or choosing us-gov-west-1a, us-gov-west-1b.", ["us-gov-west-1a", "us-gov-west-1b"]),
        (f"{REQUEST} or choosing ap-southeast-2c.", ["ap-southeast-2c"]),
        (f"{REQUEST} or choosing us-west-2-lax-1a, us-west-2b.", ["us-west-2-lax-1a", "us-west-2b"]),
        (f"{REQUEST} or choosing us-east-1-wl1-bos-wlz-1a.", ["us-east-1-wl1-bos-wlz-1a"]),
        (f"{REQUEST}.", []),
        (NO_SPOT, []),
        (NO_SPOT_OF_SEVERAL, []),
        (NO_QUOTA, []),
        ("We had a hard time choosing words.", []),
        (f"{no_capacity('g5.xlarge', 'b')} {no_capacity('g6.xlarge', 'c', 'b')}", ["us-east-1b", "us-east-1c"]),
    ],
)
def test_zones_that_ec2_names(text: str, zones: list[str]) -> None:
    assert zones_with_capacity(text) == zones


@pytest.mark.parametrize("pool", ["default", "cpu", "h100"])
def test_line_names_the_keys_of_the_pool(pool: str) -> None:
    zones = way_out(CAPACITY, pool)
    line = launch_line(NO_CAPACITY, ["p5.48xlarge"], "us-west-2c", pool=pool)
    assert line == f"EC2 has no p5.48xlarge in us-west-2c at the moment; {zones}"
    line = launch_line(NO_SPOT, ["p5.48xlarge"], "us-west-2c", pool=pool)
    assert line.endswith(f"at the moment; {zones}; or {way_out(LAUNCH_ERRORS['price'], pool)}")


@pytest.mark.parametrize(
    ("error", "pool", "says"),
    [
        ("type", "default", "add zones (availabilityZones or subnetIds), or types"),
        ("type", "cpu", "add zones (availabilityZones or subnetIds), or types"),
        ("type", "h100", "add zones (workerPools.h100.zones or subnetIds), or types"),
        ("addresses", "h100", "add zones (workerPools.h100.zones or subnetIds), or free addresses"),
        ("price", "default", "take them on demand: pulumi config set spot false"),
        ("price", "h100", "take them on demand: pulumi config set --path workerPools.h100.spot false"),
    ],
)
def test_way_out_has_the_keys_of_the_pool(error: str, pool: str, says: str) -> None:
    assert way_out(LAUNCH_ERRORS[error], pool) == says
