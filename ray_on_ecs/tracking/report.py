"""Report of a run: one HTML page in the run's folder that needs no other file.

It is built from the documents in the folder, so it can also be written for a run whose command was killed.
"""

from __future__ import annotations

import base64
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ray_on_ecs.errors import TrainingError, UsageError, one_line
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.tracking.cost import total_seconds, total_usd
from ray_on_ecs.tracking.end import End, at_end, end_in, steps
from ray_on_ecs.tracking.page import render_page
from ray_on_ecs.tracking.places import in_words, of_pool, places_in
from ray_on_ecs.tracking.records import read_records
from ray_on_ecs.tracking.shown_log import BAR, printable
from ray_on_ecs.tracking.slow_ranks import waits_in
from ray_on_ecs.tracking.starts import describe, starts_in

logger = logging.getLogger(__name__)

LOG_LINES = 100
LOG_BYTES = 2**18
MAX_TRIALS = 20
NOT_FINITE = "NaN"  # or infinite: a metric that JSON can't have, which is null there
MOMENTS = ("started", "updated", "script_start", "finished")
FAILURE = ("time", "what", "rank", "stacks")  # of the error's document
Document = Mapping[str, Any]
Rows = Sequence[tuple[str, Any]]
NO_METRICS = (
    "The script has reported none. With --metric 'loss=loss: {number}' before it, a run reads a number from its "
    "output, by the words on the line; ray_on_ecs.log(loss=…) reports one."
)


@dataclass(frozen=True)
class Documents:
    """Contents of a run's folder; a missing document is empty."""

    run_name: str
    uri: str
    settings: Document = field(default_factory=dict)
    status: Document = field(default_factory=dict)
    result: Document = field(default_factory=dict)
    error: Document = field(default_factory=dict)
    metrics: Sequence[Document] = ()
    trials: Document = field(default_factory=dict)
    curves: bytes = b""
    log: Sequence[str] = ()

    @property
    def state(self) -> str:
        """State of the run according to its documents."""
        if self.result:
            return "finished"
        if self.status:
            return self.status["state"]
        return "failed" if self.error else "unfinished"


def write_report(storage: RunStorage) -> None:
    """Write the report of a run into its folder; a failure costs one line."""
    try:
        storage.write(layout.REPORT, render(read_documents(storage)))
    except Exception as cause:
        logger.warning(f"{layout.REPORT} could not be written ({one_line(cause)})")


def render_here(storage: RunStorage) -> bytes:
    """Return the report of a run as this program renders it: the one in its folder may be a page of others.

    OSError if the folder can't be read, UsageError if a document in it is broken.
    """
    try:
        return render(read_documents(storage)).encode()
    except (OSError, TrainingError):
        raise
    except Exception as cause:  # such as a document without what the report shows
        raise UsageError(f"the report of run {storage.run_name} can't be made ({one_line(repr(cause))})") from cause


def read_documents(storage: RunStorage) -> Documents:
    """Read the documents of a report."""
    return Documents(
        run_name=storage.run_name,
        uri=storage.uri,
        settings=storage.read_settings(),
        status=storage.read_json(layout.STATUS) or {},
        result=storage.read_json(layout.RESULT) or {},
        error=storage.read_json(layout.ERROR) or {},
        metrics=read_records(storage),
        trials=storage.read_json(layout.TRIALS) or {},
        curves=storage.read(layout.CURVES) if storage.exists(layout.CURVES) else b"",
        log=_read_log(storage),
    )


def render(documents: Documents) -> str:
    """Return the report as HTML."""
    result, status = documents.result, documents.status
    given = documents.settings
    others = {name: value for name, value in (result.get("config") or {}).items() if name not in given}
    sections = {
        "Hardware": result.get("hardware") or {},
        "Pool": {"chosen": of_pool(result or status, "reason")},
        "Times": result.get("times") or {name: status[name] for name in ("started", "updated") if status},
        "Cost": _cost(result.get("cost") or status),
        "Versions": result.get("versions") or {},
        "Starts": {_moment(start["requested"]): describe(start) for start in starts_in(result or status)},
        "Restarts": _restarts(result or status),
        "Slow ranks": {_moment(each["since"]): each["what"] for each in (result or status).get("slow") or ()},
        "Waits in collectives": waits_in(result or status),
        "Failure": {name: documents.error.get(name) for name in FAILURE if documents.state == "failed"},
    }
    usd = total_usd(status, result)
    end = end_in({} if result else status, is_training=documents.state == "training")
    facts = {
        "command": shlex.join(given.get("command", ())) or None,
        "workers": (result.get("hardware") or status).get("workers"),
        "pool": in_words(places_in(result or status)) or None,
        "time_seconds": total_seconds(status, result),
        "cost": None if usd is None else _usd(usd) + (at_end(end) if end else ""),
        "restarts": len((result or status).get("restarts") or ()) or None,
    }
    last: dict[str, Any] = {}  # value of each metric
    for record in documents.metrics:
        last |= record
    trials = documents.trials
    return render_page(
        "report.html.j2",
        name=documents.run_name,
        uri=documents.uri,
        state=documents.state,
        outcome=_outcome(documents, end),
        command=None if result else (status or documents.error).get("next"),
        is_under_way=documents.state in layout.UNDER_WAY,
        url=layout.page_url(status.get("url")),
        facts=_rows(facts),
        curves=base64.b64encode(documents.curves).decode(),
        metrics=[(_words(name), _metric(value)) for name, value in last.items() if name != "time"],
        hint="" if last or trials or not status else NO_METRICS,
        trials=_trials(trials),
        more_trials=max(len(trials) - MAX_TRIALS, 0),
        changed=[(_words(name), _setting(value)) for name, value in given.items()],
        defaults=[(_words(name), _setting(value)) for name, value in others.items()],
        sections=[(title, rows) for title, document in sections.items() if (rows := _rows(document))],
        log=documents.log,
    )


def _read_log(storage: RunStorage) -> list[str]:
    """Return the last lines of the newest log."""
    sizes = storage.file_sizes(layout.LOGS)
    if not sizes:
        return []
    newest = max(sizes)
    with storage.open_reader(f"{layout.LOGS}/{newest}") as stream:
        stream.seek(max(sizes[newest] - LOG_BYTES, 0))
        text = stream.read().decode(errors="replace")
    lines = [printable(line) for line in text.removesuffix("\n").split("\n")]
    return [line for line in lines if not BAR.search(line)][-LOG_LINES:]


def _outcome(documents: Documents, end: End | None) -> str:
    """Return the line after the state: last metrics, error or position; empty if none of them is known."""
    status = documents.status
    if documents.result:
        metrics = documents.result["metrics"] or {}
        logged = [(name, value) for name, value in metrics.items() if name not in ("step", "time")]
        return ", ".join(f"{_words(name)} {_metric(value)}" for name, value in logged)
    if documents.state in ("failed", "limit"):
        return status.get("error") or documents.error.get("what") or ""
    if not status:
        return ""
    position = [f"after {steps(end)}"] if end else []
    if documents.state != "interrupted":  # of a killed command, the state in the document is an old one
        position.append(f"last update {_moment(status['updated'])}")
    return "; ".join(position)


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _trials(trials: Document) -> Sequence[Sequence[str]]:
    """Return a table of the first trials of Ray Tune: its headings and rows; empty without trials.

    They are in Ray Tune's order: it does not pass its callbacks the metric that ranks them.
    """
    if not trials:
        return []
    parameters: dict[str, Any] = {}  # as an ordered set
    metrics: dict[str, Any] = {}
    for trial in trials.values():
        parameters |= trial["config"]
        metrics |= trial["metrics"]
    table = [["trial", "status", *map(_words, (*parameters, *metrics))]]
    for name, trial in list(trials.items())[:MAX_TRIALS]:
        row = [name, trial["status"].lower()]
        for columns, values in ((parameters, trial["config"]), (metrics, trial["metrics"])):
            row += [_shown(values[column]) if column in values else "" for column in columns]
        table.append(row)
    return table


def _restarts(document: Document) -> Document:
    """Return the cause of each restart by its time, with what was kept."""
    rows = {}
    for restart in document.get("restarts") or ():
        kept = f"; newest kept file: {restart['kept']}" if restart["kept"] else ""
        rows[_moment(restart["time"])] = f"{restart['cause']}{kept}"
    return rows


def _cost(document: Document) -> Document:
    """Return the hours and price of each kind of instance, and the total, from `result.json` or `status.json`."""
    if not document.get("instances"):
        return {}
    rows: dict[str, str] = {}
    for instance in document["instances"]:
        hours, hourly_usd = instance["hours"], instance["hourly_usd"]
        cost = f"{hours:.2f} h at {hourly_usd:.4g} USD: {_usd(hours * hourly_usd)}"
        place = ", ".join(places_in({"instances": [instance]}).pools or ())
        rows[", ".join(filter(None, (instance["instance_type"], instance["market"], place)))] = cost
    rows["total"] = _usd(document["usd"] if "usd" in document else document["cost_usd"])  # that of a status
    if document.get("on_demand_usd") is not None:
        rows["on demand"] = _usd(document["on_demand_usd"])
    return rows


def _rows(document: Document) -> Rows:
    """Return a table of a document's values: seconds as durations, and the moments of a run without fractions."""
    rows = []
    for name, value in document.items():
        if name in MOMENTS and value is not None:
            value = _moment(value)
        elif name.endswith("_seconds") and value is not None:
            name = name.removesuffix("_seconds")
            value = f"{value:.1f} s" if value < 60 else timedelta(seconds=round(value))
        if value is not None:
            rows.append((_words(name), _shown(value)))
    return rows


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _metric(value: Any) -> str:
    return NOT_FINITE if value is None else _shown(value)


def _usd(value: float) -> str:
    return f"{value:.2f} USD"


def _moment(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
