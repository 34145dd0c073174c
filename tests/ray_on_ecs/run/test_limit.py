"""Limits of a run: its account over commands, deaths and prices, and what is refused before a start."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import compress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import LimitReached, UsageError
from ray_on_ecs.run import admission as admission_module
from ray_on_ecs.run import limit, queue
from ray_on_ecs.run.admission import Admission, hold
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.document import RunDocument
from ray_on_ecs.run.instance_hours import InstanceHours
from ray_on_ecs.run.limit import NOTICE_SECONDS, Count, Limit, Prices
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.cost import InstanceKind
from ray_on_ecs.tracking.run_record import RunRecord, Spent
from tests.limit_simulator import LimitedRun
from tests.run_folders import Clock
from tests.worker_pools import cpu_group, node_group, workers

RUNS = int(os.environ.get("LIMITED_RUNS", "120"))  # more of them every night
GPU, OTHER = InstanceKind("g5.xlarge", "spot", "workers"), InstanceKind("p5.48xlarge", "spot", "workers")
SPENT: Spent = {"seconds": 1800.0, "usd": 20.0, "hourly_usd": 40.0}
PRICES = {"g5.xlarge": 1.5}


def stack(prices: dict[str, float] | None = PRICES, others: Any = None, **changes: Any) -> ClusterInfo:
    """A stack with changed values of its workers, and other node groups."""
    values: Any = {"zone": "us-east-1a", "spot": True, **changes}
    return {**workers(workers=node_group(**values), **(others or {})), "prices": prices}


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "mine")


def config(**settings: Any) -> RunConfig:
    return RunConfig(command=("train.py",), run_name="mine", **settings)


def write(storage: RunStorage, state: str | None, **changes: Any) -> None:
    """Write the status of a command before."""
    storage.write_json("status.json", {"state": state, "spent": SPENT, **changes})
    touch(storage, "status.json", 0.0)


def touch(storage: RunStorage, name: str, seconds: float) -> None:
    """Write a file so long after the status."""
    path = Path(storage.path(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()
    os.utime(path, (1e9 + seconds, 1e9 + seconds))


@pytest.mark.parametrize("seeds", [range(first, RUNS, 4) for first in range(4)], ids=lambda seeds: f"from {seeds[0]}")
def test_simulated_runs_end_at_their_limits(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        run = LimitedRun(tmp_path / str(seed), Random(seed))
        outcome, config = run.play(), run.config
        shutil.rmtree(tmp_path / str(seed))
        seconds, usd = outcome.seconds - config.max_hours * 3600, outcome.usd - config.max_usd
        in_seconds, has = 3600 / outcome.hourly_usd if config.max_usd else 0.0, (config.max_hours, config.max_usd)
        known = compress([seconds - outcome.lost, (usd - outcome.lost_usd) * in_seconds], has)
        assert max(known) <= outcome.interval * max(outcome.blind, 1), f"seed {seed}: {outcome}"
        early = outcome.notice + outcome.unwritten + 20.0  # a look at a fallen price may be late
        assert max(compress([seconds, usd * in_seconds], has)) >= -early, f"seed {seed}: {outcome}"


@pytest.mark.parametrize(
    ("count", "notice", "left"),
    [
        (Count("max_hours", "", 10.0, 9.0, 1.0), NOTICE_SECONDS, 3600.0),
        (Count("max_hours", "", 0.01, 0.005, 1.0), 9.0, 18.0),
        (Count("max_usd", "", 40.0, 39.0, 40.0), NOTICE_SECONDS, 90.0),
        (Count("max_usd", "", 1.0, 0.5, 60.0), 15.0, 30.0),
        (Count("max_usd", "", 1.0, 0.5, 0.0), 0.0, float("inf")),
        (Count("max_usd", "", 1.0, 1.0, 0.0), 0.0, 0.0),
    ],
)
def test_notice_is_a_part_of_a_short_limit(count: Count, notice: float, left: float) -> None:
    assert (count.notice_seconds, count.left_seconds) == pytest.approx((notice, left))
    assert count.is_due == (left <= notice)
    assert 0.0 <= count.end_seconds <= max(left, notice)


CHECKPOINT = "checkpoints/step-000000009/checkpoint.json"


def test_time_of_a_dead_driver_goes_on_to_its_last_checkpoint(storage: RunStorage) -> None:
    write(storage, "training")
    for name in ("run.json", "run.lock", "report.html"):
        touch(storage, name, 9000.0)
    touch(storage, CHECKPOINT, -90.0)
    assert limit.spent_before(config(), storage) == SPENT
    touch(storage, CHECKPOINT, 90.0)
    spent = limit.spent_before(config(), storage)
    assert (spent["seconds"], spent["usd"]) == (1890.0, 21.0)


@pytest.mark.parametrize("name", [CHECKPOINT, "ray/trial/checkpoint_000001/weights.pt"])
@pytest.mark.parametrize(("seconds", "more"), [(3600.0, 3600.0), (3601.0, 0.0), (86400.0, 0.0), (5e9, 0.0)])
def test_file_that_is_copied_later_is_not_running_time(
    storage: RunStorage, name: str, seconds: float, more: float
) -> None:
    write(storage, "training")
    touch(storage, name, seconds)
    spent = limit.spent_before(config(driver=name.startswith("ray/")), storage)
    assert (spent["seconds"], spent["usd"]) == (1800.0 + more, 20.0 + more * 40 / 3600)


def test_file_of_the_future_counts_until_now(storage: RunStorage) -> None:
    write(storage, "training")
    at = time.time() - 600
    os.utime(storage.path("status.json"), (at, at))
    touch(storage, CHECKPOINT, 1e9 + 9e8)
    assert limit.spent_before(config(), storage)["seconds"] == pytest.approx(2400.0, abs=60.0)
    os.utime(storage.path("status.json"), (at + 9000, at + 9000))
    assert limit.spent_before(config(), storage) == SPENT, "the storage's clock is ahead"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"state": "limit"}, (1800.0, 20.0)),
        ({"state": "interrupted"}, (1800.0, 20.0)),
        ({"state": "queued"}, (1890.0, 21.0)),
        ({"state": "waiting"}, (1890.0, 21.0)),
        ({"state": "training", "spent": {**SPENT, "seconds": -5}}, (90.0, 21.0)),
        ({"state": "training", "spent": None}, (0.0, 0.0)),
        ({"state": "training", "spent": {}}, (0.0, 0.0)),
        ({"state": "training", "spent": {**SPENT, "usd": "much"}}, (0.0, 0.0)),
        ({"state": None}, (1800.0, 20.0)),
    ],
)
def test_account_goes_on_from_any_status(
    storage: RunStorage, status: dict[str, Any], expected: tuple[float, float]
) -> None:
    write(storage, **status)
    touch(storage, CHECKPOINT, 90.0)
    spent = limit.spent_before(config(), storage)
    assert (spent["seconds"], spent["usd"]) == expected


def test_run_without_a_status_has_spent_nothing(storage: RunStorage) -> None:
    assert limit.spent_before(config(), storage)["seconds"] == 0.0
    for text in ("{half", "{}", "null", '{"state": "failed"}'):
        storage.write("status.json", text)
        assert limit.spent_before(config(), storage)["seconds"] == 0.0


def admission(storage: RunStorage, config: RunConfig) -> Admission:
    document = RunDocument(
        id="1", config=config, code=Code(name="code", archive=""), storage=storage, uri=storage.uri, content={}
    )
    return Admission(document, RunRecord(storage, config))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_hours": 0.5}, "--max-hours 0.5 is reached: the run has spent 0.50 hours of running time; "),
        ({"max_hours": 0.52}, "--max-hours 0.52 is reached: "),
        ({"max_usd": 20.5}, "--max-usd 20.5 is reached: the run has spent 20.00 USD; "),
        ({"max_usd": 99.0, "max_hours": 0.1}, "--max-hours 0.1 is reached: "),
    ],
)
def test_run_at_its_limit_does_not_wait(
    storage: RunStorage, settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(storage, "training", earlier={"seconds": 100.0, "usd": 3.0})
    monkeypatch.setattr(queue, "turn", lambda *_: pytest.fail("it is queued"))
    with pytest.raises(LimitReached) as caught, hold(admission(storage, config(**settings))):
        pass
    assert str(caught.value).startswith(said)
    assert "the same command with --run-name mine and a higher limit, as --max-" in str(caught.value)
    status = storage.read_json("status.json")
    assert (status["state"], status["spent"]) == ("limit", SPENT)
    assert status["error"] == str(caught.value)


PROGRESS = {"step": 5000, "loss": 0.3, "metrics": {"loss": 0.3}, "end": {"step": 5000, "total": 9000}, "workers": 2}


@pytest.mark.parametrize("state", ["queued", "waiting", "training", "limit", "interrupted", "failed", None])
def test_refused_command_keeps_the_progress(storage: RunStorage, state: str | None) -> None:
    write(storage, state, **PROGRESS, cost_usd=20.0, error="out of memory")
    before = storage.read_json("status.json")
    with pytest.raises(LimitReached) as caught, hold(admission(storage, config(max_hours=0.5))):
        pass
    after = storage.read_json("status.json")
    assert PROGRESS.items() <= after.items()
    if state in ("queued", "waiting", "training"):
        assert (after["state"], after["error"]) == ("limit", str(caught.value))
    else:
        assert after == before


@pytest.mark.parametrize(
    ("ends", "error"), [("limit", LimitReached), ("interrupted", LimitReached), ("finished", UsageError)]
)
def test_command_before_that_ends_in_the_wait_for_the_lock_counts(
    storage: RunStorage, ends: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def wait_for_lock(*_: object) -> Generator[Any]:
        write(storage, ends)
        if ends == "finished":
            storage.write_json("result.json", {})
        yield SimpleNamespace(is_held=True)

    write(storage, "training", spent={**SPENT, "seconds": 60.0})
    monkeypatch.setattr(admission_module, "hold_lock", wait_for_lock)
    monkeypatch.setattr(queue, "turn", lambda *_: nullcontext("its turn"))
    with pytest.raises(error), hold(admission(storage, config(max_hours=0.5))):
        pass
    status = storage.read_json("status.json")
    assert (status["state"], status["spent"]) == (ends, SPENT)


def test_dead_driver_is_counted_once(storage: RunStorage) -> None:
    write(storage, "training")
    touch(storage, CHECKPOINT, 90.0)
    for _ in range(2):
        with pytest.raises(LimitReached), hold(admission(storage, config(max_hours=0.5))):
            pass
        assert storage.read_json("status.json")["spent"] == {**SPENT, "seconds": 1890.0, "usd": 21.0}


def test_command_that_continues_is_below_its_limit(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "turn", lambda *_: nullcontext("its turn"))
    write(storage, "training")
    with pytest.raises(LimitReached), hold(admission(storage, config(max_hours=0.5, max_usd=100.0))):
        pass
    words = storage.read_json("status.json")["next"].split()
    assert words[words.index("--max-hours") + 1] == "1.0"
    assert words[words.index("--max-usd") + 1] == "100.0"
    with hold(admission(storage, config(max_hours=1.0, max_usd=100.0))) as place:
        assert place


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (None, "--max-usd: the prices of this cluster's instances are not known; "),
        ({"prices": None}, "--max-usd: the price of g5.xlarge is not known; "),
        ({"prices": {}}, "--max-usd: the price of g5.xlarge is not known; "),
        ({"types": ["g5.xlarge", "g6.xlarge"]}, "--max-usd: the price of g6.xlarge is not known; "),
    ],
)
def test_dollars_without_a_price_are_refused(changes: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        limit.check_prices(None if changes is None else stack(**changes), [])
    assert str(caught.value) == f"{said}limit the run by --max-hours, and leave --max-usd out or give 0"


def test_only_instances_that_the_run_may_get_need_a_price() -> None:
    info = stack(others={"new_workers": node_group(types=["p9.huge"])})
    limit.check_prices(info, ["workers"])
    with pytest.raises(UsageError, match=r"p9\.huge"):
        limit.check_prices(info, ["workers", "new-workers"])


def spot(*prices: tuple[str, float]) -> dict[str, Any]:
    entries = [{"InstanceType": kind, "SpotPrice": str(usd), "AvailabilityZone": "us-east-1a"} for kind, usd in prices]
    return {"SpotPriceHistory": entries}


def test_price_is_the_last_known_then_the_on_demand_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"info": stack(), "spot": spot()}
    monkeypatch.setattr(limit, "read_cluster_info", lambda: answers["info"])
    monkeypatch.setattr(limit, "recent_spot_prices", lambda *_, **__: answers["spot"])
    prices = Prices()
    assert prices.read([GPU]) == {GPU: 1.5}, "on demand"
    answers["spot"] = spot(("g5.xlarge", 0.5))
    assert prices.read([GPU]) == {GPU: 0.5}
    assert prices.read([InstanceKind()]) == {InstanceKind(): 0.5}, "a node without labels is of the first type"
    answers["spot"] = spot()
    assert prices.read([GPU]) == {GPU: 0.5}, "the last one"
    answers["info"] = None
    assert prices.read([GPU]) == {GPU: 0.5}
    assert prices.read([]) == {}


CPU = InstanceKind("m7i.xlarge", "on-demand", "cpu-workers")
WITHOUT_LABELS = InstanceKind(None, None, "cpu-workers")


@pytest.mark.parametrize("unknown", [OTHER, CPU, WITHOUT_LABELS, InstanceKind("p9.huge", None, "new-workers")])
@pytest.mark.parametrize("known", [[], [GPU]])
def test_unknown_price_is_the_highest_of_the_stack(
    known: list[InstanceKind], unknown: InstanceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = {"cpu_workers": cpu_group()}
    infos: list[Any] = [stack(others=cpus), stack(None, cpus), None]
    monkeypatch.setattr(limit, "read_cluster_info", lambda: infos[0])
    monkeypatch.setattr(limit, "recent_spot_prices", lambda *_, **__: spot(("g5.xlarge", 0.5)))
    prices = Prices()
    while infos:
        assert prices.read([*known, unknown])[unknown] == 1.5
        infos.pop(0)


@pytest.mark.parametrize("info", [None, stack(prices=None), stack(prices={})])
def test_instances_are_not_free_without_any_price(info: ClusterInfo | None, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [info, stack()]
    monkeypatch.setattr(limit, "read_cluster_info", lambda: infos[0])
    monkeypatch.setattr(limit, "recent_spot_prices", lambda *_, **__: spot())
    clock, held = Clock(), {GPU: 2}
    of = account(clock, {}, held)
    of._prices = Prices().read
    pass_hours(of, clock, 1.0)
    infos.pop(0)
    pass_hours(of, clock, 1.0)
    assert of.spent()["usd"] == 5.0 + 2 * 2 * 1.5, "the hours before count at the first price"


def account(
    clock: Clock, prices: Mapping[InstanceKind, float], held: Mapping[InstanceKind, int], hourly_usd: float = 0.0
) -> Limit:
    hours = InstanceHours(lambda: dict(held))
    hours.read(clock.now)
    before: Spent = {"seconds": 0.0, "usd": 5.0, "hourly_usd": hourly_usd}
    return Limit(
        config(max_usd=10.0), before, hours, lambda kinds: {kind: prices[kind] for kind in kinds}, clock.monotonic
    )


def pass_hours(of: Limit, clock: Clock, hours: float) -> None:
    clock.now += hours * 3600
    of._hours.read(clock.now)
    of.look()


def test_each_hour_counts_at_its_price() -> None:
    clock, prices, held = Clock(), {GPU: 1.0}, {GPU: 1}
    of = account(clock, prices, held)
    pass_hours(of, clock, 1.0)
    prices[GPU] = 2.0
    pass_hours(of, clock, 0.5)
    assert of.spent() == {"seconds": 0.0, "usd": 7.0, "hourly_usd": 2.0}
    clock.now += 1800
    assert of.spent()["usd"] == 8.0, "between two looks"
    held.clear()
    pass_hours(of, clock, 0.0)
    clock.now += 1e6
    assert (of.spent()["usd"], of.end_seconds) == (7.0, 3 * 1800 - 5), "without instances"


def test_error_of_the_prices_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, held = Clock(), {GPU: 2}
    of = account(clock, {GPU: 1.0}, held)
    pass_hours(of, clock, 0.5)

    def fail(kinds: object) -> Any:
        raise KeyError("SpotPrice")

    monkeypatch.setattr(of, "_prices", fail)
    pass_hours(of, clock, 1.0)
    assert of.spent()["usd"] == 8.0, "the last rate goes on"
    monkeypatch.setattr(of, "_prices", lambda kinds: {GPU: 1.0})
    pass_hours(of, clock, 0.5)
    assert of.spent()["usd"] == 9.0
    with pytest.raises(LimitReached), of.watching():
        raise LimitReached
    clock.now += 1e6
    assert of.spent()["usd"] == 9.0, "after the end"


def test_rate_of_the_command_before_counts_without_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has submitted the run again, and the stack's prices have become unknown."""
    clock, prices, held = Clock(), dict[InstanceKind, float](), {GPU: 2}
    of = account(clock, prices, held, hourly_usd=4.0)
    pass_hours(of, clock, 0.0)
    clock.now += 3600
    assert of.spent()["usd"] == 9.0
    held.clear()
    pass_hours(of, clock, 0.0)
    pass_hours(of, clock, 5.0)
    assert of.spent()["usd"] == 9.0, "without instances"
    held[GPU] = 1
    pass_hours(of, clock, 0.0)
    pass_hours(of, clock, 0.5)
    assert of.spent()["usd"] == 11.0
    prices[GPU] = 1.0
    pass_hours(of, clock, 0.5)
    assert of.spent()["usd"] == 10.0, "the price instead of the rate"
    prices.clear()
    pass_hours(of, clock, 1.0)
    with of.watching():
        pass
    assert of.spent()["usd"] == 11.0, "after the end"


def test_limits_are_named_before_the_start() -> None:
    assert limit.describe(config()) == ""
    excluded = "without the head, disks, traffic and idle instances"
    assert limit.describe(config(max_hours=1.5, max_usd=40.0)) == f"1.5 h of running time or 40 USD, {excluded}"
    assert limit.describe(config(max_usd=1_234_567.0)) == f"1234567 USD, {excluded}"


def test_reached_limit_has_numbers_without_exponents() -> None:
    spent: Spent = {"seconds": 0.0, "usd": 1_234_567.8, "hourly_usd": 40.0}
    text = str(limit.reached(config(max_usd=1_234_567.5), spent))
    assert text.startswith("--max-usd 1234567.5 is reached: the run has spent 1,234,567.80 USD; ")


@pytest.mark.parametrize("flag", ["max_hours", "max_usd"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_limit_that_is_not_a_number_is_refused(flag: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')}: "):
        config(**{flag: value})


def test_instances_of_a_block_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = InstanceKind("g5.xlarge", "on-demand")
    info = stack(reservation={"id": "cr-0123456789abcdef0", "is_block": True})
    monkeypatch.setattr(limit, "read_cluster_info", lambda: info)
    assert Prices().read([kind]) == {kind: 0.0}
