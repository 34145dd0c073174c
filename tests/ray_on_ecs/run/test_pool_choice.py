"""A waiting run goes to the next node group where EC2 refuses its instances, with EC2's own texts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from ray_on_ecs.aws import Refused
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.pools import setting
from ray_on_ecs.run import queue, shortage
from ray_on_ecs.run.pool_choice import PoolChoice, candidates, default_workers
from ray_on_ecs.run.queue import Ticket
from ray_on_ecs.run.shortage import Shortage
from ray_on_ecs.starting.states import CAPACITY
from tests.log_lines import collect_lines
from tests.refusals import (
    NO_CAPACITY,
    NO_CAPACITY_OF_SEVERAL,
    NO_QUOTA,
    NO_SPOT,
    NO_SPOT_OF_SEVERAL,
    NO_SPOT_QUOTA,
    UNSUPPORTED,
    no_capacity,
)

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
DENIED = "You are not authorized to perform this operation. Encoded authorization failure message: x"


def group(pool: str, gpu: str, zone: str, types: list[str], **changed: Any) -> dict[str, Any]:
    units = {"default_nodes": 1, "units": 1, "min": 0, "max": 4, "idle_minutes": 60, "spot": False, "disk_usd": 0.0}
    own = {"pool": pool, "gpu": gpu, "zones": [f"us-east-1{zone}"], "types": types}
    return {**own, **dict.fromkeys(("group", "provider"), f"{pool}-{zone}"), **units, **changed}


A10G = {
    "workers": group("default", "A10G", "a", ["g5.xlarge"]),
    "workers-b": group("default", "A10G", "b", ["g5.xlarge"]),
    "workers-c": group("default", "A10G", "c", ["g5.xlarge"]),
}
H100 = {"h100-workers": group("h100", "H100", "c", ["p5.48xlarge"], units=8, max=2, default_nodes=2)}
A100 = {"p4d-workers": group("p4d", "A100", "a", ["p4d.24xlarge"], units=8, max=1)}
CPU = {"cpu-workers": group("cpu", "", "a", ["m7i.2xlarge"], units=8)}


def stack(*groups: Mapping[str, Any], **changed: Any) -> Any:
    merged = {kind: each for part in groups for kind, each in part.items()}
    return {"cluster": "ray", "groups": merged, "prices": None, "head_usd": None, "network_gbits": {}, **changed}


def config(**settings: Any) -> RunConfig:
    return RunConfig(command=("train.py",), run_name="mine", **settings)


class Cloud:
    """The node groups in AWS.

    Attributes:
        now: The time.
        has: The number of instances that EC2 has for each group; a group that is missing has none.
        desired: The number that each group asks for.
        refusals: EC2's words for each group.
        errors: The error of an operation.
    """

    def __init__(self) -> None:
        self.now = BEGAN
        self.has: dict[str, int] = {}
        self.instances: dict[str, int] = {}
        self.refusals: dict[str, str] = {}
        self.activities: dict[str, list[Any]] = {}
        self.errors: dict[str, Exception] = {}
        self.deleted: set[str] = set()
        self.reservation: Any = None
        self.asked: list[str] = []

    def want(self, name: str, number: int) -> None:
        """Let a group launch instances up to this number, the last of which may be refused."""
        while self.instances.get(name, 0) < number:
            self.now += timedelta(milliseconds=1)
            there = self.instances.get(name, 0) < self.has.get(name, 0)
            self.launch(name, "Successful" if there else "Failed", self.refusals.get(name, NO_CAPACITY))
            if not there:
                return
            self.instances[name] = self.instances.get(name, 0) + 1

    def launch(self, name: str, status: str, message: str, at: datetime | None = None) -> None:
        launched = {"Description": "Launching a new EC2 instance: i-1", "StatusCode": status, "Details": "{}"}
        self.activities.setdefault(name, []).insert(
            0, {**launched, "StatusMessage": message, "StartTime": at or self.now}
        )

    def ask(self, service: str, operation: str, **given: Any) -> Any:
        self.asked.append(operation)
        if operation in self.errors:
            raise self.errors[operation]
        return getattr(self, operation)(**given)

    def describe_auto_scaling_groups(self, AutoScalingGroupNames: list[str]) -> Any:
        [name] = AutoScalingGroupNames
        instance = {"LifecycleState": "InService", "AvailabilityZone": f"us-east-1{name[-1]}"}
        instances = [{**instance, "InstanceId": f"i-{number}"} for number in range(self.instances.get(name, 0))]
        found = {"AutoScalingGroupName": name, "Instances": instances, "MaxSize": 4, "DesiredCapacity": 4}
        found["AvailabilityZones"] = [f"us-east-1{name[-1]}"]
        return {"AutoScalingGroups": [] if name in self.deleted else [found]}

    def describe_capacity_reservations(self, CapacityReservationIds: list[str]) -> Any:
        if isinstance(self.reservation, Exception):
            raise self.reservation
        return {"CapacityReservations": [] if self.reservation is None else [self.reservation]}

    def describe_scaling_activities(self, AutoScalingGroupName: str, MaxRecords: int) -> Any:
        return {"Activities": self.activities.get(AutoScalingGroupName, [])[:MaxRecords]}


class Run:
    """A run that waits.

    Attributes:
        choice: Its choice.
        cloud: What EC2 has.
        latest: The stack as it is now.
        full: The pools whose queue has no room.
        pools: What its documents have had.
        lines: The lines of its log.
    """

    def __init__(self, info: Any, *, needed: int = 1, place: str = "", **settings: Any) -> None:
        self.cloud = Cloud()
        self.latest, self.full, self.needed, self.of_others = info, set[str](), needed, 0
        self.pools: list[Any] = []
        self.lines = collect_lines()
        settings = {"num_workers": needed} | settings
        self.pool = place or info["groups"][candidates(config(**settings), info)[0]]["pool"]
        self.choice = PoolChoice(
            config(**settings),
            info,
            cast("Any", self),
            lambda kind, latest: (self.needed, self.of_others),
            self.pools.append,
            watch=self._watch,
            latest=lambda: self.latest,
            now=lambda: self.cloud.now,
        )
        self.choice.begin()

    def _watch(self, *given: Any) -> Shortage:
        return Shortage(*given, ask=self.cloud.ask, now=lambda: self.cloud.now)

    def move(self, pool: str, gpus: Mapping[str, int]) -> bool:
        if pool in self.full:
            return False
        self.pool = pool
        return True

    def look(self, count: int = 1, demand: int | None = None) -> str:
        """Let the run's group launch instances, and the run look at it; return its kind."""
        for _ in range(count):
            name = self.choice.info["groups"][self.choice.kind]["group"]
            self.cloud.want(name, self.needed if demand is None else demand)
            self.cloud.now += timedelta(seconds=shortage.POLL_SECONDS)
            self.choice.look_if_due()
        return self.choice.kind

    def visit(self, count: int = 8) -> list[str]:
        return [self.look() for _ in range(count)]


@pytest.fixture(autouse=True)
def every_look_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "POLL_SECONDS", 0.0)


ONE_EACH = stack(A10G, H100, A100, CPU)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, [*A10G, *H100, *A100]),
        ({"gpu": "H100"}, [*H100]),
        ({"gpu": "h100,a100"}, [*H100, *A100]),
        ({"gpu": "A100, H100"}, [*A100, *H100]),
        ({"pool": "default"}, [*A10G]),
        ({"pool": "cpu"}, [*CPU]),
        ({"pool": "h100", "device": "cpu"}, [*H100]),
        ({"device": "cpu"}, [*A10G, *CPU]),
        ({"device": "cpu", "pool": "cpu,h100"}, [*CPU, *H100]),
        ({"device": "cpu", "num_workers": 33}, [*A10G]),
        ({"pool": "cpu", "num_workers": 32}, [*CPU]),
        ({"driver": True}, []),
        ({"num_workers": 5}, [*H100, *A100]),
        ({"num_workers": "9:64"}, [*H100]),
        ({"gpu": "A10G,H100", "num_workers": 16}, [*H100]),
        ({"device": "cuda"}, [*A10G, *H100, *A100]),
    ],
)
def test_candidates_are_those_that_can_hold_the_run(settings: Any, kinds: list[str]) -> None:
    assert candidates(config(**settings), ONE_EACH) == kinds


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"gpu": "H1000"}, "--gpu: 'H1000' is not a GPU of this stack"),
        ({"gpu": "H100,L4"}, "--gpu: 'L4' is not a GPU of this stack"),
        ({"pool": "h-100"}, "--pool: 'h-100' is not a pool of this stack"),
        ({"pool": "H100"}, "--pool: 'H100' is not a pool of this stack"),
        ({"pool": "workers"}, "--pool: 'workers' is not a pool of this stack"),
        ({"pool": "cpu,h100"}, "--pool: 'cpu' has no GPUs, and others of cpu,h100 have; choose one kind"),
        ({"pool": "cpu", "num_workers": 33}, "--num-workers: 33 are more than a pool of --pool cpu can hold"),
        ({"pool": "cpu", "device": "cuda"}, "--pool: 'cpu' has no GPUs, which --device cuda needs"),
        (
            {"num_workers": 17},
            "--num-workers: 17 are more than a pool of the stack can hold; it has default (4 x g5.xl",
        ),
        ({"gpu": "A100", "num_workers": "9:10"}, "--num-workers: 9:10 are more than a pool of --gpu A100 can hold"),
    ],
)
def test_run_that_no_pool_can_hold_is_refused(settings: Any, start: str) -> None:
    with pytest.raises(UsageError) as refused:
        candidates(config(**settings), ONE_EACH)
    assert str(refused.value).startswith(start)


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({}, 1),
        ({"gpu": "H100"}, 16),
        ({"gpu": "H100,A100"}, 8),
        ({"gpu": "H100,A10G"}, 1),
        ({"gpu": "A100"}, 8),
        ({"pool": "cpu"}, None),
        ({"device": "cpu"}, None),
        ({"device": "cpu", "pool": "h100"}, None),
    ],
)
def test_default_workers_fit_in_each_pool_that_is_named(settings: Any, workers: int | None) -> None:
    assert default_workers(config(**settings), ONE_EACH) == workers


@pytest.mark.parametrize(("device", "kinds"), [("auto", ["workers", "cpu-workers"]), ("cuda", [])])
def test_candidates_of_a_stack_without_gpus(device: str, kinds: list[str]) -> None:
    without = stack({"workers": group("default", "", "a", ["m7i.large"])}, CPU)
    assert candidates(config(num_workers=3, device=device), without) == kinds


@pytest.mark.parametrize(
    ("settings", "workers", "line"),
    [
        ({}, 1, "pool default (1 x g5.xlarge in us-east-1a): first of the stack's pools"),
        ({"gpu": "H100,A100"}, 16, "pool h100 (2 x p5.48xlarge in us-east-1c): --gpu H100,A100"),
        ({"gpu": "H100,A100"}, 8, "pool h100 (1 x p5.48xlarge in us-east-1c): first of --gpu H100,A100"),
        ({"pool": "p4d"}, 8, "pool p4d (1 x p4d.24xlarge in us-east-1a): --pool p4d"),
        (
            {"gpu": "A10G,H100"},
            9,
            "pool h100 (2 x p5.48xlarge in us-east-1c): first of --gpu A10G,H100 that can hold 9 workers",
        ),
        ({"pool": "cpu"}, 2, "pool cpu (1 x m7i.2xlarge in us-east-1a): --pool cpu"),
        ({"pool": "cpu"}, 20, "pool cpu (3 x m7i.2xlarge in us-east-1a): --pool cpu"),
        ({"device": "cpu"}, 2, "pool cpu (1 x m7i.2xlarge in us-east-1a): the run is on CPUs"),
        ({"device": "cpu", "pool": "h100"}, 64, "pool h100 (1 x p5.48xlarge in us-east-1c): --pool h100"),
    ],
)
def test_choice_and_its_reason_are_one_line(settings: Any, workers: int, line: str) -> None:
    run = Run(ONE_EACH, num_workers=workers, **settings)
    assert run.lines[:1] == [line]
    [pool] = run.pools
    assert line.endswith(f": {pool['reason']}")


def test_line_has_the_price() -> None:
    prices = {"p5.48xlarge": 98.32, "p4d.24xlarge": 32.77}
    run = Run(stack(H100, A100, prices=prices), num_workers=16, gpu="H100")
    assert run.lines == ["pool h100 (2 x p5.48xlarge in us-east-1c, up to 196.64 USD an hour): --gpu H100"]
    run = Run(stack(A10G, A100, prices=prices))
    assert run.lines == ["pool default (1 x g5.xlarge in us-east-1a): first of the stack's pools"]


def test_pools_that_cannot_hold_the_run_are_named() -> None:
    run = Run(ONE_EACH, num_workers=16, gpu="H100,A10G,A100")
    assert run.lines[1:] == ["--gpu H100,A10G,A100: without default and p4d, whose maximum can't hold 16 workers"]
    assert len(Run(ONE_EACH, num_workers=16).lines) == 1, "it names none"


@pytest.mark.parametrize(
    ("free", "kind", "reason"),
    [
        ((), "cpu-workers", "the run is on CPUs"),
        (("cpu-workers",), "cpu-workers", "the run is on CPUs, where nodes are free"),
        (("workers-b", "cpu-workers"), "workers-b", "the run is on CPUs, where nodes are free"),
        (("h100-workers",), "cpu-workers", "the run is on CPUs"),
    ],
)
def test_run_on_cpus_leaves_cpu_workers_to_data_and_starts_no_gpus(free: Any, kind: str, reason: str) -> None:
    run = Run(ONE_EACH, device="cpu")
    run.choice.begin(free.__contains__)
    assert (run.choice.kind, run.pools[-1]["reason"]) == (kind, reason)
    assert not run.choice.uses_gpus


def test_run_whose_pool_was_removed_begins_in_another_one() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.latest, run.full = stack(A100, A10G), {"p4d", "default"}
    assert not run.choice.begin(), "the queue has no room"
    run.full = {"p4d"}
    run.latest = stack(A100, {"l4-workers": group("l4", "L4", "a", ["g6.48xlarge"], units=8)})
    assert run.choice.begin()
    assert (run.choice.kind, run.pool) == ("l4-workers", "l4")


def test_documents_have_the_node_group() -> None:
    run = Run(ONE_EACH, num_workers=8, gpu="H100,A100")
    known = {"name": "h100", "zone": "us-east-1c", "instance_types": ["p5.48xlarge"], "gpu": "H100"}
    assert run.pools == [{**known, "reason": "first of --gpu H100,A100"}]


def test_run_begins_in_the_pool_of_its_place() -> None:
    run = Run(ONE_EACH, num_workers=8, gpu="H100,A100", place="p4d")
    assert run.choice.kind == "p4d-workers"
    assert run.lines == ["pool p4d (1 x p4d.24xlarge in us-east-1a): no room in h100 beside the runs before this one"]


def test_run_begins_in_the_zone_whose_nodes_are_free() -> None:
    run = Run(ONE_EACH)
    run.choice.begin({"workers-b", "h100-workers"}.__contains__)
    assert run.choice.kind == "workers-b", "a free node of another pool is not taken"
    assert run.lines[-1] == (
        "pool default (1 x g5.xlarge in us-east-1b): first of the stack's pools, where nodes are free"
    )


def test_demand_moves_with_the_run() -> None:
    run = Run(ONE_EACH, num_workers=1)
    zone, group_label = "ray.io/availability-zone", "ray.io/node-group"
    assert run.choice.labels == {group_label: "!in(cpu-workers,h100,p4d)", zone: "us-east-1a"}
    run.look()
    assert run.choice.labels == {group_label: "!in(cpu-workers,h100,p4d)", zone: "us-east-1b"}
    run.visit(2)
    assert run.choice.labels == {group_label: "h100"}


def test_refusal_moves_the_run_at_once() -> None:
    run = Run(stack(H100, A100), num_workers=8, gpu="H100,A100")
    run.cloud.refusals["h100-c"] = no_capacity("p5.48xlarge")
    assert run.look() == "p4d-workers"
    assert run.lines[-1] == (
        "pool p4d (1 x p4d.24xlarge in us-east-1a): EC2 has no p5.48xlarge in us-east-1c at the moment"
    )
    assert run.pools[-1]["reason"] == "EC2 has no p5.48xlarge in us-east-1c at the moment"


@pytest.mark.parametrize(
    ("message", "moves"),
    [
        (NO_CAPACITY, True),
        (NO_CAPACITY_OF_SEVERAL, True),
        (NO_SPOT, True),
        (NO_SPOT_OF_SEVERAL, True),
        (NO_QUOTA, True),
        (NO_SPOT_QUOTA, True),
        (UNSUPPORTED, True),
        ("Your Spot request price of 1.0 is lower than the minimum required: SpotMaxPriceTooLow", True),
        ("InsufficientFreeAddressesInSubnet: not enough free addresses", True),
        (DENIED, False),
        ("Client.InternalError: Client error on launch", False),
        ("The launch template lt-1 does not exist", False),
        ("a new sort of error", False),
    ],
)
def test_only_refusals_of_the_place_move_the_run(message: str, moves: bool) -> None:
    run = Run(stack(H100, A100), num_workers=8, gpu="H100,A100")
    run.cloud.refusals["h100-c"] = message
    assert run.look() == ("p4d-workers" if moves else "h100-workers")


def test_zones_that_ec2_names_come_first() -> None:
    run = Run(stack(A10G, H100))
    run.cloud.refusals["default-a"] = no_capacity("g5.xlarge", "c")
    assert run.visit(3) == ["workers-c", "workers-b", "h100-workers"]


@pytest.mark.parametrize(
    ("groups", "settings", "zones", "hint"),
    [
        ({"workers": A10G["workers"]}, {}, "bd", f"us-east-1b and us-east-1d: add to {setting('default', 'zones')}"),
        (H100, {"num_workers": 8}, "cd", "us-east-1d: add to workerPools.h100.zones"),
        (CPU, {"pool": "cpu"}, "b", f"us-east-1b: add to {setting('cpu', 'zones')}"),
    ],
)
def test_zones_without_a_node_group_are_to_be_added(groups: Any, settings: Any, zones: str, hint: str) -> None:
    run = Run(stack(groups), **settings)
    run.cloud.refusals = dict.fromkeys(("default-a", "h100-c", "cpu-a"), no_capacity("m7i.large", *zones))
    run.look()
    assert run.choice.line.endswith(f"EC2 has capacity in {hint}")


def test_quota_is_not_asked_again_in_another_zone() -> None:
    run = Run(stack(A10G, H100))
    run.cloud.refusals["default-a"] = NO_QUOTA
    assert run.look() == "h100-workers"


def test_each_candidate_is_tried_once_and_the_best_is_kept() -> None:
    run = Run(stack(A10G), needed=4)
    run.cloud.has = {"default-a": 1, "default-b": 3}
    assert run.visit(6) == ["workers-b", "workers-c", "workers-b", "workers-b", "workers-b", "workers-b"]
    assert run.lines[2].endswith(": EC2 has only 1 of 4 g5.xlarge in us-east-1a at the moment")
    tried = "default in us-east-1a, default in us-east-1b and default in us-east-1c"
    assert f"in us-east-1b): none of {tried} has enough, and it had the most, 3 instances" in run.lines[-2]
    assert run.choice.line.endswith(f"tried {tried}")
    run.cloud.has["default-b"] = 4
    assert run.look() == "workers-b"


def test_instances_of_other_runs_are_not_had() -> None:
    run = Run(stack(A10G), needed=2)
    run.cloud.has, run.of_others = {"default-a": 3, "default-b": 1}, 3
    run.needed = 5
    assert run.look(demand=5) == "workers-b"
    run.of_others, run.needed = 0, 2
    assert run.visit(2) == ["workers-c", "workers-b"]


def test_busy_nodes_are_returned_to() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    assert run.choice.move_on(600, has_nodes=True)
    assert run.visit(2) == ["h100-workers"] * 2
    assert not run.choice.move_on(600, has_nodes=True), "it waits there"


def test_run_that_names_nothing_keeps_its_gpu_after_a_loss() -> None:
    run = Run(stack(A10G, H100, {"more-workers": group("more", "A10G", "a", ["g5.2xlarge"])}))
    run.choice.wait_anew()
    assert run.visit(4) == ["workers-b", "workers-c", "more-workers", "more-workers"]
    run.latest = stack(A10G, H100, A100)
    assert "h100-workers" not in run.visit(4)
    run = Run(stack(A10G, H100), gpu="A10G,H100")
    run.choice.wait_anew()
    assert run.visit(3)[-1] == "h100-workers"


def test_changed_stack_changes_the_labels_after_a_loss() -> None:
    run = Run(stack({"workers": A10G["workers"]}))
    assert run.choice.labels == {}
    run.latest = stack({"workers": A10G["workers"]}, H100)
    run.choice.wait_anew()
    assert run.choice.labels == {"ray.io/node-group": "!in(h100)"}


def test_first_of_equals_is_not_returned_to() -> None:
    run = Run(stack(A10G))
    assert run.visit(5) == ["workers-b", "workers-c", "workers-c", "workers-c", "workers-c"]
    assert not run.choice.move_on(600), "the run stays until the end of the wait"


def test_wait_without_a_refusal_moves_on_too() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.cloud.has["h100-c"] = 1  # an instance that does not join
    assert run.look() == "h100-workers"
    assert run.choice.move_on(600)
    assert run.lines[-1] == ("pool p4d (1 x p4d.24xlarge in us-east-1a): no room in h100 in us-east-1c within 600 s")
    assert run.look() == "h100-workers", "it had an instance"
    assert not run.choice.move_on(600)


@pytest.mark.parametrize(
    ("minutes", "status", "moves"),
    [
        (-1, "Failed", False),
        (-20, "Failed", False),
        (0.1, "Failed", True),
        (0.1, "InProgress", False),
        (0.1, "Cancelled", True),
        (0.1, "Successful", False),
    ],
)
def test_only_refusals_of_this_wait_count(minutes: float, status: str, moves: bool) -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.cloud.launch("h100-c", status, no_capacity("p5.48xlarge"), BEGAN + timedelta(minutes=minutes))
    assert run.look(demand=0) == ("p4d-workers" if moves else "h100-workers")


def test_success_after_a_refusal_keeps_the_run() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.cloud.launch("h100-c", "Failed", no_capacity(), BEGAN + timedelta(seconds=1))
    run.cloud.launch("h100-c", "Successful", "", BEGAN + timedelta(seconds=2))
    assert run.look(demand=0) == "h100-workers"


def test_run_with_enough_instances_does_not_move() -> None:
    run = Run(stack(A10G), needed=2)
    run.cloud.has["default-a"] = 2
    assert run.look(demand=4) == "workers", "the group asks for more than the run needs"


def test_part_of_the_instances_is_given_up() -> None:
    run = Run(stack(A10G), needed=4)
    run.cloud.has = {"default-a": 3, "default-b": 4}
    assert run.visit(3) == ["workers-b"] * 3
    assert run.cloud.instances == {"default-a": 3, "default-b": 4}


def test_queue_of_the_next_pool_is_full() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.full = {"p4d"}
    assert run.visit(2) == ["h100-workers", "h100-workers"]
    assert not run.choice.move_on(600)
    run.full = set()
    assert run.look() == "p4d-workers", "once it has room"


def test_first_pool_is_tried_later_if_its_queue_was_full() -> None:
    run = Run(stack(H100, A100), num_workers=8, gpu="H100,A100", place="p4d")
    assert run.look() == "h100-workers"


def test_missing_group_is_named() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.cloud.deleted = {"h100-c"}
    assert run.look() == "h100-workers"
    assert run.choice.line == "Auto Scaling group h100-c not found; pulumi up creates it"


@pytest.mark.parametrize("operation", ["describe_auto_scaling_groups", "describe_scaling_activities"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Refused("AccessDenied", "autoscaling: not authorized"), "is denied"),
        (Refused("Throttling", "autoscaling: Rate exceeded"), "failed (autoscaling: Rate exceeded)"),
        (ResourceError("autoscaling does not answer"), "failed (autoscaling does not answer)"),
    ],
)
def test_aws_that_does_not_answer_moves_nothing(operation: str, error: Exception, said: str) -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.cloud.errors[operation] = error
    assert run.look() == "h100-workers"
    assert "AWS does not tell more: autoscaling:Describe" in run.choice.line
    assert run.choice.line.endswith(said)
    assert run.choice.move_on(600), "the end of the wait does"


def test_broken_look_changes_nothing() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.cloud.errors["describe_auto_scaling_groups"] = KeyError("an answer that is not AWS's")
    run.needed = None  # ty: ignore[invalid-assignment]
    run.choice.look_if_due()
    assert run.choice.kind == "h100-workers"


def test_pool_that_is_added_during_the_wait_is_tried() -> None:
    run = Run(stack(H100), num_workers=8)
    assert run.visit(2) == ["h100-workers", "h100-workers"]
    run.latest = stack(H100, A100)
    assert run.visit(2) == ["p4d-workers", "p4d-workers"]
    run.latest = stack(A100)
    assert run.visit(2) == ["p4d-workers", "p4d-workers"]
    assert "tried" not in run.choice.line, "there is no other any more"


def test_pool_that_is_removed_during_the_wait_is_left() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.cloud.has["h100-c"] = 1
    run.latest = stack(A100)
    assert run.choice.labels == {"ray.io/node-group": "h100"}
    assert run.look() == "p4d-workers"
    assert run.lines[-1].endswith(": the stack has no h100 in us-east-1c for it any more")


def test_only_pool_that_is_removed_is_waited_for() -> None:
    run = Run(stack(H100, A100), num_workers=8, gpu="H100")
    run.latest = stack(A100)
    assert run.visit(2) == ["h100-workers"] * 2
    run.latest = None
    assert run.visit(2) == ["h100-workers"] * 2


def test_changed_maximum_is_no_move() -> None:
    run = Run(stack(H100, A100), num_workers=8)
    run.cloud.has["h100-c"] = 1
    run.latest = stack({"h100-workers": {**H100["h100-workers"], "max": 8}}, A100)
    assert run.look() == "h100-workers"
    assert run.choice.info["groups"]["h100-workers"]["max"] == 8


def test_wait_after_a_loss_may_end_without_a_look() -> None:
    run = Run(stack(H100, A100), num_workers=8, gpu="H100,A100")
    run.choice.wait_anew()
    assert run.choice.move_on(60)
    assert run.choice.kind == "p4d-workers"


def test_next_wait_begins_in_the_present_pool() -> None:
    run = Run(stack(H100, A100), num_workers=8, gpu="H100,A100")
    assert run.look() == "p4d-workers"
    run.cloud.now += timedelta(hours=1)
    run.choice.wait_anew()
    run.cloud.has["h100-c"] = 1
    assert run.choice.kind == "p4d-workers"
    assert run.look() == "h100-workers", "each may be tried again"


def test_killed_driver_begins_with_its_first_candidate(tmp_path: Path) -> None:
    info = stack(H100, A100)
    for _ in range(2):  # a driver that dies in the middle of a move, and its successor
        place = queue.Place(Ticket.of(config(num_workers=8), "ada", 1.0, ["h100", "p4d"]), tmp_path)
        place.__enter__()
        assert place.begin_if_free(queue.gpus_by_pool(info)) is None
        assert place.pool == "h100"
        assert place.move("p4d", queue.gpus_by_pool(info))
        place._file.close()  # the lock ends with the process, and the ticket stays
    with queue.Place(Ticket.of(config(num_workers=8), "bob", 2.0, ["p4d"]), tmp_path) as other:
        assert other.tickets_before() == []


def test_capacity_is_checked_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now = 1000.0
    monkeypatch.setattr(shortage.time, "monotonic", lambda: now)
    cloud = Cloud()
    watch = Shortage(stack(H100), "h100-workers", lambda: (1, 0), BEGAN, cloud.ask, lambda: cloud.now)
    watch.look_if_due()
    cloud.want("h100-c", 1)
    watch.look_if_due()
    assert watch.line == "", "AWS throttles requests every two seconds"
    now += shortage.POLL_SECONDS
    watch.look_if_due()
    assert CAPACITY.pattern.search(watch.refusal)
    assert watch.line.startswith("EC2 has no p5.48xlarge in us-east-1c at the moment; ")


RESERVED = "cr-0123456789abcdef0"
IN_BLOCK = {"h100-workers": {**H100["h100-workers"], "reservation": {"id": RESERVED, "is_block": True}}}


def block(**changed: Any) -> dict[str, Any]:
    """A Capacity Block of two instances, as EC2 describes it."""
    times = {"StartDate": BEGAN - timedelta(days=1), "EndDate": BEGAN + timedelta(days=2)}
    numbers = {"TotalInstanceCount": 2, "AvailableInstanceCount": 2}
    state = {"CapacityReservationId": RESERVED, "State": "active", "ReservationType": "capacity-block"}
    return {**state, **times, **numbers, **changed}


CLOSED = {
    "is scheduled, and starts at 2026-01-02 06:00 UTC": block(State="scheduled", StartDate=BEGAN + timedelta(hours=30)),
    "is payment-pending": block(State="payment-pending"),
    "is expired": block(State="expired"),
    "terminates its instances from 2026-01-01 00:40 UTC": block(EndDate=BEGAN + timedelta(minutes=70)),
}


@pytest.mark.parametrize(("why", "found"), CLOSED.items(), ids=range(len(CLOSED)))
@pytest.mark.parametrize("instances", [0, 2])
def test_closed_reservation_moves_the_run_at_once(why: str, found: dict[str, Any], instances: int) -> None:
    """Also while its instances are there, which end soon."""
    run = Run(stack(IN_BLOCK, A100), needed=1, num_workers=8, gpu="H100,A100")
    run.cloud.now += timedelta(minutes=30)
    run.cloud.reservation, run.cloud.has = found, {"h100-c": instances}
    assert run.look() == "p4d-workers"
    assert run.lines[-1].startswith(f"pool p4d (1 x p4d.24xlarge in us-east-1a): Capacity Block {RESERVED} ")
    assert why in run.lines[-1]


def test_run_without_another_pool_is_told_the_start() -> None:
    run = Run(stack(IN_BLOCK), needed=1, num_workers=8, gpu="H100")
    run.cloud.reservation = block(State="scheduled", StartDate=BEGAN + timedelta(hours=5))
    assert run.visit(3) == ["h100-workers"] * 3
    assert run.choice.line.startswith(f"Capacity Block {RESERVED} is scheduled, and starts at 2026-01-01 05:00 UTC")
    assert run.choice.line.endswith(", or waits for the start")
    assert run.choice.is_before_start
    run.cloud.reservation, run.cloud.has = block(), {"h100-c": 1}
    run.look()
    assert run.choice.line == ""
    assert not run.choice.is_before_start


@pytest.mark.parametrize("state", ["active", "cancelled", "expired", "failed", "payment-failed", "unsupported"])
def test_only_a_reservation_to_come_is_waited_for(state: str) -> None:
    run = Run(stack(IN_BLOCK), needed=1, num_workers=8, gpu="H100")
    run.cloud.reservation = block(State=state, StartDate=BEGAN + timedelta(hours=5))
    run.look()
    assert not run.choice.is_before_start


def test_full_reservation_is_named_and_its_zone_stays() -> None:
    run = Run(stack(IN_BLOCK), needed=1, num_workers=8, gpu="H100")
    run.cloud.reservation, run.cloud.refusals = block(AvailableInstanceCount=0), {"h100-c": no_capacity("p5", "b")}
    run.look()
    assert run.choice.line.startswith(f"Capacity Block {RESERVED} has 0 of its 2 instances free")
    assert "add" not in run.choice.line


@pytest.mark.parametrize("answer", [None, {}, Refused("UnauthorizedOperation", DENIED)], ids=range(3))
def test_reservation_that_is_not_known_changes_nothing(answer: Any) -> None:
    run = Run(stack(IN_BLOCK, A100), needed=1, num_workers=8, gpu="H100,A100")
    run.cloud.reservation, run.cloud.has = answer, {"h100-c": 1}
    assert run.visit(3) == ["h100-workers"] * 3
    assert run.choice.line == ""


EFA = {"efa-workers": {**H100["h100-workers"], "pool": "efa", "efa": 32}}


@pytest.mark.parametrize(
    ("groups", "settings", "kinds"),
    [
        ((A10G, EFA), {}, ["workers", "workers-b", "workers-c", "efa-workers"]),
        ((A10G, EFA), {"require_efa": True}, ["efa-workers"]),
        ((A10G, EFA, H100), {"require_efa": True, "gpu": "H100"}, ["efa-workers"]),
        ((A10G, EFA), {"require_efa": True, "num_workers": 16}, ["efa-workers"]),
        ((A10G, EFA), {"require_efa": True, "num_workers": "1:16"}, ["efa-workers"]),
    ],
)
def test_run_that_requires_efa_uses_pools_that_have_it(groups: Any, settings: dict[str, Any], kinds: list[str]) -> None:
    assert candidates(config(**settings), stack(*groups)) == kinds


@pytest.mark.parametrize(
    ("groups", "settings", "line"),
    [
        ((A10G, H100), {}, "--require-efa: the stack has no pool with EFA"),
        ((A10G, EFA), {"pool": "default"}, "--require-efa: --pool default: none of these pools has EFA"),
        ((A10G, EFA), {"gpu": "A10G"}, "--require-efa: --gpu A10G: none of these pools has EFA"),
        ((A10G, EFA), {"num_workers": 8}, "--require-efa: one node of pool efa holds 8 workers, and needs no network"),
        ((A10G, EFA), {"num_workers": "1:2"}, "--require-efa: one node of pool efa holds 2 workers"),
        ((A10G, EFA), {"num_workers": 17}, "--num-workers: 17 are more than a pool of the stack can hold"),
    ],
)
def test_efa_that_no_pool_can_give_is_refused(groups: Any, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as refused:
        candidates(config(require_efa=True, **settings), stack(*groups))
    assert str(refused.value).startswith(line)
