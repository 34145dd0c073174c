"""The page that is left of a run."""

import base64
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.report import Documents, render, write_report
from tests.log_lines import collect_lines

NEXT = "ray-on-ecs run --run-name mine train.py --epochs 5"
PICTURE = b"\x89PNG of the curves"
STATUS = {
    "run_name": "mine",
    "state": "interrupted",
    "started": "2026-11-23T18:15:00.000+00:00",
    "updated": "2026-11-23T19:16:01.000+00:00",
    "step": 1300,
    "loss": 0.7,
    "workers": 2,
    "cost_usd": 1.0,
    "instances": [{"instance_type": "g5.xlarge", "market": "spot", "hours": 2.0, "hourly_usd": 0.5}],
    "job": None,
    "error": None,
    "next": NEXT,
}
SETTINGS = {"format": 1, "settings": {"command": ["train.py", "--epochs", "5"]}}
ERROR = {"what": "no progress for 5 s", "rank": 1, "time": "2026-11-23T19:16:01+00:00", "next": "again"}


METRICS = [
    {"step": 1, "time": "2026-11-23T18:16:00+00:00", "loss": 1.0, "lr": 0.1},
    {"step": 2000, "time": "2026-11-23T18:17:00+00:00", "loss": 0.51239},
]
RESULT = {
    "metrics": METRICS[1],
    "config": {"command": ["train.py", "--epochs", "5"], "device": "auto", "hang_timeout": None, "env": []},
    "hardware": {"workers": 2, "device": "NVIDIA A10G", "backend": None},
    "versions": {"torch": "2.14.1"},
    "times": {"started": STATUS["started"], "total_seconds": 3661.0},
    "cost": {"usd": 1.0, "on_demand_usd": 2.0, "instances": STATUS["instances"]},
}


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage.open(str(tmp_path), "mine")


@pytest.fixture
def write(storage: RunStorage) -> Callable[..., str]:
    """Writes the documents of a run and its report; returns the report."""

    def write_all(**documents: Any) -> str:
        for name, document in {"run": SETTINGS, "status": STATUS, **documents}.items():
            if document is not None:
                storage.write_json(f"{name}.json", document)
        said = collect_lines()
        write_report(storage)
        assert said == []
        return storage.read("report.html").decode()

    return write_all


def text(report: str) -> str:
    """The text of a report without its style, a line for each element."""
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"<[^>]*>", "\n", re.sub(r"<style>.*?</style>", "", report, flags=re.S)))


def test_report_of_a_finished_run(storage: RunStorage, write: Callable[..., str]) -> None:
    storage.write_lines("metrics.jsonl", METRICS)
    storage.write("curves.png", PICTURE)
    report = write(result=RESULT)
    shown = text(report)
    assert "mine\nfinished\n: loss 0.5124\n" in shown
    assert "command\ntrain.py --epochs 5\n" in shown
    assert "metric\nlast value\nstep\n2,000\nloss\n0.5124\nlr\n0.1\n" in shown
    assert f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}" in report
    for line in ("NVIDIA A10G", "torch\n2.14.1", "time\n1:01:01", "cost\n1.00 USD", "started\n2026-11-23 18:15:00 UTC"):
        assert line in shown
    assert "g5.xlarge, spot\n2.00 h at 0.5 USD: 1.00 USD\ntotal\n1.00 USD\non demand\n2.00 USD" in shown
    assert NEXT not in shown


@pytest.mark.parametrize("has_metrics", [False, True])
def test_report_without_metrics_says_how_to_have_some(
    storage: RunStorage, write: Callable[..., str], has_metrics: bool
) -> None:
    if has_metrics:
        storage.write_lines("metrics.jsonl", METRICS)
    assert ("--metric &#39;loss=loss: {number}&#39;" in write(result=RESULT)) != has_metrics


def test_command_keeps_its_quotes(write: Callable[..., str]) -> None:
    settings = {"command": ["bash", "-c", "python a.py && python b.py"]}
    assert "command\nbash -c &#39;python a.py &amp;&amp; python b.py&#39;\n" in text(
        write(run={"format": 1, "settings": settings})
    )


def test_given_settings_come_first(write: Callable[..., str]) -> None:
    assert "Settings\ncommand\ntrain.py --epochs 5\n" in text(write())
    settings, folded = text(write(result=RESULT)).split("Settings\n")[1].split("3 at their defaults\n")
    assert settings == "command\ntrain.py --epochs 5\n"
    assert folded.startswith("device\nauto\nhang timeout\nnone\nenv\nnone\n")


def test_report_of_an_interrupted_run(write: Callable[..., str]) -> None:
    shown = text(write())
    assert "interrupted\n: after step 1,300\n" in shown
    assert NEXT in shown
    assert "cost\n1.00 USD" in shown


def test_report_of_a_failed_run(write: Callable[..., str]) -> None:
    line = "training failed: no progress for 5 s; the same command with --run-name mine resumes the run"
    shown = text(write(status={**STATUS, "state": "failed", "error": line}, error=ERROR))
    assert f"failed\n: {line}\n" in shown
    assert NEXT in shown
    assert "Failure\ntime\n2026-11-23T19:16:01+00:00\nwhat\nno progress for 5 s\nrank\n1\n" in shown


END = {"step": 1300, "total": 10_000, "seconds_left": 11_400.0, "usd": 1.0, "usd_at_end": 7.74}


@pytest.mark.parametrize(
    ("state", "outcome", "cost"),
    [
        ("training", "after step 1,300 of 10,000, 3 h 10 min left; last update 2026", "1.00 USD, about 7.7 at the end"),
        ("waiting", "after step 1,300 of 10,000; last update 2026-11-23 19:16:01 UTC", "1.00 USD"),
        ("interrupted", "after step 1,300 of 10,000", "1.00 USD"),
    ],
)
def test_end_is_in_the_report_of_a_run_that_trains(
    write: Callable[..., str], state: str, outcome: str, cost: str
) -> None:
    shown = text(write(status={**STATUS, "state": state, "end": END}))
    assert f"{state}\n: {outcome}" in shown
    assert f"cost\n{cost}\n" in shown
    assert "at the end" not in text(write(status={**STATUS, "state": state, "end": END}, result=RESULT))


@pytest.mark.parametrize(
    ("documents", "outcome"),
    [({}, "unfinished"), ({"error": ERROR}, "failed\n: no progress for 5 s"), ({"result": RESULT}, "finished\n: loss")],
    ids=["nothing", "error.json", "result.json"],
)
def test_report_without_a_status(documents: dict[str, Any], outcome: str) -> None:
    assert f"mine\n{outcome}" in text(render(Documents("mine", "results/mine", **documents)))


def test_report_has_the_end_of_the_log(storage: RunStorage, write: Callable[..., str]) -> None:
    storage.write("logs/20261123T181500Z.txt", "of the command before\n")
    storage.write("logs/20261124T000000Z.txt", "".join(f"\x1b[36m(pid=7)\x1b[0m line {n}\r\n" for n in range(30_000)))
    log = write().split("<pre>")[1].split("</pre>")[0].splitlines()
    assert log == [f"(pid=7) line {number}" for number in range(29_900, 30_000)]


def test_report_escapes_markup(storage: RunStorage, write: Callable[..., str]) -> None:
    evil = "<script>alert('&')</script>"
    storage.write("logs/20261123T181500Z.txt", evil)
    storage.write_lines("metrics.jsonl", [{"step": 1, evil: 1.0}])
    config = {"format": 1, "settings": {evil: evil, "command": [evil]}}
    status = {**STATUS, "state": "failed", "error": evil, "next": evil}
    report = write(run=config, status=status, error={**ERROR, "what": evil})
    assert "<script" not in report
    assert report.count("&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;") >= 8


class Addresses(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


def test_report_loads_no_other_files(storage: RunStorage, write: Callable[..., str]) -> None:
    storage.write("curves.png", PICTURE)
    report = write()
    addresses = Addresses()
    addresses.feed(report)
    assert len(addresses.found) == 2
    assert all(each.startswith("data:") for each in addresses.found)
    assert "url(" not in report
    assert "@import" not in report


def test_broken_document_costs_one_line(storage: RunStorage) -> None:
    output = collect_lines()
    storage.write("result.json", json.dumps(RESULT)[:-5])
    write_report(storage)
    assert len(output) == 1
    assert output[0].startswith("report.html could not be written (--run-name: result.json in ")


def test_the_trials_of_ray_tune_are_a_table() -> None:
    trials = {
        "a_0": {"status": "TERMINATED", "config": {"lr": 0.1}, "metrics": {"loss": 0.25}},
        "a_1": {"status": "ERROR", "config": {"lr": 0.2, "depth": 3}, "metrics": {}},
    }
    page = render(Documents("mine", "results/mine", trials=trials))
    table = page[page.index("<h2>Trials</h2>") :]
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", table)
    assert cells[:5] == ["trial", "status", "lr", "depth", "loss"]
    assert cells[5:15] == ["a_0", "terminated", "0.1", "", "0.25", "a_1", "error", "0.2", "3", ""]
    assert "more in trials.json" not in page
    assert "Trials" not in render(Documents("mine", "results/mine"))


def test_of_many_trials_the_first_are_shown() -> None:
    trials = {f"trial_{n}": {"status": "TERMINATED", "config": {}, "metrics": {"loss": n}} for n in range(23)}
    page = render(Documents("mine", "results/mine", trials=trials))
    assert page.count("trial_") == 20
    assert "and 3 more in trials.json" in page


@pytest.mark.parametrize("document", ["status", "result"])
def test_report_has_the_parts_of_each_start(write: Callable[..., str], document: str) -> None:
    cold = {"requested": "2026-11-23T18:15:00.500+00:00", "parts": {"alarm": 64.0, "instance": 91.0}, "is_over": True}
    waits = {"requested": "2026-11-23T19:00:00+00:00", "parts": {"workers": 3.0}, "is_over": False}
    given = {"status": STATUS} if document == "status" else {"status": STATUS, "result": RESULT}
    shown = text(write(**given | {document: {**given[document], "starts": [cold, {"requested": "soon"}, waits]}}))
    assert (
        "Starts\n2026-11-23 18:15:00 UTC\n2 min 35 s = alarm 1:04, instance 1:31\n"
        "2026-11-23 19:00:00 UTC\n0 min 3 s so far = workers 0:03\n"
    ) in shown


@pytest.mark.parametrize("document", ["status", "result"])
def test_report_has_the_slow_ranks(write: Callable[..., str], document: str) -> None:
    times = [{"since": "2026-11-23T18:15:00+00:00", "until": None, "what": "rank 1 comes last"}]
    found = {"slow": times, "waits": [{"rank": 1, "node": "i-1", "share": 0.02}]}
    given = {"status": STATUS} if document == "status" else {"status": STATUS, "result": RESULT}
    shown = text(write(**given | {document: {**given[document], **found}}))
    assert "Slow ranks\n2026-11-23 18:15:00 UTC\nrank 1 comes last\n" in shown
    assert "Waits in collectives\nrank 1 (i-1)\nwaits 2.0 % of the time\n" in shown


def test_page_names_pool_type_and_zone(write: Callable[..., str]) -> None:
    chosen = {
        "name": "h100",
        "zone": "us-west-2c",
        "instance_types": ["p5.48xlarge"],
        "reason": "<b>first</b> of --gpu",
    }
    instance = {"instance_type": "p5.48xlarge", "market": "spot", "hours": 2.0, "hourly_usd": 0.5}
    instances = [{**instance, "pool": "h100", "zones": ["us-west-2c"]}]
    for documents in (
        {"status": {**STATUS, "pool": chosen, "instances": instances}},
        {"result": {**RESULT, "pool": chosen, "cost": {"usd": 1.0, "on_demand_usd": 2.0, "instances": instances}}},
    ):
        page = write(**documents)
        assert "<dd>h100: p5.48xlarge in us-west-2c</dd>" in page
        assert "&lt;b&gt;first&lt;/b&gt; of --gpu" in page
        assert "p5.48xlarge, spot, h100" in page
    assert "<dt>pool</dt>" not in write(result=RESULT)
