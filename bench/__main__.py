"""All benchmarks, on one machine, in one table.

usage: python -m bench [--data-dir FOLDER] [--seeds N] [--only NAME …]

The results are also written to bench/results/. Exit status: 0 measured, 1 a training failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from bench import checkpointer, gpu, harness, preprocess, report, slow_ranks, startup, time_to_accuracy, transfer
from bench.harness import Bench, BenchmarkError
from bench.report import Comparison


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Compare our training with a plain loop.")
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST's IDX files (default: a download)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default: 3)")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), help="default: all")
    arguments = parser.parse_args()
    try:
        with harness.prepared(arguments.data_dir, tuple(range(max(arguments.seeds, 1))), Console(stderr=True)) as bench:
            return _measure(bench, arguments.only)
    except BenchmarkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def _measure(bench: Bench, names: list[str]) -> int:
    documents = {}
    for name in names:
        comparisons: list[Comparison] = []
        for comparison in BENCHMARKS[name](bench):
            comparisons.append(comparison)
            # Results are kept, even if the next measurement fails.
            documents[name] = report.document(name, comparisons, bench.seeds)
            report.write(documents[name], list(BENCHMARKS))
    Console().print(report.table(list(documents.values())))
    return 0


BENCHMARKS: dict[str, Callable[[Bench], Iterable[Comparison]]] = {
    "time_to_accuracy": time_to_accuracy.measure,
    "startup": startup.measure,
    "checkpointer": checkpointer.measure,
    "preprocess": preprocess.measure,
    "transfer": transfer.measure,
    "slow_ranks": slow_ranks.measure,
    "gpu": gpu.measure,
}

if __name__ == "__main__":
    sys.exit(main())
