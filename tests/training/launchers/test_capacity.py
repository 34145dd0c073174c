"""What EC2 lacks is said while a run waits, and the workers move to the next zone, in moto's EC2 Auto Scaling.

The messages are those of real groups, as issues on GitHub quote them.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.aws import client
from training.launchers import capacity
from training.launchers.capacity import CapacityWatch, Failure

GROUP = "workers"
LAUNCH_CONFIGURATION = "workers"
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
ENDING = "Launching EC2 instance failed."
NO_CAPACITY = (
    "We currently do not have sufficient g5.xlarge capacity in the Availability Zone you requested (us-east-1a). Our "
    "system will be working on provisioning additional capacity. You can currently get g5.xlarge capacity by not "
    f"specifying an Availability Zone in your request or choosing us-east-1b, us-east-1c. {ENDING}"
)
NO_CAPACITY_OF_SEVERAL = f"Could not launch On-Demand Instances. InsufficientInstanceCapacity - {NO_CAPACITY}"
NO_SPOT = f"There is no Spot capacity available that matches your request. {ENDING}"
NO_SPOT_OF_SEVERAL = (
    "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request "
    f"configuration. Please adjust your request and try again. {ENDING}"
)
NO_SPOT_IN_POOL = f"Could not launch Spot Instances. InsufficientInstanceCapacity - {NO_SPOT}"
NO_QUOTA = (
    "You have requested more vCPU capacity than your current vCPU limit of 384 allows for the instance bucket that the "
    "specified instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request an "
    f"adjustment to this limit. {ENDING}"
)
NO_QUOTA_OF_SEVERAL = f"Could not launch On-Demand Instances. VcpuLimitExceeded - {NO_QUOTA}"
NO_SPOT_QUOTA = f"Max spot instance count exceeded. {ENDING}"
NO_SPOT_QUOTA_OF_SEVERAL = f"Could not launch Spot Instances. MaxSpotInstanceCountExceeded - {NO_SPOT_QUOTA}"
UNSUPPORTED = (
    "Could not launch Spot Instances. InvalidFleetConfiguration - Your requested instance type (p3.8xlarge) is not "
    f"supported in your requested Availability Zone (us-east-2c). {ENDING}"
)


@pytest.mark.parametrize(
    ("message", "is_of", "on_spot", "code"),
    [
        (NO_CAPACITY, "capacity", False, "InsufficientInstanceCapacity"),
        (NO_CAPACITY_OF_SEVERAL, "capacity", False, "InsufficientInstanceCapacity"),
        (NO_SPOT, "capacity", True, "UnfulfillableCapacity"),
        (NO_SPOT_OF_SEVERAL, "capacity", True, "UnfulfillableCapacity"),
        (NO_SPOT_IN_POOL, "capacity", True, "InsufficientInstanceCapacity"),
        (NO_QUOTA, "quota", False, "VcpuLimitExceeded"),
        (NO_QUOTA_OF_SEVERAL, "quota", False, "VcpuLimitExceeded"),
        (NO_SPOT_QUOTA, "quota", True, "MaxSpotInstanceCountExceeded"),
        (NO_SPOT_QUOTA_OF_SEVERAL, "quota", True, "MaxSpotInstanceCountExceeded"),
        (UNSUPPORTED, "something else", True, "InvalidFleetConfiguration"),
    ],
    ids=lambda value: None if " " in str(value) else str(value),
)
def test_a_message_is_of_capacity_or_of_a_quota(message: str, is_of: str, on_spot: bool, code: str) -> None:
    failure = Failure(message)
    assert (failure.is_of_capacity, failure.is_of_quota) == (is_of == "capacity", is_of == "quota")
    assert (failure.is_on_spot, failure.code) == (on_spot, code)


def activity(status: str, subnet: str, minutes_ago: float = 1, message: str = NO_CAPACITY, **changed: Any) -> Any:
    """A launch as `aws autoscaling describe-scaling-activities` shows it."""
    return {
        "ActivityId": "ee05cf07",
        "AutoScalingGroupName": GROUP,
        "Description": "Launching a new EC2 instance.  Status Reason: ...",
        "Cause": "At ... an instance was started in response to a difference between desired and actual capacity.",
        "StartTime": datetime.now(UTC) - timedelta(minutes=minutes_ago),
        "StatusCode": status,
        "StatusMessage": message,
        "Progress": 100,
        "Details": f'{{"Subnet ID":"{subnet}","Availability Zone":"us-east-1a"}}',
        **changed,
    }


class Group:
    """The workers' Auto Scaling group in moto, with the activities that moto doesn't keep.

    Attributes:
        subnets: The subnet in each of ZONES.
        activities: What a test says has happened.
        updates: What was changed.
        has_instances: False while EC2 has none for it, which moto always has.
    """

    def __init__(self, url: str, subnets: list[str]) -> None:
        self._client = client("autoscaling", url)
        self.subnets = subnets
        self.activities: list[Any] = []
        self.updates: list[Any] = []
        self.has_instances = True

    def create(self, *subnets: str, size: int = 0) -> None:
        self._client.create_auto_scaling_group(
            AutoScalingGroupName=GROUP,
            LaunchConfigurationName=LAUNCH_CONFIGURATION,
            MinSize=size,
            MaxSize=4,
            VPCZoneIdentifier=",".join(subnets),
        )

    def delete(self) -> None:
        self._client.delete_auto_scaling_group(AutoScalingGroupName=GROUP, ForceDelete=True)

    @property
    def state(self) -> Any:
        [group] = self._client.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])["AutoScalingGroups"]
        return group

    @property
    def zones_of_instances(self) -> list[str]:
        return [each["AvailabilityZone"] for each in self.state["Instances"]]

    def describe_auto_scaling_groups(self, **given: Any) -> Any:
        answer = self._client.describe_auto_scaling_groups(**given)
        for each in answer["AutoScalingGroups"] if not self.has_instances else ():
            each["Instances"] = []
        return answer

    def describe_scaling_activities(self, **given: Any) -> Any:
        self._client.describe_scaling_activities(**given)  # it checks the request
        return {"Activities": self.activities}

    def update_auto_scaling_group(self, **given: Any) -> Any:
        self.updates.append(given)
        return self._client.update_auto_scaling_group(**given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.fixture(scope="module")
def subnets(aws_server: str) -> list[str]:
    """A subnet in each of ZONES."""
    ec2 = client("ec2", aws_server)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    blocks = {zone: f"10.0.{index}.0/24" for index, zone in enumerate(ZONES)}
    made = [ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=zone) for zone, block in blocks.items()]
    return [each["Subnet"]["SubnetId"] for each in made]


@pytest.fixture(scope="module")
def launch_configuration(aws_server: str) -> None:
    client("autoscaling", aws_server).create_launch_configuration(
        LaunchConfigurationName=LAUNCH_CONFIGURATION, ImageId="ami-12c6146b", InstanceType="g5.xlarge"
    )


@pytest.fixture
def group(aws_server: str, subnets: list[str], launch_configuration: None) -> Iterator[Group]:
    made = Group(aws_server, subnets)
    yield made
    made.delete()


class Watch:
    """The watch of a waiting run, with the lines that it shows."""

    def __init__(self, group: Group, zones: int = 1, is_idle: bool = True, **changed: Any) -> None:
        named = [
            {"zone": zone, "subnet_id": subnet, "placement_group": f"pg-{zone[-1]}" if zone != ZONES[2] else None}
            for zone, subnet in zip(ZONES[:zones], group.subnets, strict=False)
        ]
        workers: Any = {"group": GROUP, "types": ["g5.xlarge"], "zones": named, "spot": False, "spread": False}
        self.lines: list[str] = []
        self.is_idle = is_idle
        self.watch = CapacityWatch({**workers, **changed}, lambda: self.is_idle, self.lines.append, lambda: group)

    def look(self) -> str:
        self.watch.look()
        return self.watch.shortage


IN_A = "EC2 has no g5.xlarge in us-east-1a at the moment (InsufficientInstanceCapacity)"
MORE_TYPES = "add zones (availabilityZone or subnetId), or types: `pulumi config set workerInstanceType g5.xlarge,TYPE`"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (NO_CAPACITY, f"{IN_A}; {MORE_TYPES}"),
        (
            NO_SPOT_OF_SEVERAL,
            "EC2 has no g5.xlarge on spot in us-east-1a at the moment (UnfulfillableCapacity); "
            f"{MORE_TYPES}, or take them on demand: `pulumi config set spot false`",
        ),
        (
            NO_QUOTA,
            "the account's quota has no room for another g5.xlarge (VcpuLimitExceeded); "
            "ask for more under Service Quotas, or for fewer workers",
        ),
        (
            NO_SPOT_QUOTA,
            "the account's quota has no room for another g5.xlarge on spot (MaxSpotInstanceCountExceeded); "
            "ask for more under Service Quotas, or for fewer workers",
        ),
        ("Client.InternalError:\n no key", "EC2 starts no g5.xlarge: Client.InternalError: no key"),
    ],
    ids=["capacity", "spot capacity", "quota", "spot quota", "anything else"],
)
def test_a_shortage_is_one_line_with_its_way_out(message: str, line: str, group: Group) -> None:
    group.create(group.subnets[0])
    group.activities = [activity("Failed", group.subnets[0], message=message)]
    waiting = Watch(group)
    assert waiting.look() == waiting.look() == line
    assert waiting.lines == [line], "once: the status line shows it as long as it lasts"


def test_all_types_are_named(group: Group) -> None:
    group.create(group.subnets[0])
    group.activities = [activity("Failed", group.subnets[0], message=NO_CAPACITY_OF_SEVERAL)]
    shortage = Watch(group, types=["g5.xlarge", "g6.xlarge"]).look()
    assert shortage.startswith("EC2 has no g5.xlarge or g6.xlarge in us-east-1a")
    assert "workerInstanceType g5.xlarge,g6.xlarge,TYPE" in shortage, "the way out keeps what there is"


@pytest.mark.parametrize(
    "happened",
    [
        lambda a, b: [],
        lambda a, b: [activity("Successful", a, 1), activity("Failed", a, 2)],
        lambda a, b: [activity("Failed", a, 16)],
        lambda a, b: [activity("Failed", b)],
        lambda a, b: [activity("InProgress", a)],
        lambda a, b: [activity("Failed", a, Description="Terminating EC2 instance: i-0123")],
    ],
    ids=["none", "a success since", "too old", "another zone", "not ended", "no launch"],
)
def test_only_a_failure_of_now_and_here_counts(happened: Callable[..., list[Any]], group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a)
    group.activities = happened(a, b)
    assert Watch(group, zones=2).look() == ""
    assert group.updates == []


def test_a_failure_counts_while_the_next_launch_is_under_way(group: Group) -> None:
    group.create(group.subnets[0])
    group.activities = [activity("InProgress", group.subnets[0], 0), activity("Failed", group.subnets[0], 2)]
    assert Watch(group).look().startswith(IN_A)


def test_the_workers_move_to_the_next_zone_and_take_all_of_them_along(group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a, size=1)
    group.activities = [activity("Failed", a)]
    waiting = Watch(group, zones=3)
    assert waiting.look() == "", "in the new zone nothing is known to be lacking"
    assert waiting.lines == ["no g5.xlarge in us-east-1a; moving the workers to us-east-1b"]
    assert group.updates == [{"AutoScalingGroupName": GROUP, "VPCZoneIdentifier": b, "PlacementGroup": "pg-b"}]
    assert group.state["VPCZoneIdentifier"] == b
    assert group.zones_of_instances == ["us-east-1b"], "the job's workers are all in one zone, and as many as before"


def test_each_zone_is_tried_once(group: Group) -> None:
    group.create(group.subnets[0])
    waiting = Watch(group, zones=3)
    for subnet in group.subnets * 2:
        group.activities = [
            activity("Failed", subnet, minutes_ago=0, StartTime=datetime.now(UTC) + timedelta(seconds=1))
        ]
        waiting.look()
    assert [each["VPCZoneIdentifier"] for each in group.updates] == group.subnets[1:]
    assert group.updates[-1]["PlacementGroup"] == "", "what has no placement group must not keep another zone's"
    group.activities = [activity("Failed", group.subnets[2], minutes_ago=-1)]
    assert waiting.look() == (
        "EC2 has no g5.xlarge in any of us-east-1a, us-east-1b, us-east-1c at the moment "
        f"(InsufficientInstanceCapacity); {MORE_TYPES}"
    )
    assert len(waiting.lines) == 3, "two moves and the shortage"


def test_after_the_last_zone_of_the_list_comes_the_first(group: Group) -> None:
    a, b, c = group.subnets
    group.create(b)
    waiting = Watch(group, zones=3)
    for subnet in (b, c, a):
        group.activities = [activity("Failed", subnet, minutes_ago=-1)]
        waiting.look()
    assert [each["VPCZoneIdentifier"] for each in group.updates] == [c, a], (
        "a zone is none the worse for an earlier job"
    )


def test_after_a_move_an_earlier_failure_there_does_not_count(group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a)
    group.activities = [activity("Failed", a, 1), activity("Failed", b, 5)]
    waiting = Watch(group, zones=3)
    assert [waiting.look(), waiting.look()] == ["", ""]
    assert len(group.updates) == 1, "the zone has not been tried in this wait"


def test_another_job_may_move_the_workers_on(group: Group) -> None:
    a, b, c = group.subnets
    group.create(a, size=1)
    group.activities = [activity("Failed", a)]
    ours, theirs = Watch(group, zones=3), Watch(group, zones=3)
    ours.look()
    theirs.look()
    group.activities = [activity("Failed", b, minutes_ago=-1)]
    theirs.look()
    assert (group.state["VPCZoneIdentifier"], group.zones_of_instances) == (c, ["us-east-1c"])
    started = group.state["Instances"]
    ours.look()
    assert group.state["Instances"] == started, "one job's wait must not end what another's has started"


def test_what_could_not_be_ended_is_ended_later(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, _ = group.subnets
    group.create(a, size=1)
    group.activities = [activity("Failed", a)]
    waiting = Watch(group, zones=2)

    def refuse(**given: Any) -> None:
        raise RuntimeError("ResourceContention")

    with monkeypatch.context() as patch:
        patch.setattr(group, "terminate_instance_in_auto_scaling_group", refuse)
        waiting.watch.look_if_due()
    assert group.zones_of_instances == ["us-east-1a"]
    waiting.look()
    assert group.zones_of_instances == ["us-east-1b"], "the job would have a worker in each zone"


def test_the_workers_stay_while_any_is_in_use(group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a, size=1)
    group.activities = [activity("Failed", a)]
    waiting = Watch(group, zones=2, is_idle=False)
    assert waiting.look() == f"{IN_A}; the workers move to us-east-1b as soon as no GPU is in use"
    assert (group.updates, group.zones_of_instances) == ([], ["us-east-1a"])
    waiting.is_idle = True
    waiting.look()
    assert (group.state["VPCZoneIdentifier"], group.zones_of_instances) == (b, ["us-east-1b"])


@pytest.mark.parametrize("message", [NO_QUOTA, UNSUPPORTED], ids=["quota", "unsupported"])
def test_for_want_of_anything_else_nothing_moves(message: str, group: Group) -> None:
    group.create(group.subnets[0])
    group.activities = [activity("Failed", group.subnets[0], message=message)]
    assert Watch(group, zones=2).look()
    assert group.updates == []


def test_spread_workers_stay_where_they_are(group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a, b)
    group.activities = [activity("Failed", a)]
    assert (
        Watch(group, zones=2, spread=True).look().startswith("EC2 has no g5.xlarge in any of us-east-1a, us-east-1b ")
    )
    assert group.updates == [], "the group itself goes to the other zone"


@pytest.mark.parametrize("zones", [(2,), (0, 1)], ids=["a zone that is no longer named", "two zones at once"])
def test_a_group_outside_the_zones_moves_to_the_first(zones: tuple[int, ...], group: Group) -> None:
    group.create(*(group.subnets[index] for index in zones))
    waiting = Watch(group, zones=2)
    waiting.look()
    assert group.state["VPCZoneIdentifier"] == group.subnets[0]
    assert waiting.lines == ["the workers are not in one of the stack's zones; moving the workers to us-east-1a"]


def test_a_group_that_has_a_smallest_size_asks_on_when_no_job_waits(group: Group) -> None:
    group.create(group.subnets[0], size=1)
    waiting = Watch(group)
    waiting.look()
    assert not waiting.watch.asks_on, "it has what it asks for"
    group.has_instances = False
    waiting.look()
    assert waiting.watch.asks_on, "what then starts costs money, and nobody knows"


def test_a_group_that_is_gone_is_nothing_to_say(group: Group) -> None:
    group.create(group.subnets[0])
    waiting = Watch(group)
    group.describe_auto_scaling_groups = lambda **given: {"AutoScalingGroups": []}
    assert (waiting.look(), waiting.lines) == ("", [])


def test_a_look_is_taken_now_and_then(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    group.create(group.subnets[0])
    now = 1000.0
    monkeypatch.setattr(capacity.time, "monotonic", lambda: now)
    waiting = Watch(group)
    waiting.watch.look_if_due()
    group.activities = [activity("Failed", group.subnets[0])]
    waiting.watch.look_if_due()
    assert waiting.watch.shortage == "", "AWS throttles who asks every two seconds"
    now += capacity.POLL_SECONDS
    waiting.watch.look_if_due()
    assert waiting.watch.shortage.startswith(IN_A)


def test_an_aws_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(capacity.time, "monotonic", lambda: now)
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    workers: Any = {"group": GROUP, "types": ["g5.xlarge"], "zones": [], "spot": False, "spread": False}
    watch = CapacityWatch(workers, lambda: True, lines.append)
    for _ in range(3):
        watch.look_if_due()
        now += capacity.POLL_SECONDS
    [line] = lines
    assert line.startswith("AWS does not tell how the workers are doing; waiting all the same (")
