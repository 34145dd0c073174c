"""State of a run in its folder."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import Interrupted, ResourceError, TrainingError, UsageError
from ray_on_ecs.periodic import run_every
from ray_on_ecs.run.admission import Admission, hold
from ray_on_ecs.run.code.archive import Code
from ray_on_ecs.run.document import RunDocument
from ray_on_ecs.storage import lock
from ray_on_ecs.storage.lock import RunLock
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking import end as end_module
from ray_on_ecs.tracking import run_record
from ray_on_ecs.tracking.cost import InstanceKind
from ray_on_ecs.tracking.end import End, Steps
from ray_on_ecs.tracking.run_monitor import RunMonitor
from ray_on_ecs.tracking.run_record import RunRecord, Spent
from tests.log_lines import collect_lines
from tests.waiting import until

UNPRICED = InstanceKind("p9.large")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "WRITE_SECONDS", 0.01)


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "test")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(command=("train.py",), storage_path=str(tmp_path), run_name="test", keep_gib=5.0)


@pytest.fixture
def record(storage: RunStorage, config: RunConfig) -> RunRecord:
    return RunRecord(storage, config)


def monitor(*metrics: Any, step: int | None = None) -> RunMonitor:
    """A monitor that has seen this."""
    seen = RunMonitor()
    seen.update(0, step)
    for record in enumerate(metrics):
        seen.update(0, step, record)
    return seen


def status(storage: RunStorage) -> dict[str, Any]:
    return storage.read_json("status.json") or {}


def run(record: RunRecord, error: BaseException | None = None) -> None:
    """A command that trains, and ends with this error."""
    with record.closing(lambda: True), record.training(monitor(), {}, 2):
        if error:
            raise error


def test_it_says_how_far_the_run_is(storage: RunStorage, record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    instances = [{"instance_type": "g5.xlarge", "market": "spot", "hours": 2.0, "hourly_usd": 0.5}]
    cost = {"usd": 1.0, "on_demand_usd": 2.0, "instance_hours": 2.0, "instances": instances}
    monkeypatch.setattr(run_record, "cost_of", lambda hours: cost if hours else None)
    job = {"metadata": {"job_submission_id": "test.2"}, "runtime_env": {}}
    monkeypatch.setenv(run_record.JOB_VARIABLE, json.dumps(job))
    seen = monitor({"step": 11, "train_loss": 0.7, "test_loss": 0.9}, step=13)
    with record.training(seen, {InstanceKind(): 2.0}, 2):
        document = until(lambda: status(storage))
    known = {
        "run_name": "test",
        "state": "training",
        "step": 13,
        "loss": 0.7,
        "metrics": {"train_loss": 0.7, "test_loss": 0.9},
        "workers": 2,
        "cost_usd": 1.0,
        "instances": instances,
        "job": "test.2",
        "error": None,
    }
    assert known.items() <= document.items()
    assert document["started"] < document["updated"]
    assert "--run-name test" in document["next"]
    assert "--keep-gib 5" in document["next"]


def test_status_changes_from_waiting_to_training(storage: RunStorage, record: RunRecord) -> None:
    with record.waiting():
        document = until(lambda: status(storage))
        until(lambda: status(storage)["updated"] > document["updated"])
    assert (document["state"], document["step"], document["workers"]) == ("waiting", None, None)
    with record.training(monitor(), {}, 2):
        until(lambda: status(storage)["state"] == "training")


def test_status_has_the_start_while_it_waits(storage: RunStorage, record: RunRecord) -> None:
    earlier = {"requested": "2026-01-01T00:00:00.000+00:00", "parts": {"alarm": 64.0}, "is_over": True}
    storage.write_json("status.json", {**record.status(), "state": "failed", "starts": [earlier, "of another version"]})
    requested = time.time() - 100
    record.starts.request(requested)
    with record.waiting():
        document = until(lambda: status(storage).get("state") == "waiting" and status(storage))
    first, last = document["starts"]
    assert first == earlier
    assert last["requested"] == datetime.fromtimestamp(requested, UTC).isoformat(timespec="milliseconds")
    assert last["parts"].keys() == {"workers"}
    assert 100 <= last["parts"]["workers"] < 400
    assert not last["is_over"]


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [
        ({"step": 7, "loss": 0.5, "accuracy": 0.9}, 0.5),
        ({"step": 7, "val/loss": 0.25}, 0.25),
        ({"step": 7, "loss": None}, None),
        ({"step": 7, "accuracy": 0.9}, None),
    ],
    ids=["loss", "a loss", "not finite", "none"],
)
def test_step_of_metrics_without_reported_steps(
    storage: RunStorage, record: RunRecord, metrics: dict[str, Any], loss: float | None
) -> None:
    with record.training(monitor(metrics), {}, 2):
        document = until(lambda: status(storage))
    assert (document["step"], document["loss"]) == (7, loss)


@pytest.mark.parametrize(
    ("metrics", "step", "shown"),
    [((), None, (100, 2.3)), ((), 4, (4, None)), (({"step": 7, "accuracy": 0.9},), None, (7, None))],
    ids=["no reports", "steps", "metrics"],
)
def test_a_guess_is_shown_unless_the_script_reports(
    storage: RunStorage, record: RunRecord, metrics: tuple[Any], step: int | None, shown: tuple[int, float | None]
) -> None:
    seen = monitor(*metrics, step=step)
    seen.guess = {"step": 100, "loss": 2.3}
    with record.training(seen, {}, 2):
        document = until(lambda: status(storage))
    assert (document["step"], document["loss"]) == shown


def far(step: int, total: int | None) -> RunMonitor:
    """A monitor of a run that has made a step in each of the last seconds."""
    now = time.monotonic()
    clock = iter([now - seconds for seconds in range(9, -1, -1)])
    seen = RunMonitor(lambda: next(clock))
    for number in range(step - 9, step + 1):
        seen.update(0, number, steps=Steps(number, total))
    return seen


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance costs 36 USD an hour; the price of one of a type is not known."""
    costs = {"on_demand_usd": 0.0, "instance_hours": 0.0, "instances": []}

    def cost_of(hours: Mapping[InstanceKind, float]) -> dict[str, Any] | None:
        return {"usd": 36.0 * sum(hours.values()), **costs} if hours.keys() <= {InstanceKind()} else None

    monkeypatch.setattr(run_record, "cost_of", cost_of)


def spent(usd: float, hourly_usd: float) -> Callable[[], Spent]:
    """The account of a run's limits."""
    return lambda: {"seconds": 0.0, "usd": usd, "hourly_usd": hourly_usd}


def test_status_has_the_end_over_all_commands(storage: RunStorage, record: RunRecord, priced: None) -> None:
    """Its dollars are those of the limits, in which each hour has its own price."""
    storage.write_json("status.json", {**record.status(), "state": "failed", "cost_usd": 5.0})
    record.spent = spent(30.0, 80.0)
    with record.training(far(100, 1000), {InstanceKind(): 0.5}, 2, lambda: {InstanceKind(): 2}):
        end = until(lambda: status(storage)["state"] == "training" and status(storage)["end"])
        record.note_waiting(True)
        waits = until(lambda: status(storage)["state"] == "waiting" and status(storage)["end"])
    assert {"step": 100, "total": 1000, "usd": 30.0}.items() <= end.items()
    assert end["seconds_left"] == pytest.approx(900, abs=2)
    assert end["usd_at_end"] == pytest.approx(30.0 + 900 * 80 / 3600, abs=0.1)
    assert waits == {**end, "seconds_left": None, "usd_at_end": None}


@pytest.mark.parametrize(
    ("hours", "instances", "total", "known"),
    [
        ({}, {}, 1000, {"seconds_left", "usd"}),
        ({}, {InstanceKind(): 2}, None, {"usd"}),
        ({UNPRICED: 1.0}, {UNPRICED: 2}, 1000, {"seconds_left"}),
        ({InstanceKind(): 1.0, UNPRICED: 1.0}, {InstanceKind(): 2}, 1000, {"seconds_left"}),
        ({}, {InstanceKind(): 1, UNPRICED: 1}, 1000, {"seconds_left", "usd"}),
    ],
    ids=["no instance", "no total", "no prices", "no price of an earlier instance", "no price of a new instance"],
)
def test_end_without_what_is_not_known(
    record: RunRecord,
    priced: None,
    hours: dict[InstanceKind, float],
    instances: dict[InstanceKind, int],
    total: int | None,
    known: set[str],
) -> None:
    record.spent = spent(20.0, 72.0)  # at an upper bound
    with record.training(far(100, total), hours, 2, lambda: instances):
        end = record.status()["end"] or {}
    assert {key for key in ("seconds_left", "usd", "usd_at_end") if end[key] is not None} == known


def test_end_before_the_first_look_at_prices_has_no_cost(record: RunRecord, priced: None) -> None:
    with record.training(far(100, 1000), {}, 2, lambda: {InstanceKind(): 2}):
        end = record.status()["end"] or {}
    assert (end["usd"], end["usd_at_end"]) == (0.0, None)


def test_printed_steps_are_in_the_end(record: RunRecord) -> None:
    seen = monitor({"step": 7, "loss": 0.5})
    seen.update(0, None, steps=Steps(325, 400))
    with record.training(seen, {}, 2):
        document = record.status()
    assert (document["step"], document["end"]) == (7, asdict(End(325, 400)))


def test_log_says_once_that_a_limit_comes_first(
    storage: RunStorage, config: RunConfig, priced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = collect_lines()
    monkeypatch.setattr(end_module, "WARNING_SECONDS", 0.0)
    object.__setattr__(config, "max_usd", 30.0)
    record = RunRecord(storage, config)
    record.spent = spent(18.0, 36.0)
    with record.training(far(100, 10_000), {InstanceKind(): 0.5}, 2, lambda: {InstanceKind(): 1}):
        written: set[Any] = set()
        until(lambda: written.add(status(storage).get("updated")) or len(written) > 4)
    assert [line for line in lines if "max-usd" in line] == [
        "to its last step the run needs about 120 USD, and --max-usd is 30"
    ]


def test_written_status_is_the_one_in_the_log(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    ends: list[Any] = []
    monkeypatch.setattr(RunStorage, "write_json", lambda storage, name, content: written.append(content))
    monkeypatch.setattr(record, "_say_end", ends.append)
    with record.training(far(100, 1000), {}, 2):
        until(lambda: len(ends) > 2)
    assert ends[:3] == written[:3]


def test_log_has_the_end_while_the_storage_fails(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = collect_lines()
    monkeypatch.setattr(end_module, "LOG_SECONDS", 0.0)

    def fail(*_: Any) -> None:
        raise OSError("the bucket does not answer")

    monkeypatch.setattr(RunStorage, "write_json", fail)
    with record.training(far(100, 1000), {}, 2):
        until(lambda: any("step 100 of 1,000" in line for line in lines))


@pytest.mark.parametrize(
    ("error", "state", "line"),
    [
        (None, "finished", None),
        (KeyboardInterrupt(), "interrupted", None),
        (SystemExit(15), "interrupted", None),
        (Interrupted("interrupted"), "interrupted", None),
        (TrainingError("training failed: so\nand so"), "failed", "training failed: so and so"),
        (UsageError("a package is missing"), "failed", "a package is missing"),
        (OSError("the bucket is gone"), "failed", "OSError: the bucket is gone"),
    ],
    ids=["no error", "Ctrl-C", "SIGTERM", "interrupted", "an error", "a mistake", "a storage"],
)
def test_final_state_follows_the_error(
    storage: RunStorage, record: RunRecord, error: BaseException | None, state: str, line: str | None
) -> None:
    if error is None:
        run(record)
    else:
        with pytest.raises(type(error)):
            run(record, error)
    assert (status(storage)["state"], status(storage)["error"]) == (state, line)
    assert f'<span class="state {state}">' in storage.read("report.html").decode()


def test_wait_timeout_is_a_failure(storage: RunStorage, record: RunRecord) -> None:
    with pytest.raises(ResourceError), record.closing(lambda: True), record.waiting():
        raise ResourceError("the cluster has no GPU")
    assert (status(storage)["state"], status(storage)["error"]) == ("failed", "the cluster has no GPU")


@pytest.mark.parametrize("error", [ResourceError("the machine has no GPU"), UsageError("--input: is empty")])
def test_new_run_that_is_refused_has_failed(
    storage: RunStorage, record: RunRecord, config: RunConfig, error: TrainingError
) -> None:
    with pytest.raises(type(error)), record.closing(lambda: True):
        raise error
    assert (status(storage)["state"], status(storage)["error"]) == ("failed", str(error))
    assert str(error) in storage.read("report.html").decode()
    before = storage.read("status.json")
    with pytest.raises(UsageError), RunRecord(storage, config).closing(lambda: True):
        raise UsageError("another mistake")
    assert storage.read("status.json") == before


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(15), Interrupted("interrupted")])
def test_interrupted_command_without_training_leaves_no_status(
    storage: RunStorage, record: RunRecord, end: BaseException
) -> None:
    with pytest.raises(type(end)), record.closing(lambda: True):
        raise end
    assert not Path(storage.path()).exists()


@pytest.mark.parametrize("held", ["run.lock", "result.json", "status.json"])
def test_refusal_without_the_lock_leaves_another_commands_run(
    storage: RunStorage, record: RunRecord, held: str
) -> None:
    storage.write(held, "{}")
    record.refuse(UsageError("--gpu: is not known"))
    assert {path.name: path.read_text() for path in Path(storage.path()).iterdir()} == {held: "{}"}


def test_status_has_the_pools_of_all_commands(storage: RunStorage, record: RunRecord) -> None:
    pool: Any = {"name": "h100", "zone": "us-west-2c", "instance_types": ["p5.48xlarge"], "gpu": "H100", "reason": "x"}
    assert not {"pool", "pools"} & record.status().keys()
    earlier = {**record.status(), "state": "failed", "pools": ["a100", "h100", {"of": "another version"}, "a100"]}
    storage.write_json("status.json", earlier)
    for name in ("h100", "default", "h100"):
        record.note_pool({**pool, "name": name})
    run(record)
    assert status(storage)["pools"] == ["a100", "h100", "default"]
    assert status(storage)["pool"]["name"] == "h100"


@pytest.mark.parametrize("pools", [None, "h100", 5, {}])
def test_broken_pools_of_an_earlier_command_are_left_out(storage: RunStorage, record: RunRecord, pools: Any) -> None:
    storage.write_json("status.json", {**record.status(), "state": "failed", "pools": pools, "pool": {"name": "x"}})
    pool: Any = {"name": "a100"}
    record.note_pool(pool)
    run(record)
    assert status(storage)["pools"] == ["a100"]


@pytest.mark.parametrize("before", [None, '{"state": "interrupted"}'], ids=["a new run", "a run that is resumed"])
def test_refused_settings_keep_the_status(storage: RunStorage, record: RunRecord, before: str | None) -> None:
    line = "--lr: is another one"
    if before:
        storage.write("status.json", before)

    def refused() -> None:
        with record.closing(lambda: True):
            with record.waiting():
                until(lambda: status(storage).get("state") == "waiting")
            raise UsageError(line)

    with pytest.raises(UsageError):
        refused()
    if before:
        assert {path.name: path.read_text() for path in Path(storage.path()).iterdir()} == {"status.json": before}
    else:
        assert (status(storage)["state"], status(storage)["error"]) == ("failed", line)


def test_taken_over_run_is_not_written(storage: RunStorage, record: RunRecord) -> None:
    is_taken = threading.Event()

    def is_ours() -> bool:  # another command takes the run over between two writes
        if not is_taken.is_set() and status(storage):
            storage.write("status.json", "of the other")
            is_taken.set()
        return not is_taken.is_set()

    def lose() -> None:
        with record.closing(is_ours), record.training(monitor(), {}, 2):
            until(is_taken.is_set)
            raise SystemExit(15)

    with pytest.raises(SystemExit):
        lose()
    assert storage.read("status.json") == b"of the other"
    assert not storage.exists("report.html")


def test_run_of_another_command_keeps_its_status(
    storage: RunStorage, record: RunRecord, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.1)
    storage.write("status.json", "of the holder")

    def refresh() -> None:
        held.refresh()

    code = Code(name="code", archive="")
    document = RunDocument(id="first", config=config, code=code, storage=storage, uri=storage.uri, content={})
    with RunLock(storage) as held, run_every(0.01, refresh, "holder"):
        refused = hold(Admission(document, record))
        with pytest.raises(UsageError, match="is being trained by"), refused:
            pass
        assert storage.read("status.json") == b"of the holder"
    assert not storage.exists("report.html")


class Failing(RunStorage):
    """A folder of which the first writes fail."""

    failures = 3

    def write(self, name: str, content: bytes | str) -> None:
        if Failing.failures:
            Failing.failures -= 1
            raise OSError("not now")
        super().write(name, content)


def test_failed_status_write_is_repeated(
    storage: RunStorage, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Failing(storage.store, storage.base, storage.run_name, storage.uri)
    record = RunRecord(failing, config)
    with record.closing(lambda: True):
        with record.training(monitor(), {}, 2):
            until(lambda: status(storage))
        Failing.failures = 1000
    assert status(storage)["state"] == "training"
    assert capsys.readouterr().out == ""


def test_driver_does_not_wait_for_the_storage(
    storage: RunStorage, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = threading.Event(), threading.Event()
    write_json = RunStorage.write_json

    def slow(storage: RunStorage, name: str, document: object) -> None:
        begun.set()
        answered.wait()
        write_json(storage, name, document)

    monkeypatch.setattr(RunStorage, "write_json", slow)
    with record.closing(lambda: True), record.training(monitor(), {}, 2):
        begun.wait()
        record.note_waiting(True)
        assert record.is_waiting
        record.note_waiting(False)
        assert not record.is_waiting
        answered.set()
    assert status(storage)["state"] == "finished"
