"""Commands on runs whose documents others who can write to the storage may have written."""

import json
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.cli.status import read_runs
from ray_on_ecs.cluster.clusters import LocalCluster
from ray_on_ecs.storage import layout
from ray_on_ecs.tracking import end
from tests.ray_on_ecs.cli.folders import Folders, job, jobs_here

NESTED = "[" * 900 + "]" * 900
CONTENTS = {
    "a list": "[1]",
    "text": '"x"',
    "cut off": "{",
    "null": "null",
    "nested": "[" * 100_000,
    "nested values": f'{{"settings": {{"x": {NESTED}, "lr": {{"a": {NESTED}}}}}, "state": {NESTED}, "step": {NESTED}}}',
    "infinite": '{"settings": {"lr": 1e999}, "state": "training", "step": 1e999, "cost_usd": NaN, "loss": -Infinity}',
    "long numbers": f'{{"settings": {{"lr": 1{"0" * 5000}}}, "step": 1{"0" * 300}, "cost_usd": 1{"0" * 300}}}',
    "text for numbers": '{"settings": {"lr": "1"}, "step": "7", "cost_usd": "7", "times": {"total_seconds": "7"}}',
    "lists for numbers": '{"step": [7], "cost_usd": [7], "earlier": {"usd": [7], "seconds": [1]}, "times": []}',
    "large floats": '{"times": {"total_seconds": 1e300}, "cost": {"usd": 1e308}, "earlier": {"usd": 1e308}}',
    "numbers for text": '{"settings": 7, "state": 7, "owner": 7, "started": 7, "instances": 7, "url": 7, "error": 7}',
    "objects for text": '{"state": {}, "owner": {}, "started": {}, "instances": {}, "metrics": [], "command": {}}',
    "text for places": '{"state": "x", "pool": "h100", "instances": [{"pool": "h100", "zones": "a", "hours": 1}]}',
    "numbers for places": '{"pool": {"name": 7, "zone": 7, "instance_types": 7, "reason": 7}, "instances": [7, null]}',
    "lists for places": '{"pool": [["h100"]], "cost": {"instances": [{"pool": [], "zones": [[]]}]}}',
    "escapes": '{"pool": {"name": "\\u001b[31mred", "zone": "a\\nb", "instance_types": ["\\u001b]0;x\\u0007"]}}',
    "markup": '{"settings": {"lr": "[/foo]"}, "state": "[/foo]", "owner": "[link=file:///etc]x[/]", "error": "[/]"}',
}
DOCUMENTS = (layout.SETTINGS, layout.STATUS, layout.RESULT, layout.ERROR, layout.METRICS, layout.TRIALS)


@pytest.fixture
def folders(folders: Folders) -> Folders:
    """A storage path with the run `healthy`."""
    make(folders, "healthy")
    return folders


def make(folders: Folders, name: str) -> None:
    folders.script(name, records=2)
    folders.status(name, "finished")
    folders.of(name).write("logs/20261125T141834Z.txt", "epoch 1\n")


@pytest.mark.parametrize("kind", CONTENTS)
def test_broken_document_costs_at_most_a_line(folders: Folders, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    names = []
    for document in DOCUMENTS:
        name = f"broken-{document}"
        make(folders, name)
        folders.of(name).delete(layout.RESULT)
        folders.of(name).write(document, CONTENTS[kind] + "\n")
        names.append(name)
    assert main(["history", "--local", "--no-browser"]) == 0
    assert all(f'"name":"{name}"' in Path("runs/history.html").read_text() for name in ("healthy", *names))
    capsys.readouterr()
    for words in (["runs"], ["runs", "--json"], ["logs", "healthy"], *(["logs", name] for name in names)):
        assert main([words[0], "--local", *words[1:]]) == 0
    out = capsys.readouterr().out
    assert out.count("epoch 1") == 1 + len(names)
    assert all(name in out for name in ("healthy", *names))
    for name in names:
        status = main(["open", "--local", "--no-browser", name])
        *_, line = capsys.readouterr().err.splitlines() or [""]
        assert status == 0 or (status == 2 and name in line), line
        assert main(["logs", "--local", "--follow", name]) in (0, 2, 3)
    assert main(["rm", "--local", *names]) == 0


QUEUED = {"state": "queued", "owner": "ana", "behind": "first"}


@pytest.mark.parametrize(
    ("content", "queue"),
    [
        (QUEUED, [{"run": "mine", "owner": "ana", "behind": "first", "pool": ""}]),
        ({**QUEUED, "owner": None}, [{"run": "mine", "owner": "", "behind": "first", "pool": ""}]),
        ({**QUEUED, "line": "l4"}, [{"run": "mine", "owner": "ana", "behind": "first", "pool": "l4"}]),
        (
            {**QUEUED, "owner": 7, "behind": "a\nb", "line": "x\ny"},
            [{"run": "mine", "owner": "7", "behind": "a b", "pool": "x y"}],
        ),
        ({"state": "queued"}, []),
        ({**QUEUED, "job": None}, []),
        ([1], []),
        ("queued", []),
        (None, []),
    ],
)
def test_queue_has_the_runs_of_the_storage_path(folders: Folders, content: Any, queue: list[dict[str, str]]) -> None:
    document = {"job": "mine", **content} if isinstance(content, dict) else content
    folders.of("mine").write(layout.STATUS, json.dumps(document))
    folders.of("theirs").write(layout.STATUS, json.dumps({"job": "theirs", **QUEUED}))
    elsewhere = {"run_name": "theirs", "storage_path": "s3://another/runs"}
    jobs = [job("mine"), job("theirs", metadata=elsewhere), job("../mine")]
    assert read_runs(LocalCluster(), jobs) == {"queue": queue, "starts": [], "runs": []}


START = {"requested": "2026-01-01T00:00:00.000+00:00", "parts": {"environment": 41.0}, "is_over": False}


@pytest.mark.parametrize(
    ("state", "starts", "found"),
    [
        ("waiting", [START], [{"run": "mine", **START}]),
        ("training", [{**START, "parts": {}}, START], [{"run": "mine", **START}]),
        ("queued", [START], []),
        ("waiting", [], []),
        ("waiting", [{**START, "parts": "x"}], []),
        ("waiting", "x", []),
        ("waiting", None, []),
    ],
)
def test_last_start_of_a_run_is_shown(folders: Folders, state: str, starts: Any, found: list[dict[str, Any]]) -> None:
    folders.of("mine").write(layout.STATUS, json.dumps({**QUEUED, "job": "mine", "state": state, "starts": starts}))
    assert read_runs(LocalCluster(), [job("mine")])["starts"] == found


def test_status_has_a_line_for_each_start(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    over = {**START, "parts": {"alarm": 64.0, "instance\nof another": 91.0}, "is_over": True}
    for name, start in (("first", over), ("second", START)):
        status = {"job": name, "state": "training", "starts": [start]}
        folders.of(name).write(layout.STATUS, json.dumps(status))
    with jobs_here(job("first"), job("second")):
        assert main(["status", "--local"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["status", "--local", "--json"]) == 0
    at = lines.index("  start    first: 2 min 35 s = alarm 1:04, instance of another 1:31")
    assert lines[at + 1] == "           second: 0 min 41 s so far = environment 0:41"
    assert [start["run"] for start in json.loads(capsys.readouterr().out)["starts"]] == ["first", "second"]


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"end": {"step": 5, "total": 10, "seconds_left": 60.0}}, ["step 5 of 10, 1 min left"]),
        ({"end": {"step": 5, "total": 10, "seconds_left": 60.0}, "state": "waiting"}, ["step 5 of 10"]),
        ({"end": None, "step": None}, []),
        ({"end": "x"}, []),
        ({}, []),
        ({"step": 7}, ["step 7"]),
        ({"step": 7, "state": "queued"}, []),
    ],
)
def test_end_of_a_run_is_shown(folders: Folders, changed: dict[str, Any], shown: list[str]) -> None:
    folders.of("mine").write(layout.STATUS, json.dumps({**QUEUED, "job": "mine", "state": "training", **changed}))
    runs = read_runs(LocalCluster(), [job("mine")])["runs"]
    assert [(each["run"], end.words(each["end"])) for each in runs] == [("mine", line) for line in shown]


@pytest.mark.parametrize(
    ("document", "readers"),
    [
        (layout.SETTINGS, ["open"]),
        (layout.STATUS, ["open", "logs"]),
        (layout.RESULT, ["open"]),
        (layout.FILES, ["fetch"]),
    ],
)
def test_broken_document_is_said_of_the_typed_argument(
    folders: Folders, capsys: pytest.CaptureFixture[str], document: str, readers: list[str]
) -> None:
    folders.of("healthy").write(document, "{")
    shown: dict[str, str] = {}
    for words in (["open", "--no-browser"], ["fetch"], ["logs", "--follow"], ["debug"], ["rm"]):
        main([*words[:1], "--local", *words[1:], "healthy"])
        for line in capsys.readouterr().err.splitlines():
            if "is broken" in line:
                shown[words[0]] = line
    start = f"RUN: {document} in {folders.of('healthy').uri} is broken ("
    assert [*shown] == readers
    assert all(line.removeprefix("ray-on-ecs: ").startswith(start) for line in shown.values())
    assert all(line.endswith("; delete it or give another RUN") for line in shown.values())
