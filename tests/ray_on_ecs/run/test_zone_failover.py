"""A waiting run reports missing EC2 capacity, and its workers move to the next zone, in moto's EC2 Auto Scaling.

The messages come from real groups, as issues on GitHub quote them.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from ray_on_ecs.run import zone_failover
from ray_on_ecs.run.zone_failover import ZoneFailover
from ray_on_ecs.starting.states import CAPACITY, QUOTA, SPOT
from tests.aws import client
from tests.log_lines import collect_lines

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
    ("message", "is_of", "on_spot"),
    [
        (NO_CAPACITY, "capacity", False),
        (NO_CAPACITY_OF_SEVERAL, "capacity", False),
        (NO_SPOT, "capacity", True),
        (NO_SPOT_OF_SEVERAL, "capacity", True),
        (NO_SPOT_IN_POOL, "capacity", True),
        (NO_QUOTA, "quota", False),
        (NO_QUOTA_OF_SEVERAL, "quota", False),
        (NO_SPOT_QUOTA, "quota", True),
        (NO_SPOT_QUOTA_OF_SEVERAL, "quota", True),
        (UNSUPPORTED, "something else", True),
    ],
)
def test_messages_are_classified_as_capacity_or_quota(message: str, is_of: str, on_spot: bool) -> None:
    found = [
        kind
        for kind, pattern in {"capacity": CAPACITY.pattern, "quota": QUOTA.pattern}.items()
        if pattern.search(message)
    ]
    assert found == [is_of] * (is_of != "something else")
    assert bool(SPOT.search(message)) == on_spot


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.passed = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.passed


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
        activities: The activities that a test adds.
        updates: The changes.
        has_instances: False while EC2 has no instances for it; moto always has some.
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
    """The watch of a waiting run, with its output lines and its clock."""

    def __init__(
        self,
        group: Any,
        zones: int = 1,
        is_idle: bool = True,
        needed: int = 1,
        clock: Any = None,
        others_wait: bool = False,
        **changed: Any,
    ) -> None:
        named = [
            {"zone": zone, "subnet_id": subnet, "placement_group": f"pg-{zone[-1]}" if zone != ZONES[2] else None}
            for zone, subnet in zip(ZONES[:zones], group.subnets, strict=False)
        ]
        workers: Any = {"group": GROUP, "types": ["g5.xlarge"], "zones": named, "spot": False}
        workers |= {"spread": False, "gpus": 1}
        self.lines = collect_lines()
        self.latest: Any = None
        self.is_idle = is_idle
        self.clock = clock or Clock()
        workers |= changed
        self.workers = workers
        self.watch = ZoneFailover(
            workers,
            needed,
            lambda: self.is_idle,
            lambda: others_wait,
            latest=lambda: self.latest,
            connect=lambda: group,
            now=self.clock,
        )

    def look(self) -> str:
        self.watch.look()
        return self.watch.shortage


IN_A = "EC2 has no g5.xlarge in us-east-1a at the moment"
MORE_TYPES = (
    "add zones (availabilityZones or subnetIds), or types: `pulumi config set workerInstanceTypes g5.xlarge,TYPE`"
)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (NO_CAPACITY, f"{IN_A}; {MORE_TYPES}"),
        (
            NO_SPOT_OF_SEVERAL,
            "EC2 has no g5.xlarge on spot in us-east-1a at the moment; "
            f"{MORE_TYPES}, or take them on demand: `pulumi config set spot false`",
        ),
        (
            NO_QUOTA,
            "the account's quota has no room for another g5.xlarge; "
            "ask for more under Service Quotas, or for fewer workers",
        ),
        (
            NO_SPOT_QUOTA,
            "the account's quota has no room for another g5.xlarge on spot; "
            "ask for more under Service Quotas, or for fewer workers",
        ),
        ("Another error:\n no luck", "EC2 starts no g5.xlarge: Another error: no luck"),
    ],
    ids=["capacity", "spot capacity", "quota", "spot quota", "anything else"],
)
def test_shortage_is_one_line_with_remedies(message: str, line: str, group: Group) -> None:
    group.create(group.subnets[0])
    group.activities = [activity("Failed", group.subnets[0], message=message)]
    waiting = Watch(group)
    assert waiting.look() == waiting.look() == line
    assert waiting.lines == [line]


def test_all_types_are_named(group: Group) -> None:
    group.create(group.subnets[0])
    group.activities = [activity("Failed", group.subnets[0], message=NO_CAPACITY_OF_SEVERAL)]
    shortage = Watch(group, types=["g5.xlarge", "g6.xlarge"]).look()
    assert shortage.startswith("EC2 has no g5.xlarge or g6.xlarge in us-east-1a")
    assert "workerInstanceTypes g5.xlarge,g6.xlarge,TYPE" in shortage


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
def test_only_recent_failures_of_this_zone_count(happened: Callable[..., list[Any]], group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a)
    group.activities = happened(a, b)
    assert Watch(group, zones=2).look() == ""
    assert group.updates == []


def test_failure_counts_during_the_next_launch(group: Group) -> None:
    group.create(group.subnets[0])
    group.activities = [activity("InProgress", group.subnets[0], 0), activity("Failed", group.subnets[0], 2)]
    assert Watch(group).look().startswith(IN_A)


def test_all_workers_move_to_the_next_zone(group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a, size=1)
    group.activities = [activity("Failed", a)]
    waiting = Watch(group, zones=3, needed=2)
    assert waiting.look().startswith("EC2 has only 1 of 2 g5.xlarge in us-east-1a at the moment")
    waiting.lines.clear()
    waiting.clock.passed = zone_failover.PATIENCE
    assert waiting.look() == ""
    assert waiting.lines == ["only 1 of 2 g5.xlarge in us-east-1a; moving the workers to us-east-1b"]
    assert group.updates == [{"AutoScalingGroupName": GROUP, "VPCZoneIdentifier": b, "PlacementGroup": "pg-b"}]
    assert group.state["VPCZoneIdentifier"] == b
    assert group.zones_of_instances == ["us-east-1b"]


def test_each_zone_is_tried_once(group: Group) -> None:
    group.create(group.subnets[0])
    waiting = Watch(group, zones=3)
    for subnet in group.subnets * 2:
        group.activities = [
            activity("Failed", subnet, minutes_ago=0, StartTime=datetime.now(UTC) + timedelta(seconds=1))
        ]
        waiting.look()
    assert [each["VPCZoneIdentifier"] for each in group.updates] == group.subnets[1:]
    assert group.updates[-1]["PlacementGroup"] == "", "the placement group of another zone must not stay"
    group.activities = [activity("Failed", group.subnets[2], minutes_ago=-1)]
    assert waiting.look() == (
        f"EC2 has no g5.xlarge in any of us-east-1a, us-east-1b, us-east-1c at the moment; {MORE_TYPES}"
    )
    assert len(waiting.lines) == 3


def test_zones_are_tried_cyclically(group: Group) -> None:
    a, b, c = group.subnets
    group.create(b)
    waiting = Watch(group, zones=3)
    for subnet in (b, c, a):
        group.activities = [activity("Failed", subnet, minutes_ago=-1)]
        waiting.look()
    assert [each["VPCZoneIdentifier"] for each in group.updates] == [c, a]


def test_earlier_failure_in_the_new_zone_is_ignored(group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a)
    group.activities = [activity("Failed", a, 1), activity("Failed", b, 5)]
    waiting = Watch(group, zones=3)
    assert [waiting.look(), waiting.look()] == ["", ""]
    assert len(group.updates) == 1


def test_another_job_may_move_the_workers(group: Group) -> None:
    a, b, c = group.subnets
    group.create(a, size=1)
    group.activities = [activity("Failed", a)]
    ours, theirs = Watch(group, zones=3, needed=2), Watch(group, zones=3, needed=2)
    for each in (ours, theirs):
        each.look()
        each.clock.passed = zone_failover.PATIENCE
        each.look()
    group.activities = [activity("Failed", b, minutes_ago=-6)]
    theirs.look()
    theirs.clock.passed = 3 * zone_failover.PATIENCE
    theirs.look()
    assert (group.state["VPCZoneIdentifier"], group.zones_of_instances) == (c, ["us-east-1c"])
    started = group.state["Instances"]
    ours.look()
    assert group.state["Instances"] == started, "a waiting job must not end another job's instances"


def test_failed_termination_is_repeated(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, _ = group.subnets
    group.create(a, size=1)
    group.activities = [activity("Failed", a)]
    waiting = Watch(group, zones=2, needed=2)
    waiting.look()
    waiting.clock.passed = zone_failover.PATIENCE

    def refuse(**given: Any) -> None:
        raise RuntimeError("ResourceContention")

    with monkeypatch.context() as patch:
        patch.setattr(group, "terminate_instance_in_auto_scaling_group", refuse)
        waiting.watch.look_if_due()
    assert group.zones_of_instances == ["us-east-1a"]
    waiting.look()
    assert group.zones_of_instances == ["us-east-1b"], "the job would have a worker in each zone"


def test_workers_stay_while_any_is_in_use(group: Group) -> None:
    a, b, _ = group.subnets
    group.create(a, size=1)
    group.activities = [activity("Failed", a)]
    waiting = Watch(group, zones=2, is_idle=False, needed=2)
    waiting.look()
    waiting.clock.passed = zone_failover.PATIENCE
    assert waiting.look() == (
        "EC2 has only 1 of 2 g5.xlarge in us-east-1a at the moment; the workers move to "
        "us-east-1b as soon as no GPU is in use, if EC2 has no more for 5 minutes"
    )
    assert (group.updates, group.zones_of_instances) == ([], ["us-east-1a"])
    waiting.is_idle = True
    waiting.look()
    assert (group.state["VPCZoneIdentifier"], group.zones_of_instances) == (b, ["us-east-1b"])


@pytest.mark.parametrize("message", [NO_QUOTA, UNSUPPORTED], ids=["quota", "unsupported"])
def test_only_missing_capacity_moves_workers(message: str, group: Group) -> None:
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
    assert group.updates == []


@pytest.mark.parametrize("zones", [(2,), (0, 1)], ids=["a zone that is no longer named", "two zones at once"])
def test_group_outside_the_zones_moves_to_the_first(zones: tuple[int, ...], group: Group) -> None:
    group.create(*(group.subnets[index] for index in zones))
    waiting = Watch(group, zones=2)
    waiting.look()
    assert group.state["VPCZoneIdentifier"] == group.subnets[0]
    assert waiting.lines == ["the workers are not in one of the stack's zones; moving the workers to us-east-1a"]


def test_deleted_group_is_named(group: Group) -> None:
    group.create(group.subnets[0])
    waiting = Watch(group)
    group.describe_auto_scaling_groups = lambda **given: {"AutoScalingGroups": []}
    line = "Auto Scaling group workers not found; pulumi up creates it"
    assert (waiting.look(), waiting.lines) == (line, [line])


def test_capacity_is_checked_at_intervals(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    group.create(group.subnets[0])
    now = 1000.0
    monkeypatch.setattr(zone_failover.time, "monotonic", lambda: now)
    waiting = Watch(group)
    waiting.watch.look_if_due()
    group.activities = [activity("Failed", group.subnets[0])]
    waiting.watch.look_if_due()
    assert waiting.watch.shortage == "", "AWS throttles requests every two seconds"
    now += zone_failover.POLL_SECONDS
    waiting.watch.look_if_due()
    assert waiting.watch.shortage.startswith(IN_A)


def test_unreachable_aws_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(zone_failover.time, "monotonic", lambda: now)
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    lines = collect_lines()
    workers: Any = {"group": GROUP, "types": ["g5.xlarge"], "zones": [], "spot": False, "gpus": 1}
    watch = ZoneFailover(workers, 1, lambda: True, lambda: False)
    for _ in range(3):
        watch.look_if_due()
        now += zone_failover.POLL_SECONDS
    [line] = lines
    assert line.startswith("AWS does not tell how the workers are doing; waiting all the same (")


class Cloud:
    """An Auto Scaling group, the available instances of its zones, and the time between two looks.

    Attributes:
        has: The instances that EC2 has for the group in each of ZONES.
        desired: The number that the group asks for.
        instances: The zone of each instance, by name.
        zone: The zone in which the group starts instances.
        moves: The zones to which it was moved.
        message: The reason of a failed launch.
    """

    def __init__(self, desired: int, *has: int) -> None:
        self.has = dict(zip(ZONES, has, strict=False))
        self.subnets = [f"subnet-{zone[-1]}" for zone in self.has]
        self.desired = desired
        self.instances: dict[str, str] = {}
        self.zone = ZONES[0]
        self.moves: list[str] = []
        self.message = NO_CAPACITY
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self._activities: list[Any] = []
        self._started = 0

    def step(self) -> None:
        """Launch the missing instances of the group, one after the other, until one fails."""
        self.now += timedelta(seconds=zone_failover.POLL_SECONDS)
        while len(self.instances) < self.desired:
            self.now += timedelta(milliseconds=1)
            there = self.in_zone(self.zone) < self.has[self.zone]
            status, subnet = "Successful" if there else "Failed", f"subnet-{self.zone[-1]}"
            self._activities.append(activity(status, subnet, message=self.message, StartTime=self.now))
            if not there:
                return
            self._started += 1
            self.instances[f"i-{self._started}"] = self.zone

    def in_zone(self, zone: str) -> int:
        return list(self.instances.values()).count(zone)

    def describe_auto_scaling_groups(self, **given: Any) -> Any:
        instances = [
            {"InstanceId": name, "AvailabilityZone": zone, "LifecycleState": "InService"}
            for name, zone in self.instances.items()
        ]
        return {
            "AutoScalingGroups": [
                {"MinSize": 0, "Instances": instances, "VPCZoneIdentifier": f"subnet-{self.zone[-1]}"}
            ]
        }

    def describe_scaling_activities(self, **given: Any) -> Any:
        return {"Activities": self._activities[::-1][: given["MaxRecords"]]}

    def update_auto_scaling_group(self, **given: Any) -> None:
        self.zone = f"us-east-1{given['VPCZoneIdentifier'][-1]}"
        self.moves.append(self.zone[-1])

    def terminate_instance_in_auto_scaling_group(self, **given: Any) -> None:
        del self.instances[given["InstanceId"]]

    def wait(self, needed: int, minutes: float = 60, **options: Any) -> Watch:
        """Let a run wait for `needed` instances this long, or until its group's zone has them."""
        watch = Watch(self, zones=len(self.has), needed=needed, clock=lambda: self.now, **options)
        end = self.now + timedelta(minutes=minutes)
        while self.now < end and self.in_zone(self.zone) < needed:
            self.step()
            watch.look()
        return watch


def test_partial_gang_is_given_up_after_minutes() -> None:
    cloud = Cloud(4, 3, 4, 4)
    cloud.wait(4, minutes=4)
    assert (cloud.moves, cloud.in_zone(ZONES[0])) == ([], 3)
    watch = cloud.wait(4)
    assert (cloud.moves, cloud.in_zone(ZONES[1]), len(cloud.instances)) == (["b"], 4, 4)
    assert watch.lines[-1] == "only 3 of 4 g5.xlarge in us-east-1a; moving the workers to us-east-1b"


def test_each_new_instance_extends_the_wait() -> None:
    cloud = Cloud(4, 1, 4)
    watch = Watch(cloud, zones=2, needed=4, clock=lambda: cloud.now)
    for number in (1, 2, 3, 4):
        cloud.has[ZONES[0]] = number
        end = cloud.now + 0.8 * zone_failover.PATIENCE
        while cloud.now < end:
            cloud.step()
            watch.look()
    assert (cloud.moves, cloud.in_zone(ZONES[0])) == ([], 4)


def test_one_worker_is_enough_despite_ecs_demand() -> None:
    cloud = Cloud(2, 1, 2, 2)
    watch = Watch(cloud, zones=3, needed=1, clock=lambda: cloud.now)
    for _ in range(180):
        cloud.step()
        assert watch.look() == ""
    assert (cloud.moves, cloud.in_zone(ZONES[0])) == ([], 1)


def test_last_zone_is_kept_without_capacity_anywhere() -> None:
    cloud = Cloud(2, 0, 0, 0)
    watch = cloud.wait(2)
    assert cloud.moves == ["b", "c"]
    assert watch.watch.shortage.startswith("EC2 has no g5.xlarge in any of us-east-1a, us-east-1b, us-east-1c at the ")
    cloud.has[ZONES[2]] = 2
    cloud.wait(2, minutes=1)
    assert (cloud.moves, cloud.in_zone(ZONES[2])) == (["b", "c"], 2), "the run uses a zone that recovers"


def test_gang_ends_in_the_zone_with_most() -> None:
    cloud = Cloud(4, 0, 2, 3)
    cloud.wait(4)
    assert (cloud.moves, cloud.in_zone(ZONES[2]), len(cloud.instances)) == (["b", "c"], 3, 3)
    cloud.has[ZONES[2]] = 4
    cloud.wait(4, minutes=1)
    assert cloud.in_zone(ZONES[2]) == 4


def test_gang_returns_to_the_zone_with_most() -> None:
    cloud = Cloud(4, 1, 3, 0)
    watch = cloud.wait(4)
    assert cloud.moves == ["b", "c", "b"]
    assert watch.lines[-2:] == [
        "no g5.xlarge in us-east-1c; moving the workers back to us-east-1b, which had 3, to stay there",
        "EC2 has only 3 of 4 g5.xlarge in us-east-1b at the moment; " + MORE_TYPES,
    ]
    assert (cloud.in_zone(ZONES[1]), len(cloud.instances)) == (3, 3)
    cloud.has[ZONES[1]] = 4
    cloud.wait(4, minutes=1)
    assert cloud.in_zone(ZONES[1]) == 4


def test_elastic_run_stays_with_its_fewest_workers() -> None:
    cloud = Cloud(4, 2, 4)
    watch = Watch(cloud, zones=2, needed=2, clock=lambda: cloud.now)
    for _ in range(180):
        cloud.step()
        watch.look()
    assert (cloud.moves, cloud.in_zone(ZONES[0])) == ([], 2)


def test_quota_moves_no_partial_gang() -> None:
    cloud = Cloud(4, 3, 4)
    cloud.message = NO_QUOTA
    watch = cloud.wait(4)
    assert (cloud.moves, cloud.in_zone(ZONES[0])) == ([], 3)
    assert watch.watch.shortage.startswith("the account's quota has no room for another g5.xlarge")


def test_instances_of_another_run_are_kept() -> None:
    cloud = Cloud(4, 3, 4)
    cloud.wait(4, is_idle=False)
    assert (cloud.moves, cloud.in_zone(ZONES[0])) == ([], 3)


def test_instances_of_another_waiting_run_stay() -> None:
    cloud = Cloud(4, 2, 4)
    cloud.wait(4, others_wait=True)
    assert (cloud.moves, cloud.in_zone(ZONES[0])) == ([], 2), "they still pull their image"
    cloud.instances.clear()
    cloud.has[ZONES[0]] = 0
    cloud.wait(4, others_wait=True)
    assert cloud.moves == ["b"]


def test_gang_moved_by_another_job_is_kept() -> None:
    cloud = Cloud(4, 2, 4)
    watch = Watch(cloud, zones=2, needed=2, clock=lambda: cloud.now)
    cloud.step()
    watch.look()
    cloud.update_auto_scaling_group(VPCZoneIdentifier="subnet-b")
    cloud.has[ZONES[1]] = 0
    for _ in range(30):
        cloud.step()
        watch.look()
    assert cloud.in_zone(ZONES[0]) == 2


def refusal(code: str, message: str = "…") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "Operation")


QUESTIONS = ("describe_auto_scaling_groups", "describe_scaling_activities")
CHANGES = ("update_auto_scaling_group", "terminate_instance_in_auto_scaling_group")
# Errors of any request to EC2 Auto Scaling, and those of the two changes.
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/CommonErrors.html
FAILURES = {
    "denied": refusal("AccessDenied", "User: … is not authorized to perform: ec2:RunInstances"),
    "denied by an SCP": refusal("AccessDenied", "… with an explicit deny in a service control policy"),
    "throttled": refusal("Throttling", "Rate exceeded"),
    "lost answer": ReadTimeoutError(endpoint_url="https://autoscaling.us-east-1.amazonaws.com"),
    "no connection": EndpointConnectionError(endpoint_url="https://autoscaling.us-east-1.amazonaws.com"),
    "invalid": refusal("ValidationError", "The subnet ID 'subnet-b' does not exist"),
    "under way": refusal("ScalingActivityInProgress"),
    "contention": refusal("ResourceContention"),
    "no role": refusal("ServiceLinkedRoleFailure"),
    "fault of AWS": refusal("InternalFailure"),
}


class FailingCloud(Cloud):
    """A cloud one of whose calls fails until a time; `does_it` if it is carried out and only its answer is lost."""

    def __init__(self, desired: int, *has: int, call: str, failure: Exception, does_it: bool = False) -> None:
        super().__init__(desired, *has)
        self.until = self.now + timedelta(minutes=20)
        self.calls = 0
        do = getattr(self, call)

        def fail(**given: Any) -> Any:
            if self.now >= self.until:
                return do(**given)
            self.calls += 1
            if does_it:
                do(**given)
            raise failure

        setattr(self, call, fail)


def looks(cloud: Cloud, watch: Watch, minutes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run look at its cloud, as it does while it waits."""
    end = cloud.now + timedelta(minutes=minutes)
    while cloud.now < end:
        cloud.step()
        monkeypatch.setattr(zone_failover.time, "monotonic", cloud.now.timestamp)
        watch.watch.look_if_due()


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("call", [*QUESTIONS, *CHANGES])
def test_a_failed_call_is_one_line_and_the_wait_goes_on(call: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = FailingCloud(3, 1, 3, call=call, failure=FAILURES[name])
    watch = Watch(cloud, zones=2, needed=3, clock=lambda: cloud.now)
    looks(cloud, watch, 19, monkeypatch)
    lines = [line for line in watch.lines if "AWS" in line]
    is_gone = name == "invalid" and call == CHANGES[1]  # another caller has ended the instance
    assert len(lines) == (not is_gone)
    if call == CHANGES[0]:
        assert lines[0].startswith("cannot move the workers to us-east-1b (AWS ")
        assert watch.watch.shortage.startswith("EC2 has only 1 of 3 g5.xlarge in us-east-1a at the moment; add zones")
        assert watch.watch.shortage in watch.lines
    looks(cloud, watch, 12, monkeypatch)
    stays = name == "invalid" and call == CHANGES[0]  # the zone's subnet does not come back
    assert cloud.in_zone(ZONES[0 if stays else 1]) == (1 if stays else 3)


@pytest.mark.parametrize("call", CHANGES)
def test_a_change_whose_answer_is_lost_is_made_once(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = FailingCloud(3, 1, 3, call=call, failure=FAILURES["lost answer"], does_it=True)
    looks(cloud, Watch(cloud, zones=2, needed=3, clock=lambda: cloud.now), 12, monkeypatch)
    assert (cloud.moves, cloud.in_zone(ZONES[1]), cloud.calls) == (["b"], 3, 1)


def test_a_denied_move_is_tried_again_after_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = FailingCloud(1, 0, 1, call=CHANGES[0], failure=FAILURES["denied"])
    looks(cloud, Watch(cloud, zones=2, clock=lambda: cloud.now), 19, monkeypatch)
    assert 2 <= cloud.calls <= 4


def test_a_zone_that_aws_does_not_know_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = Cloud(1, 0, 1, 1)
    move = cloud.update_auto_scaling_group

    def fail_for_b(**given: Any) -> None:
        if given["VPCZoneIdentifier"] == "subnet-b":
            raise FAILURES["invalid"]
        move(**given)

    monkeypatch.setattr(cloud, CHANGES[0], fail_for_b)
    looks(cloud, Watch(cloud, zones=3, clock=lambda: cloud.now), 5, monkeypatch)
    assert (cloud.moves, cloud.in_zone(ZONES[2])) == (["c"], 1)


def test_a_waiting_run_uses_zones_that_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = Cloud(1, 0, 0, 1)
    watch = Watch(cloud, zones=2, clock=lambda: cloud.now)
    looks(cloud, watch, 5, monkeypatch)
    assert (cloud.moves, cloud.instances) == (["b"], {})
    watch.latest = Watch(cloud, zones=3).workers
    looks(cloud, watch, 5, monkeypatch)
    assert (cloud.moves, cloud.in_zone(ZONES[2])) == (["b", "c"], 1)
