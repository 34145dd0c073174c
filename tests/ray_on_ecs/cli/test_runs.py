"""`ray-on-ecs runs` on folders and buckets with runs of every state."""

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import aws
from ray_on_ecs.storage import disk, layout
from tests.aws import BUCKET
from tests.ray_on_ecs.cli.folders import Folders, age_object, job, jobs_here, moment, outputs

HOUR = 3600.0


@pytest.fixture
def bucket(
    monkeypatch: pytest.MonkeyPatch, aws_variables: dict[str, str], s3_client: Any, request: pytest.FixtureRequest
) -> Folders:
    """A storage path of `--local` in S3."""
    path = f"s3://{BUCKET}/{request.node.originalname}-{time.time_ns()}"
    for name, value in {**aws_variables, "RAY_ON_ECS_STORAGE_PATH": path}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(aws, "CONNECT_SECONDS", 120)  # also on a busy machine
    return Folders(path)


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Returns the runs of `ray-on-ecs runs --local --json`, by name."""

    def call(*flags: str) -> dict[str, dict[str, Any]]:
        assert main(["runs", "--local", "--json", *flags]) == 0
        return {run["name"]: run for run in json.loads(capsys.readouterr().out)}

    return call


def test_empty_storage_path_has_a_hint(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--local"]) == 0
    printed = capsys.readouterr()
    assert not printed.out
    assert "ray-on-ecs run --local starts one" in printed.err
    assert main(["runs", "--local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("state", ["waiting", "training", "finished", "failed", "interrupted"])
def test_state_comes_from_the_status(folders: Folders, listed: Callable[..., Any], state: str) -> None:
    folders.status("mine", state)
    run = listed()["mine"]
    assert run["state"] == state
    known = {"step": 25, "loss": 0.25, "cost_usd": 0.42, "workers": 2, "job": "mine"}
    assert known.items() <= run.items()
    assert run["metrics"] == {"loss": 0.25, "accuracy": 0.5}
    assert 700 < run["started_seconds_ago"] < HOUR
    assert 700 < run["seconds"] < HOUR


@pytest.mark.parametrize("state", ["waiting", "training"])
def test_silent_run_without_a_job_is_lost(folders: Folders, listed: Callable[..., Any], state: str) -> None:
    folders.status("mine", state)
    folders.age(130, "mine/status.json")
    assert listed()["mine"]["state"] == "lost"
    with jobs_here():
        assert listed()["mine"]["state"] == "lost"
    with jobs_here(job("mine")):
        assert listed()["mine"]["state"] == state


def test_refreshed_lock_means_a_live_driver(folders: Folders, listed: Callable[..., Any]) -> None:
    folders.status("mine", "training")
    folders.of("mine").write(layout.LOCK, "{}")
    folders.age(130, "mine/status.json")
    assert listed()["mine"]["state"] == "training"


def test_run_whose_driver_was_killed_here_is_lost_at_once(folders: Folders, listed: Callable[..., Any]) -> None:
    holds = f"""
import sys
from ray_on_ecs.storage.lock import RunLock
from ray_on_ecs.storage.run_storage import RunStorage
with RunLock(RunStorage.open({folders.path!r}, "mine")):
    print("held", flush=True)
    sys.stdin.read()
"""
    folders.status("mine", "training")
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout
        driver.stdout.readline()
        assert listed()["mine"]["state"] == "training"
        assert main(["rm", "--local", "mine"]) == 2
        driver.kill()
    assert listed()["mine"]["state"] == "lost"
    folders.of("mine").write(layout.ERROR, "{}")
    assert listed()["mine"]["state"] == "failed"
    assert main(["rm", "--local", "mine"]) == 0


def test_silent_run_in_s3_is_lost(bucket: Folders, listed: Callable[..., Any]) -> None:
    bucket.status("lost-run", "training")
    bucket.status("other-run", "training")
    age_object(BUCKET, bucket.of("lost-run").path(layout.STATUS).removeprefix(f"{BUCKET}/"), 300)
    assert {name: run["state"] for name, run in listed().items()} == {
        "lost-run": "lost",
        "other-run": "training",
    }


@pytest.mark.parametrize("error", [-HOUR, HOUR], ids=["behind", "ahead"])
def test_local_clock_is_ignored_in_s3(
    bucket: Folders, listed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    wrong = SimpleNamespace(time=lambda: time.time() + error)
    monkeypatch.setattr(disk, "time", wrong)
    bucket.status("mine", "training")
    run = listed()["mine"]
    assert run["state"] == "training"
    assert 700 < run["started_seconds_ago"] < HOUR
    assert 700 < run["seconds"] < HOUR


def test_late_clock_gives_no_negative_times(
    folders: Folders, listed: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folders.status("mine", "training", started=moment(-HOUR))
    assert listed()["mine"]["started_seconds_ago"] == 0
    assert main(["runs", "--local"]) == 0
    assert "0 s ago" in capsys.readouterr().out


def test_runs_without_a_status_are_listed(folders: Folders, listed: Callable[..., Any]) -> None:
    """Their driver ended before it wrote a status."""
    folders.script("early-finished")
    for name in ("early-training", "early-killed", "early-interrupted"):
        folders.script(name, is_finished=False)
    folders.of("early-training").write(layout.LOCK, "{}")
    folders.of("early-killed").write(layout.LOCK, "{}")
    folders.of("no-settings-yet").write(layout.LOCK, "{}")
    folders.age(130, "early-killed/run.lock", "no-settings-yet/run.lock")
    rows = listed()
    assert {name: run["state"] for name, run in rows.items()} == {
        "early-finished": "finished",
        "early-training": "training",
        "early-killed": "lost",
        "early-interrupted": "interrupted",
        "no-settings-yet": "lost",
    }
    assert 0 <= rows["early-training"]["started_seconds_ago"] < 120 < rows["no-settings-yet"]["started_seconds_ago"]


def test_resumed_run_without_a_status_is_starting(folders: Folders, listed: Callable[..., Any]) -> None:
    folders.script("mine", is_finished=False)
    with jobs_here(job("mine")):
        assert listed()["mine"]["state"] == "starting"


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"state": "training"}', '{"started": 7, "state": "training"}', "\xff"]
)
def test_broken_document_hides_no_other_run(folders: Folders, listed: Callable[..., Any], content: str) -> None:
    folders.status("broken", "training")
    folders.of("broken").write(layout.STATUS, content.encode("latin-1"))
    folders.status("fine", "training")
    rows = listed()
    assert rows["broken"]["state"] == "unreadable"
    assert rows["fine"]["state"] == "training"


def test_invalid_numbers_are_omitted(
    folders: Folders, listed: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folders.status("waits", "waiting", step=None, loss=None, cost_usd=None, workers=None)
    folders.of("diverged").write(
        layout.STATUS,
        f'{{"state": "failed", "started": "{moment(60)}", "loss": NaN, "cost_usd": Infinity, "step": "x"}}',
    )
    rows = listed()
    assert rows["waits"]["loss"] is None
    assert rows["diverged"] | {"loss": None, "cost_usd": None, "step": None} == rows["diverged"]
    assert main(["runs", "--local"]) == 0
    assert "None" not in capsys.readouterr().out


def test_other_folders_are_not_listed(folders: Folders, listed: Callable[..., Any]) -> None:
    folders.status("mine", "finished")
    folders.of("notes").write("read.me", "mine")
    folders.of("").write(".write-check", "")
    assert set(listed()) == {"mine"}


def test_jobs_without_a_folder_are_starting(folders: Folders, listed: Callable[..., Any]) -> None:
    elsewhere = {"run_name": "theirs", "storage_path": "s3://another/runs"}
    jobs = [
        job("new"),
        job("next", "PENDING"),
        job("done", "SUCCEEDED"),
        job("theirs", metadata=elsewhere),
        job("x", metadata={}),
    ]
    with jobs_here(*jobs):
        rows = listed()
    assert {name: run["state"] for name, run in rows.items()} == {"new": "starting", "next": "starting"}
    assert 25 < rows["new"]["started_seconds_ago"] < HOUR
    assert rows["new"]["job"] == "new"


def test_resumed_run_is_starting_until_its_driver_reports(folders: Folders, listed: Callable[..., Any]) -> None:
    folders.status("mine", "interrupted")
    folders.status("ends", "finished")
    with jobs_here(job("mine", submission_id="mine.2"), job("ends")):
        rows = listed()
    assert rows["mine"]["state"] == "starting"
    assert rows["mine"]["job"] == "mine.2"
    assert rows["ends"]["state"] == "finished", "its driver has written the end and is about to exit"


def test_runs_of_this_machine_name_their_folder(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.status("mine", "finished")
    assert main(["runs", "--local"]) == 0
    printed = capsys.readouterr()
    assert "mine" in printed.out
    assert printed.err == f"runs in {folders.path}:\n"


def test_newest_runs_come_first_up_to_limit(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(5):
        folders.status(f"run-{index}", "finished", started=moment(100 * (index + 1)))
        folders.age(90 * index, f"run-{index}/status.json")
    assert main(["runs", "--local", "--limit", "3"]) == 0
    printed = capsys.readouterr()
    assert re.findall(r"run-\d", printed.out) == ["run-0", "run-1", "run-2"]
    assert "--limit" in printed.err


def test_many_s3_runs_need_few_requests(
    bucket: Folders, listed: Callable[..., Any], s3_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = bucket.path.removeprefix(f"s3://{BUCKET}/")
    bucket.status("run-00", "finished")
    status = bucket.of("run-00").read(layout.STATUS)
    for index in range(60):
        for name in (layout.STATUS, "checkpoints/step-000000010/.metadata", "files/a/b"):
            s3_client.put_object(Bucket=BUCKET, Key=f"{prefix}/run-{index:02}/{name}", Body=status)
    with caplog.at_level(logging.INFO, logger="werkzeug"):
        rows = listed()
    assert len(rows) == 20
    logged = [record.getMessage() for record in caplog.records]
    requests = {words[1] for line in logged if (words := re.search('"(.*?)"', line))}  # one may be repeated
    lists = [request for request in requests if "list-type=2" in request]
    assert all("delimiter=/" in request for request in lists), "none has the objects below a run's folder"
    assert len(lists) == 61
    assert len(requests) - len(lists) <= 22
    assert len(listed("--limit", "500")) == 60


def test_missing_bucket_is_named(
    bucket: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", "s3://no-such-bucket-of-anyone/runs")
    assert main(["runs", "--local"]) == 2
    assert "no-such-bucket-of-anyone" in capsys.readouterr().err


def test_unreachable_s3_is_one_line(
    bucket: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert main(["runs", "--local"]) == 3
    assert "can't be reached" in capsys.readouterr().err


def test_runs_of_a_stack_are_in_its_bucket(
    bucket: Folders, s3_client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    s3_client.create_bucket(Bucket="bucket-of-a-stack")
    Folders("s3://bucket-of-a-stack/runs").status("mine", "finished")
    file = tmp_path / "dev.json"
    file.write_text(json.dumps(outputs("bucket-of-a-stack")))
    assert main(["runs", "--outputs", str(file), "--json"]) == 0
    printed = capsys.readouterr()
    assert [run["name"] for run in json.loads(printed.out)] == ["mine"]
    assert "may be stale" in printed.err
    file.write_text(json.dumps(outputs("bucket-that-is-gone")))
    assert main(["runs", "--outputs", str(file)]) == 3
    assert "pulumi up" in capsys.readouterr().err


REST = "finished   step 25  0.2500  3 h ago  0.42 USD"
LONG_NAMES = ("ddp-snapshot-20261124-221236-6707", "training-mymodels-mlp-digits-20261124-220740-10288")


def test_pipe_has_whole_names(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    for name in LONG_NAMES:
        folders.status(name, "finished", started=moment(3 * HOUR))
    assert main(["runs", "--local"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "state", "progress", "loss", "started", "cost"]
    assert {row.rstrip() for row in rows} == {f"{name:<{max(map(len, LONG_NAMES))}}  {REST}" for name in LONG_NAMES}


END = {"step": 1200, "total": 10_000, "seconds_left": 11_400.0, "usd": 12.4, "usd_at_end": 41.3}


@pytest.mark.parametrize(
    ("state", "changed", "progress", "cost"),
    [
        ("training", {}, "step 1,200 of 10,000, 3 h 10 min left", "12.40 USD, about 41 at the end"),
        ("training", {"seconds_left": None, "usd_at_end": None}, "step 1,200 of 10,000", "12.40 USD"),
        ("training", {"total": None, "seconds_left": None, "usd_at_end": None}, "step 1,200", "12.40 USD"),
        ("training", {"usd": None, "usd_at_end": None}, "step 1,200 of 10,000, 3 h 10 min left", "12.40 USD"),
        ("waiting", {}, "step 1,200 of 10,000", "12.40 USD"),
        ("interrupted", {}, "step 1,200 of 10,000", "12.40 USD"),
        ("finished", {"step": 10_000}, "step 10,000 of 10,000", "12.40 USD"),
    ],
)
def test_progress_and_cost_have_the_end(
    folders: Folders, capsys: pytest.CaptureFixture[str], state: str, changed: dict[str, Any], progress: str, cost: str
) -> None:
    folders.status("mine", state, end={**END, **changed}, cost_usd=12.4, loss=None)
    assert main(["runs", "--local"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert re.split(r"  +", row.strip()) == ["mine", state, progress, "12 min ago", cost]


def test_lost_run_has_no_estimate(folders: Folders, listed: Callable[..., Any]) -> None:
    folders.status("mine", "training", end=END)
    assert listed()["mine"]["end"] == END
    folders.age(130, "mine/status.json")
    assert listed()["mine"]["end"] == {**END, "seconds_left": None, "usd_at_end": None}


@pytest.mark.parametrize("costs", [[None], [None, None], [0.0], [None, 0.42]])
def test_costs_are_a_column_if_a_run_has_one(
    folders: Folders, capsys: pytest.CaptureFixture[str], costs: list[float | None]
) -> None:
    for number, cost in enumerate(costs):
        folders.status(f"run-{number}", "finished", started=moment(3 * HOUR), cost_usd=cost)
    assert main(["runs", "--local"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[-1] == ("started" if set(costs) == {None} else "cost")
    assert sum(row.rstrip().endswith("USD") for row in rows) == len(costs) - costs.count(None)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    for name, value in {"TTY_COMPATIBLE": "1", "TERM": "dumb", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("narrow")
def test_narrow_terminal_cuts_only_names(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    for name in LONG_NAMES:
        folders.status(name, "finished", started=moment(3 * HOUR))
    assert main(["runs", "--local"]) == 0
    rows = [row.rstrip() for row in capsys.readouterr().out.splitlines()]
    assert {len(row) for row in rows[1:]} <= set(range(70, 81))
    assert all(row.endswith(REST) for row in rows[1:])
    assert {row.split()[0] for row in rows[1:]} == {
        "ddp-snapshot-20…124-221236-6707",
        "training-mymode…24-220740-10288",
    }


@pytest.mark.usefixtures("narrow")
def test_narrow_terminal_shows_the_time_left(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.status("a-name-of-many-letters", "training", end=END, cost_usd=12.4)
    assert main(["runs", "--local"]) == 0
    row = capsys.readouterr().out.splitlines()[1].rstrip()
    assert re.split(r"  +", row)[1:] == ["training", "12%, 3 h 10 min left", "0.2500", "12 min ago", "12.40 USD"]
    assert len(row) <= 80


H100 = {"name": "h100", "zone": "us-west-2c", "instance_types": ["p5.48xlarge"], "gpu": "H100", "reason": "any pool"}
DEFAULT = {**H100, "name": "default", "zone": "us-west-2a", "instance_types": ["g5.xlarge"], "gpu": "A10G"}


@pytest.mark.parametrize(("line", "says"), [("l4", "behind first in pool l4 "), (None, "behind first ")])
def test_queued_run_names_the_line(
    folders: Folders, capsys: pytest.CaptureFixture[str], line: str | None, says: str
) -> None:
    folders.status("mine", "queued", behind="first", started=moment(3 * HOUR), **({"line": line} if line else {}))
    assert main(["runs", "--local"]) == 0
    assert f" {says}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ([None, None], None),
        ([DEFAULT, DEFAULT], None),
        ([DEFAULT, None], None),
        ([DEFAULT, H100], "h100: p5.48xlarge in us-west-2c"),
        ([DEFAULT, {**DEFAULT, "zone": "us-west-2b"}], "default: g5.xlarge in us-west-2b"),
    ],
)
def test_pools_are_a_column_if_they_differ(
    folders: Folders, capsys: pytest.CaptureFixture[str], pools: list[Any], says: str | None
) -> None:
    for number, pool in enumerate(pools):
        folders.status(f"run-{number}", "finished", started=moment(3 * HOUR), **({"pool": pool} if pool else {}))
    assert main(["runs", "--local"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert ("pool" in heading) is (says is not None)
    assert says is None or any(says in row for row in rows)


@pytest.mark.usefixtures("narrow")
def test_narrow_terminal_shows_the_pools_name(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    for name, pool in zip(LONG_NAMES, (DEFAULT, H100), strict=True):
        folders.status(name, "finished", started=moment(3 * HOUR), pool=pool)
    assert main(["runs", "--local"]) == 0
    rows = [row.rstrip() for row in capsys.readouterr().out.splitlines()]
    assert max(map(len, rows)) <= 80
    assert {row.split()[2] for row in rows[1:]} == {"default", "h100"}


def test_pools_as_json(folders: Folders, listed: Callable[..., Any]) -> None:
    folders.status("mine", "finished", pool=H100)
    folders.status("old", "finished")
    runs = listed("--json")
    keys = ("pools", "instance_types", "zones", "gpu")
    assert [runs["mine"][key] for key in keys] == [["h100"], ["p5.48xlarge"], ["us-west-2c"], "H100"]
    assert [runs["old"][key] for key in keys] == [None, None, None, None]


HOSTILE: dict[str, dict[str, Any]] = {
    "markup": {"state": "[/foo]", "owner": "[link=file:///etc]x[/]"},
    "a link in markup": {"url": "https://x][/foo]"},
    "a script": {"url": "javascript:alert(1)"},
    "a file": {"url": "file:///etc/passwd"},
    "a link with a space": {"url": "https://x y"},
    "a link with an escape": {"url": "https://x\x1b]8;;file:///\x07"},
    "a link that is a list": {"url": ["https://x"]},
    "an owner that is a number": {"owner": 7},
    "escapes": {"state": "\x1b[2J", "owner": "\x1b]52;c;ZWNobw==\x07", "behind": "\x1b[H"},
    "escapes in a pool": {"pool": {"name": "\x1b[2J", "zone": "\x1b[H", "instance_types": ["\x1b]52;c;ZWNobw==\x07"]}},
    "a pool that is text": {"pool": "h100"},
    "half of a character": {"state": "\ud800", "owner": "\udfff"},
    "a state that is a list": {"state": ["training"]},
    "no state": {"state": None},
    "a step that is text": {"step": "1"},
    "an infinite loss": {"loss": float("inf")},
    "metrics that are a list": {"metrics": [1]},
    "metrics that are text": {"metrics": {"loss": "1", "lr": [1], "a": {}}},
    "infinite metrics": {"metrics": {"loss": float("inf"), "\x1b[2J": 1}},
    "a huge step": {"step": 10**400},
    "a cost that is text": {"cost_usd": "7"},
    "a time that is none": {"started": "yesterday"},
    "a time that is a number": {"started": 7},
    "a time in the year 9999": {"started": "9999-12-31T23:59:59+00:00"},
    "workers that are a list": {"workers": [2]},
    "instances that are text": {"instances": "all"},
    "a job that is a number": {"job": 7},
    "behind a number": {"state": "queued", "behind": 7},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_document_of_a_run_breaks_at_most_its_row(
    folders: Folders, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folders.status("healthy", "finished")
    folders.status("broken", "training")
    folders.of("broken").write(layout.STATUS, json.dumps(folders.read("broken") | HOSTILE[kind]))
    for flags in ((), ("--json",)):
        assert main(["runs", "--local", *flags]) == 0
        out = capsys.readouterr().out
        assert "healthy" in out
        assert "broken" in out
        assert "\x1b" not in out
        assert "javascript" not in out
        assert "file:///etc/passwd" not in out


NO_RUNS = [
    "a$(touch${IFS}PWNED)",
    "a b",
    "-rf",
    "a;b",
    "a`b`",
    "a|b",
    "a&b",
    "a'b",
    'a"b',
    "a\x1b[2J",
    "a\nb",
    "ü",
    ".a",
    "a" * 129,
]


@pytest.mark.parametrize("name", NO_RUNS)
def test_folder_with_another_name_is_no_run(folders: Folders, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folders.status("healthy", "finished")
    (Path(folders.path) / name).mkdir()
    (Path(folders.path) / name / "status.json").write_text((Path(folders.path) / "healthy/status.json").read_text())
    assert main(["runs", "--local", "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["healthy"]
    for command in (["fetch"], ["open"], ["rm"]):
        assert main([*command, "--local", "--", name]) == 2
