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


def hardware() -> dict[str, Any]:
    """The machine."""
    return {
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str]:
    """What ran."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def write(name: str, findings: Sequence[Finding], seeds: Sequence[int], data: str) -> Path:
    """Write the findings of a benchmark to bench/results/."""
    document = {
        "benchmark": name,
        "hardware": hardware(),
        "versions": versions(),
        "data": data,
        "seeds": list(seeds),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "findings": [asdict(each) for each in findings],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def write_table(shown: Table) -> None:
    """Write the table of all benchmarks beside their results."""
    with (RESULTS / "table.txt").open("w") as file:
        Console(file=file, width=160).print(shown)


def table(findings: Sequence[Finding], seeds: Sequence[int], data: str) -> Table:
    """All findings as people read them."""
    machine = hardware()
    gpus = f", {' '.join(machine['gpus'])}" if machine["gpus"] else ", no GPU"
    title = f"{data}; seeds {', '.join(map(str, seeds))}"
    ran_on = f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['memory_gib']} GiB{gpus}; " + ", ".join(
        f"{name} {version}" for name, version in versions().items()
    )
    shown = Table(title=title, caption=ran_on, show_lines=True)
    for heading in ("what", "reference", "ours", "ratio", "wanted", "n", "note"):
        shown.add_column(heading, justify="right" if heading in ("ratio", "n") else "left")
    for each in findings:
        ratio = "-" if each.ratio is None else f"{each.ratio:.3g}"
        wanted = each.target + {True: ": [green]yes[/]", False: ": [red]no[/]", None: ""}[each.reached]
        shown.add_row(each.name, each.reference, each.ours, ratio, wanted, str(each.n), each.note)
    return shown


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
