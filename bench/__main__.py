"""All benchmarks in one run, on one machine, in one table.

usage: python -m bench [--data-dir FOLDER] [--seeds N] [--only NAME …]

The images are 12,000 made of Fashion-MNIST's (fashion.py): from a folder with its four IDX files, or a download. The
results go to bench/results/ as well. Exit status: 0 measured, 1 a training failed, 2 there are no images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench import choices, fashion, goal, gpu, input, report, runs, saving, scaling, startup, watching, wire
from bench.report import Finding
from bench.runs import Bench, BenchmarkError
from training.errors import UsageError


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Speed, beside a plain loop's.")
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST's IDX files (default: a download)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default: 3)")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), help="default: all")
    arguments = parser.parse_args()
    try:
        dataset = fashion.make(arguments.data_dir)
    except UsageError as error:
        reason = str(error) if arguments.data_dir else "Fashion-MNIST can't be downloaded; give --data-dir FOLDER"
        print(f"bench: {reason}", file=sys.stderr)
        return error.exit_status
    try:
        with runs.prepared(dataset, tuple(range(max(arguments.seeds, 1))), Console(stderr=True)) as bench:
            return _measure(bench, arguments.only)
    except BenchmarkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def _measure(bench: Bench, names: list[str]) -> int:
    data = f"{len(bench.dataset.train):,} training and {len(bench.dataset.test):,} test images made of Fashion-MNIST's"
    documents = []
    for name in names:
        documents.append(report.document(name, BENCHMARKS[name](bench), bench.seeds, data))
        report.write(documents[-1], list(BENCHMARKS))  # what is measured stays, whatever comes of the next
    Console().print(report.table(documents))
    return 0


def _trainings(bench: Bench) -> list[Finding]:
    """The benchmarks that look at the same trainings."""
    found, ours = goal.measure(bench)
    return [*found, *wire.measure(bench, ours), *watching.measure(bench, ours[0])]


BENCHMARKS: dict[str, Callable[[Bench], list[Finding]]] = {
    "goal": _trainings,
    "input": input.measure,
    "scaling": scaling.measure,
    "startup": startup.measure,
    "saving": saving.measure,
    "choices": choices.measure,
    "gpu": gpu.measure,
}

if __name__ == "__main__":
    sys.exit(main())
