"""What a benchmark found: a line of the table each, and all of it as JSON with what it depends on."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torchvision", "ray", "numpy")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One comparison.

    Attributes:
        name: What is compared.
        reference: The reference's number, with its unit.
        ours: Ours.
        ratio: How many times better ours is, or whatever `target` is about; None where nothing could be measured.
        target: What is wanted of the ratio, as people read it; empty where nothing is.
        reached: Whether it is; None where nothing is wanted or nothing could be measured.
        n: How often each was measured.
        note: What else should be known, and what was tried where the target is not reached.
        data: The measurements themselves.
    """

    name: str
    reference: str
    ours: str
    ratio: float | None
    target: str = ""
    reached: bool | None = None
    n: int = 1
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def at_least(ratio: float, wanted: float) -> dict[str, Any]:
    """The fields of a finding whose ratio should be so large."""
    return {"ratio": ratio, "target": f"at least {wanted:g}", "reached": ratio >= wanted}


def at_most(ratio: float, wanted: float, unit: str = "") -> dict[str, Any]:
    """The fields of a finding whose ratio should be so small."""
    return {"ratio": ratio, "target": f"at most {wanted:g}{unit}", "reached": ratio <= wanted}


def spread(values: Sequence[float]) -> str:
    """The median, and the least and greatest."""
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def number(value: float) -> str:
    """Three digits that count, and all of a large number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def document(name: str, findings: Sequence[Finding], seeds: Sequence[int], data: str) -> dict[str, Any]:
    """The findings of a benchmark with all that they depend on."""
    packages = {package: metadata.version(package) for package in PACKAGES}
    return {
        "benchmark": name,
        "hardware": {
            "machine": platform.machine(),
            "cpu": _cpu(),
            "cpus": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())],
        },
        "versions": {"python": platform.python_version(), **packages},
        "data": data,
        "seeds": list(seeds),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "findings": [asdict(each) for each in findings],
    }


def write(document: dict[str, Any], order: Sequence[str]) -> None:
    """Write the document to bench/results/, and a table of all that are there, in this order of their names."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{document['benchmark']}.json").write_text(json.dumps(document, indent=2) + "\n")
    paths = [path for name in order if (path := RESULTS / f"{name}.json").exists()]
    with (RESULTS / "table.txt").open("w") as file:
        Console(file=file, width=160).print(table([json.loads(path.read_text()) for path in paths]))


def table(documents: Sequence[dict[str, Any]]) -> Table:
    """All findings as people read them, and below them what they were measured on."""
    data = dict.fromkeys(f"{each['data']}, seeds {', '.join(map(str, each['seeds']))}" for each in documents)
    ran_on = dict.fromkeys(_ran_on(each) for each in documents)
    shown = Table(title="; ".join(data), caption="\n".join(ran_on), show_lines=True)
    for heading in ("what", "reference", "ours", "ratio", "wanted", "n", "note"):
        shown.add_column(heading, justify="right" if heading in ("ratio", "n") else "left")
    for found in (each for document in documents for each in document["findings"]):
        ratio = "-" if found["ratio"] is None else f"{found['ratio']:.3g}"
        wanted = found["target"] + {True: ": [green]yes[/]", False: ": [red]no[/]", None: ""}[found["reached"]]
        compared = (found[name] for name in ("name", "reference", "ours"))
        shown.add_row(*compared, ratio, wanted, str(found["n"]), found["note"])
    return shown


def _ran_on(document: dict[str, Any]) -> str:
    machine, versions = document["hardware"], document["versions"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    ran_on = f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['memory_gib']} GiB, {gpus}"
    return f"{document['at'][:10]}, {ran_on}; {', '.join(f'{name} {version}' for name, version in versions.items())}"


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
