"""The report of a run: one page of HTML in its folder that can be read when nothing else of the run is left.

It is made of the documents in the folder alone, so it can also be made for a run whose command was killed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ray_on_ecs.errors import one_line
from ray_on_ecs.tracking import layout
from ray_on_ecs.tracking.records import read_records
from ray_on_ecs.tracking.storage import RunStorage
from ray_on_ecs.tracking.totals import total_seconds, total_usd

TEMPLATE = Path(__file__).with_name("report.html.j2")
LOG_LINES = 100
LOG_BYTES = 2**18
MAX_TRIALS = 20
# Escape sequences of a terminal, and other characters that no page may have.
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
Document = dict[str, Any]
Rows = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Documents:
    """What the folder of a run holds; None, or nothing, where it lacks something.

    Attributes:
        run_name: The run.
        uri: Its folder.
        settings: The settings in `config.json`.
        status: `status.json`.
        result: `result.json`.
        error: `error.json`.
        metrics: The lines of `metrics.jsonl`.
        curves: The picture of the metrics, a PNG.
        log: The last lines of the newest log.
    """

    run_name: str
    uri: str
    settings: Document | None = None
    status: Document | None = None
    result: Document | None = None
    error: Document | None = None
    metrics: Sequence[Document] = ()
    trials: Document | None = None
    curves: bytes | None = None
    log: Sequence[str] = ()

    @property
    def state(self) -> str:
        """How the run is doing, as far as the documents say."""
        if self.result:
            return "finished"
        if self.status:
            return self.status["state"]
        return "failed" if self.error else "unfinished"


def try_write_report(storage: RunStorage, say: Callable[[str], None]) -> None:
    """Write the report of a run; if that fails, say so and go on."""
    try:
        write_report(storage)
    except Exception as cause:
        say(f"{layout.REPORT} could not be written ({one_line(cause)})")


def write_report(storage: RunStorage) -> None:
    """Write the report of a run into its folder.

    Raises:
        OSError: The folder can't be read or written.
        UsageError: A document in it is broken.
    """
    storage.write(layout.REPORT, render(read_documents(storage)))


def read_documents(storage: RunStorage) -> Documents:
    """Read what a report shows.

    Raises:
        OSError: The folder can't be read.
        UsageError: A document in it is broken.
    """
    settings = storage.read_json(layout.SETTINGS)
    return Documents(
        run_name=storage.run_name,
        uri=storage.uri,
        settings=settings and settings["settings"],
        status=storage.read_json(layout.STATUS),
        result=storage.read_json(layout.RESULT),
        error=storage.read_json(layout.ERROR),
        metrics=read_records(storage),
        trials=storage.read_json(layout.TRIALS),
        curves=_read(storage, layout.CURVES),
        log=_read_log(storage),
    )


def render(documents: Documents) -> str:
    """Return the report, a page of HTML that needs nothing else."""
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = template.from_string(TEMPLATE.read_text())
    changed, defaults = _settings(documents)
    return page.render(
        name=documents.run_name,
        uri=documents.uri,
        state=documents.state,
        outcome=_outcome(documents),
        command=None if documents.result else (documents.status or documents.error or {}).get("next"),
        is_under_way=documents.state in layout.UNDER_WAY,
        url=(documents.status or {}).get("url"),
        facts=_facts(documents),
        curves=documents.curves and base64.b64encode(documents.curves).decode(),
        metrics=_metrics(documents),
        trials=_trials(documents.trials or {}),
        more_trials=max(len(documents.trials or {}) - MAX_TRIALS, 0),
        changed=changed,
        defaults=defaults,
        sections=[each for each in _sections(documents) if each[1]],
        log=documents.log,
    )


def _read(storage: RunStorage, name: str) -> bytes | None:
    try:
        return storage.read(name)
    except FileNotFoundError:
        return None


def _read_log(storage: RunStorage) -> list[str]:
    """Return the last lines of the newest log."""
    sizes = storage.file_sizes(layout.LOGS)
    if not sizes:
        return []
    newest = max(sizes)
    with storage.open_reader(f"{layout.LOGS}/{newest}") as stream:
        stream.seek(max(sizes[newest] - LOG_BYTES, 0))
        text = stream.read().decode(errors="replace")
    return [CONTROLS.sub("", line) for line in text.removesuffix("\n").split("\n")[-LOG_LINES:]]


def _outcome(documents: Documents) -> str:
    """Return on one line what has come of the run, beside its state; empty if nothing more is known."""
    result, status, error = documents.result, documents.status or {}, documents.error or {}
    if result:
        return _last_metrics(result)
    if documents.state == "failed":
        return status.get("error") or error.get("what") or ""
    if documents.state == "interrupted":
        return _position(status)
    if not status:
        return ""
    return "; ".join(filter(None, (_position(status), f"last heard of at {_moment(status['updated'])}")))


def _last_metrics(result: Document) -> str:
    """Return what the script has logged last."""
    logged = {name: value for name, value in (result["metrics"] or {}).items() if name not in ("step", "time")}
    return ", ".join(f"{_words(name)} {_shown(value)}" for name, value in logged.items())


def _position(status: Document) -> str:
    return f"after step {status['step']:,}" if status["step"] is not None else ""


def _facts(documents: Documents) -> Rows:
    """Return the few numbers at the top of the report."""
    status, result = documents.status or {}, documents.result or {}
    facts = {
        "what": " ".join((documents.settings or {}).get("command", ())) or None,
        "workers": (result.get("hardware") or status).get("workers"),
        "time": _duration(total_seconds(status, result)),
        "cost": _usd(total_usd(status, result)),
    }
    return [(name, value) for name, value in facts.items() if value is not None]


def _settings(documents: Documents) -> tuple[Rows, Rows]:
    """Return the settings that the user has given, and the others."""
    settings = {name: _setting(value) for name, value in (documents.settings or {}).items()}
    given = (documents.status or {}).get("changed", settings)
    changed = [(_words(name), value) for name, value in settings.items() if name in given]
    return changed, [(_words(name), value) for name, value in settings.items() if name not in given]


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _metrics(documents: Documents) -> Rows:
    """Return the last value of each metric."""
    last = {name: each[name] for each in documents.metrics for name in each if name != "time"}
    return [(_words(name), _shown(value)) for name, value in last.items()]


def _trials(trials: Document) -> Sequence[Sequence[str]]:
    """Return a table of the first trials of Ray Tune: its headings, and their rows; nothing if there are none.

    Which are the best only the program knows: Ray Tune does not tell its callbacks the metric.
    """
    parameters = list(dict.fromkeys(name for each in trials.values() for name in each["config"]))
    metrics = list(dict.fromkeys(name for each in trials.values() for name in each["metrics"]))
    rows = [
        [
            trial,
            each["status"].lower(),
            *("" if name not in each["config"] else _shown(each["config"][name]) for name in parameters),
            *("" if name not in each["metrics"] else _shown(each["metrics"][name]) for name in metrics),
        ]
        for trial, each in [*trials.items()][:MAX_TRIALS]
    ]
    return [["trial", "status", *map(_words, (*parameters, *metrics))], *rows] if rows else []


def _sections(documents: Documents) -> Sequence[tuple[str, Rows]]:
    result, status = documents.result or {}, documents.status or {}
    return [
        ("Hardware", _rows(result.get("hardware"))),
        ("Times", _times(documents)),
        ("Cost", _cost(result.get("cost") or status)),
        ("Versions", _rows(result.get("versions"))),
        ("Failure", _failure(documents)),
    ]


def _rows(document: Document | None) -> Rows:
    return [(_words(name), _shown(value)) for name, value in (document or {}).items() if value is not None]


def _times(documents: Documents) -> Rows:
    if documents.result:
        times = documents.result["times"].items()
        return [
            (_words(name.removesuffix("_seconds")), _duration(value) if name.endswith("_seconds") else _moment(value))
            for name, value in times
        ]
    names = ("started", "updated") if documents.status else ()
    return [(name, _moment((documents.status or {})[name])) for name in names]


def _cost(document: Document) -> Rows:
    """Return the hours of each kind of instance, and the sum."""
    instances = document.get("instances")
    if not instances:
        return ()
    kinds = [
        (
            f"{each['instance_type']}, {each['market']}",
            f"{each['hours']:.2f} h at {each['hourly_usd']:.4g} USD: {_usd(each['hours'] * each['hourly_usd'])}",
        )
        for each in instances
    ]
    on_demand = document.get("on_demand_usd")
    would = [("the same on demand", _usd(on_demand))] if on_demand is not None else []
    return [*kinds, ("in all", _usd(document.get("usd", document.get("cost_usd")))), *would]


def _failure(documents: Documents) -> Rows:
    error = documents.error if documents.state == "failed" else None
    shown = ("time", "what", "rank", "stacks")
    return [(name, _shown(error[name])) for name in shown if error.get(name) is not None] if error else ()


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "none" if value is None else str(value)


def _usd(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f} USD"


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _moment(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
