"""`ray-on-ecs history`: the page of all runs, the data in it, and the files on this machine."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.cli import history
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import history_rows
from ray_on_ecs.storage import layout
from tests.aws import BUCKET
from tests.ray_on_ecs.cli.folders import Folders, moment

DAY = 86400.0
H100 = {"name": "h100", "zone": "us-west-2c", "instance_types": ["p5.48xlarge"], "gpu": "H100", "reason": "first"}
Page = Callable[..., dict[str, Any]]


@pytest.fixture
def data(capsys: pytest.CaptureFixture[str]) -> Page:
    """Returns the data in the page of a command, with its runs by name."""

    def call(*words: str) -> dict[str, Any]:
        assert main(["history", "--local", "--no-browser", "--json", *words]) == 0
        printed = json.loads(capsys.readouterr().out)
        found = data_in(Path(printed["page"]).read_text())
        assert printed["runs"] == len(found["runs"])
        return {**found, "runs": {run["name"]: run for run in found["runs"]}}

    return call


class Elements(HTMLParser):
    """Collects the elements of a page, the texts of its scripts, and all other text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)
        else:
            self.text += data


def data_in(page: str) -> dict[str, Any]:
    return json.loads(Elements(page).scripts[0])


def test_row_of_a_run(folders: Folders, data: Page) -> None:
    folders.script("mine", command=["train.py", "--lr", "0.1"], env=["A=1"])
    folders.status(
        "mine", "finished", owner="ana", started="2026-11-01T10:00:00+00:00", updated="2026-11-01T12:00:00+00:00",
        workers=8, cost_usd=1.5, earlier={"seconds": 60.0, "usd": 0.5}, pool=H100, url="https://wandb.ai/a/b",
    )  # fmt: skip
    row = data()["runs"]["mine"]
    known = {
        "owner": "ana",
        "script": "train.py",
        "command": "train.py --lr 0.1",
        "state": "finished",
        "step": 25,
        "started": "2026-11-01T10:00:00.000+00:00",
        "month": "2026-11",
        "seconds": 7260,
        "workers": 8,
        "gpu": "H100",
        "pool": "h100: p5.48xlarge in us-west-2c",
        "cost": 2.0,
        "url": "https://wandb.ai/a/b",
        "last": {"loss": 0.05, "val_loss": 0.055, "lr": 0.1},
        "settings": {"num workers": "2", "env": "A=1", "--lr": "0.1"},
    }
    assert known.items() <= row.items()
    assert row["steps"] == list(range(10, 201, 10))
    assert row["curves"]["loss"][:2] == [1, 0.5]
    assert len(row["times"]) == 20


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["t.py", "--lr=0.1", "--betas", "0.9", "-0.5", "--amp"], {"--lr": "0.1", "--betas": "0.9 -0.5", "--amp": ""}),
        (["t.py", "fit", "-c", "a.yaml"], {"arguments": "fit", "-c": "a.yaml"}),
        (["t.py", "data", "-1", "out"], {"arguments": "data -1 out"}),
        (["t.py", "--lr", "1", "--lr", "2"], {"--lr": "2"}),
        (["t.py", 7, None, ["--lr"], {}], {"arguments": "7", "--lr": "{}"}),
        ("t.py --lr 1", {}),
    ],
)
def test_settings_have_the_flags_of_the_script(folders: Folders, data: Page, words: Any, settings: Any) -> None:
    document = {"settings": {"command": words, "run_name": "mine", "env": []}, "code": {"archive": "x/" + "0f" * 32}}
    folders.of("mine").write_json(layout.SETTINGS, document)
    assert data()["runs"]["mine"]["settings"] == {**settings, "code": "0f0f0f0f0f0f"}


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"owner": None}, {"owner": "(unknown)"}),
        ({"cost_usd": None}, {"cost": None}),
        ({"cost_usd": float("nan")}, {"cost": None}),
        ({"updated": "soon"}, {"seconds": None, "state": "of a newer version"}),
        ({"updated": "2026-11-01T10:00:00"}, {"seconds": None}),
        ({"started": None}, {"state": "unreadable", "seconds": None}),
        ({"workers": None, "pool": None}, {"workers": None, "gpu": "", "pool": ""}),
        ({"pool": {"gpu": ["H100"], "name": 7}}, {"gpu": "", "pool": ""}),
        ({"metrics": {"loss": None}, "step": None}, {"last": {}, "step": None}),
        ({"url": "javascript:alert(1)"}, {"url": None}),
    ],
)
def test_unknown_value_of_a_status(folders: Folders, data: Page, status: Any, shown: Any) -> None:
    folders.status("mine", "of a newer version")
    folders.of("mine").write(layout.STATUS, json.dumps(folders.read("mine") | status))
    assert shown.items() <= data()["runs"]["mine"].items()


TEXTS = {
    "script": "</script><script>alert(1)</script>",
    "attribute": "\"'><img src=x onerror=alert(1)>",
    "comment": "<!-- <script>",
    "template": "{{ 7 * 7 }}{% raw %}",
    "entity": "&lt;b&gt;",
    "emoji": "run \N{ROCKET}",
    "right to left": "\u0645\u0631\u062d\u0628\u0627",
    "long": "x" * 200,
    "prototype": "__proto__",
}


def test_text_of_others_is_data(folders: Folders, data: Page, tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS.values()):
        name = f"run-{number}"
        folders.status(name, text, owner=text, pool={**H100, "gpu": text, "name": text}, url=text)
        settings = {text: text, "command": [text, f"--{text}", text]}
        folders.of(name).write_json(layout.SETTINGS, {"settings": settings, "code": {"git": {"GIT_COMMIT": text}}})
        folders.of(name).write_lines(layout.METRICS, [{"step": 1, text: 0.5}])
    found = data()
    page = Elements((tmp_path / "runs/history.html").read_text())
    assert page.tags.count("script") == len(page.scripts) == 2
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not any(text in page.text for text in TEXTS.values())
    for number, text in enumerate(TEXTS.values()):
        row = found["runs"][f"run-{number}"]
        assert row["owner"] == row["state"] == row["gpu"] == row["script"] == text
        assert (row["url"], row["curves"]) == (None, {text: [0.5]})


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31ma b\x1b[0m", "\u202ea b", "a\x00 \tb", "a\u2028b"])
def test_text_has_one_line_and_direction(folders: Folders, data: Page, text: str) -> None:
    folders.status("mine", "finished", owner=text)
    assert data()["runs"]["mine"]["owner"].replace(" ", "") == "ab"


def test_half_a_character_does_not_stop_the_page(folders: Folders, data: Page) -> None:
    folders.of("mine").write(layout.STATUS, '{"state": "x", "started": "2026-11-01T10:00:00", "owner": "\\ud800"}')
    assert data()["runs"]["mine"]["owner"] == "?"


def test_policy_allows_the_script_of_the_page_alone(folders: Folders, data: Page, tmp_path: Path) -> None:
    data()
    page = Elements((tmp_path / "runs/history.html").read_text())
    [policy] = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert re.findall(r"script-src ([^;]*)", policy) == [f"'sha256-{digest}'"]
    assert {value for name, value in page.attributes if name in ("src", "href", "srcset")} == {"data:,"}
    assert not re.search(
        r"url\(|@import|innerHTML|outerHTML|insertAdjacent|document\.write", page.scripts[1] + page.text
    )


def test_broken_settings_cost_the_settings_alone(folders: Folders, data: Page) -> None:
    folders.script("mine", is_finished=False)
    folders.status("mine", "failed", owner="ana")
    folders.of("mine").write(layout.SETTINGS, "{")
    row = data()["runs"]["mine"]
    assert (row["owner"], row["settings"], row["script"]) == ("ana", {}, "(unknown)")
    assert len(row["steps"]) == 20


def test_unreadable_run_is_named(
    folders: Folders, data: Page, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine", "other"):
        folders.script(name)
    real = history_rows.sample

    def fails(storage: Any, *given: Any, **options: Any) -> Any:
        if storage.run_name == "mine":
            raise PermissionError("denied")
        return real(storage, *given, **options)

    monkeypatch.setattr(history_rows, "sample", fails)
    assert main(["history", "--local", "--no-browser"]) == 0
    assert "1 run without settings and curves, such as mine (denied)" in capsys.readouterr().err
    runs = data()["runs"]
    assert [len(runs[name]["steps"]) for name in ("mine", "other")] == [0, 20]


def test_newest_runs_with_the_commonest_loss_are_chosen(folders: Folders, data: Page) -> None:
    for number in range(7):
        folders.script(f"run-{number}", is_finished=False)
        folders.status(f"run-{number}", "finished", started=moment(number * DAY))
    folders.status("without-metrics", "finished", started=moment())
    page = data()
    assert page["metrics"][:2] == ["loss", "val_loss"]
    assert page["chosen"] == [f"run-{number}" for number in range(5)]
    assert list(page["runs"]) == ["without-metrics", *(f"run-{number}" for number in range(7))]


def test_named_runs_are_chosen_and_whole(folders: Folders, data: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second", "third"):
        folders.script(name, records=100)
    monkeypatch.setattr(history_rows, "POINTS_OF_ALL", 60)
    monkeypatch.setattr(history_rows, "FEWEST_POINTS", 10)
    page = data("third", "first")
    assert page["chosen"] == ["third", "first"]
    assert {name: len(run["steps"]) for name, run in page["runs"].items()} == {
        "first": 100,
        "second": 20,
        "third": 100,
    }


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((), {"today", "last-month", "old"}),
        (("--months", "1"), {"today"}),
        (("--months", "2"), {"today", "last-month"}),
        (("--months", "999999"), {"today", "last-month", "old"}),
        (("--since", "2026-10-01"), {"today", "last-month"}),
        (("--since", "2026-10-02"), {"today"}),
        (("--since", "2026-10-02", "old"), {"today", "old"}),
    ],
)
def test_runs_of_some_months(
    folders: Folders, data: Page, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], names: set[str]
) -> None:
    times = {"today": "2026-11-29T15:00", "last-month": "2026-10-01T00:00", "old": "2025-12-31T23:59"}
    for name, started in times.items():
        folders.status(name, "finished", started=f"{started}:00+00:00")
    begin = history._begin
    monkeypatch.setattr(history, "_begin", lambda now, *given: begin(now.replace(year=2026, month=11, day=29), *given))
    assert data(*flags)["runs"].keys() == names


def test_run_that_has_not_changed_since_is_not_read(folders: Folders, data: Page) -> None:
    folders.of("broken").write(layout.STATUS, "{")
    assert data("--since", "2026-01-01")["runs"].keys() == {"broken"}
    folders.age(20_000 * DAY, "broken/status.json")
    assert data("--since", "2026-01-01")["runs"] == {}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--months", "2", "--since", "2026-01-01"], "give one of them"),
        (["--since", "yesterday"], "yesterday"),
        (["--months", "0"], "0"),
        (["fisrt"], "did you mean first?"),
        (["first", "nowhere/page.html"], "nowhere is not a folder"),
        (["other.html"], "is not a page of this command"),
        (["folder.html"], "is not a page of this command"),
        (["page.html", "first"], "run 'page.html' not found"),
    ],
)
def test_refusals(folders: Folders, capsys: pytest.CaptureFixture[str], words: list[str], reason: str) -> None:
    folders.script("first")
    Path("other.html").write_text("mine")
    Path("folder.html").mkdir()
    assert main(["history", "--local", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1
    assert Path("other.html").read_text() == "mine"
    assert not Path("runs").exists()


def test_page_replaces_an_earlier_one(folders: Folders, data: Page, tmp_path: Path) -> None:
    assert data("page.html")["runs"] == {}
    folders.script("first")
    os.link("page.html", "copy.html")
    assert data("page.html")["runs"].keys() == {"first"}
    assert data_in((tmp_path / "copy.html").read_text())["runs"] == []


def test_names_lead_to_reports_of_this_user(
    folders: Folders, data: Page, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("copied", "stored", "without"):
        folders.script(name)
    folders.of("stored").write(layout.REPORT, "a report")
    assert main(["open", "--local", "--no-browser", "copied"]) == 0
    capsys.readouterr()
    Path("a %").mkdir()
    reports = {"copied": "copied/report.html", "stored": "../results/stored/report.html"}
    assert data()["reports"] == reports
    assert data("a %/page.html")["reports"] == {"stored": "../results/stored/report.html"}
    assert data("page.html")["reports"] == {"stored": "results/stored/report.html"}
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert data()["reports"] == {}


def test_path_is_printed_without_a_browser(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--local"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("runs/history.html\n")
    assert Path("runs/.gitignore").exists()


def test_bucket_is_enough(
    folders: Folders,
    data: Page,
    monkeypatch: pytest.MonkeyPatch,
    aws_variables: dict[str, str],
    s3_client: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**aws_variables, "RAY_ON_ECS_CLUSTER": f"s3://{BUCKET}"}.items():
        monkeypatch.setenv(name, value)
    in_bucket = Folders(f"s3://{BUCKET}/runs")
    in_bucket.script("of-the-page")
    in_bucket.status("of-the-page", "finished", owner="ana")
    assert main(["history", "--no-browser", "of-the-page"]) == 0
    assert "run states may be stale" in capsys.readouterr().err
    page = Path("runs/history.html").read_text()
    assert "<code>ray-on-ecs open RUN</code>" in page
    [row] = [run for run in data_in(page)["runs"] if run["name"] == "of-the-page"]
    assert (row["owner"], row["script"], len(row["steps"])) == ("ana", "train.py", 20)


# One of a snap can't read the files of the tests.
NAMES = ("chromium", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name)) and not path.startswith("/snap/")), None)


@pytest.mark.skipif(BROWSER is None, reason="chromium or google-chrome is not installed")
def test_browser_shows_table_curves_differences_and_cost(folders: Folders, data: Page, tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS.values()):
        folders.script(f"run-{number}", command=[text, "--lr", str(number)], is_finished=False)
        folders.status(f"run-{number}", text, owner=text, cost_usd=1.25)
    folders.status("unpaid", "training", cost_usd=None)
    data(*(f"run-{number}" for number in range(len(TEXTS))))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    address = (tmp_path / "runs/history.html").as_uri()
    done = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=120)
    page = Elements(done.stdout)
    assert {"img", "b"}.isdisjoint(page.tags)
    assert all(page.text.count(text) >= 8 for text in TEXTS.values())  # columns, filters, differences and cost
    assert page.text.count("1.25") >= 3 * len(TEXTS)
    assert f"{1.25 * len(TEXTS)} USD for the workers of the runs in the table; that of 1 is not known" in page.text
    paths = [value for name, value in page.attributes if name == "d"]
    assert len([path for path in paths if path.count("L") == 19]) == len(TEXTS)
    assert "--lr012345678" in page.text
