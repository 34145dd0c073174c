"""The results of a benchmark: a row of the table per comparison, and a JSON document with everything it depends on."""

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
# Flags of /proc/cpuinfo that say whether the CPU computes in bf16.
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Target:
    """A target for a ratio.

    Attributes:
        text: The target, such as `at least 3`.
        reached: True if the ratio reaches it; None without a measurement.
    """

    text: str
    reached: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Measurement of ours and of a reference.

    Attributes:
        name: The measured quantity.
        reference: The reference's number, with its unit.
        ours: Our number, with its unit.
        ratio: How many times better ours is, or another number that `target` is about; None if not measured.
        target: The target for the ratio, if there is one.
        n: The number of measurements of each.
        note: Conditions, and what was tried if the target was missed.
        data: The measurements.
    """

    name: str
    reference: str
    ours: str
    ratio: float | None
    target: Target | None = None
    n: int = 1
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        """True if the target is reached; None without a target or a ratio."""
        return self.target.reached if self.target else None


def at_least(ratio: float, limit: float) -> Target:
    """Return the target of a ratio that must not be smaller than `limit`."""
    return Target(f"at least {limit:g}", ratio >= limit)


def at_most(ratio: float, limit: float, unit: str = "") -> Target:
    """Return the target of a ratio that must not be larger than `limit`."""
    return Target(f"at most {limit:g}{unit}", ratio <= limit)


def spread(values: Sequence[float]) -> str:
    """Format the median and the range."""
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def number(value: float) -> str:
    """Format three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def document(name: str, comparisons: Sequence[Comparison], seeds: Sequence[int]) -> dict[str, Any]:
    """Return the comparisons of a benchmark with the hardware, versions and seeds that they depend on."""
    packages = {package: metadata.version(package) for package in PACKAGES}
    return {
        "benchmark": name,
        "hardware": {
            "machine": platform.machine(),
            "cpu": cpu_model(_cpu_info()),
            "cpu_bf16": any(flag in _cpu_info().get("flags", "").split() for flag in BF16_FLAGS),
            "cpus": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
        "versions": {"python": platform.python_version(), **packages},
        "seeds": list(seeds),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }


def write(document: dict[str, Any], order: Sequence[str]) -> None:
    """Write the document to bench/results/, and a table of all documents there, in this order of their names."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{document['benchmark']}.json").write_text(json.dumps(document, indent=2) + "\n")
    paths = [RESULTS / f"{name}.json" for name in order]
    with (RESULTS / "table.txt").open("w") as file:
        Console(file=file, width=160).print(table([json.loads(path.read_text()) for path in paths if path.exists()]))


def table(documents: Sequence[dict[str, Any]]) -> Table:
    """Build a table of all comparisons, captioned with the machines and versions that they were measured on."""
    seeds = dict.fromkeys(f"seeds {', '.join(map(str, document['seeds']))}" for document in documents)
    environments = dict.fromkeys(_environment(document) for document in documents)
    shown = Table(title="; ".join(seeds), caption="\n".join(environments), show_lines=True)
    for heading in ("comparison", "reference", "ours", "ratio", "target", "n", "note"):
        shown.add_column(heading, justify="right" if heading in ("ratio", "n") else "left")
    for document in documents:
        for row in document["comparisons"]:
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3g}"
            outcome = _outcome(row["target"])
            shown.add_row(row["name"], row["reference"], row["ours"], ratio, outcome, str(row["n"]), row["note"])
    return shown


def cpu_model(info: dict[str, str]) -> str:
    """Return the CPU's name, with its family and model: clouds often hide the name.

    Args:
        info: The fields of a processor in /proc/cpuinfo; empty on other systems.
    """
    if "model name" not in info:
        return platform.processor()
    return f"{info['model name']}, family {info.get('cpu family', '?')} model {info.get('model', '?')}"


def _cpu_info() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    first = path.read_text().partition("\n\n")[0] if path.exists() else ""
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _outcome(target: dict[str, Any] | None) -> str:
    if target is None:
        return ""
    if target["reached"] is None:
        return target["text"]
    return target["text"] + (": [green]reached[/]" if target["reached"] else ": [red]missed[/]")


def _environment(document: dict[str, Any]) -> str:
    machine, versions = document["hardware"], document["versions"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    hardware = f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['memory_gib']} GiB, {gpus}"
    return f"{document['at'][:10]}, {hardware}; {', '.join(f'{name} {version}' for name, version in versions.items())}"
