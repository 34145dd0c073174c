"""All benchmarks, on one machine, in one table.

usage: python -m bench [--data-dir FOLDER] [--seeds N] [--only NAME …]

The data are 12,000 images made from Fashion-MNIST (fashion_variant.py): from a folder with its four IDX files, or from
a download. The results are also written to bench/results/. Exit status: 0 measured, 1 a training failed, 2 there are no
images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console

from bench import (
    ablations,
    checkpointer,
    checkpointing,
    data_loading,
    fashion_variant,
    gpu,
    gradient_traffic,
    harness,
    helpers,
    preprocess,
    report,
    scaling,
    startup,
    time_to_accuracy,
    timing_overhead,
)
from bench.harness import Bench, BenchmarkError
from bench.report import Comparison
from ray_on_ecs.errors import UsageError


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Compare our training with a plain loop.")
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST's IDX files (default: a download)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default: 3)")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), help="default: all")
    arguments = parser.parse_args()
    try:
        dataset = fashion_variant.make(arguments.data_dir)
    except UsageError as error:
        reason = str(error) if arguments.data_dir else "Fashion-MNIST can't be downloaded; give --data-dir FOLDER"
        print(f"bench: {reason}", file=sys.stderr)
        return error.exit_status
    try:
        with harness.prepared(dataset, tuple(range(max(arguments.seeds, 1))), Console(stderr=True)) as bench:
            return _measure(bench, arguments.only)
    except BenchmarkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def _measure(bench: Bench, names: list[str]) -> int:
    data = f"{len(bench.dataset.train):,} training and {len(bench.dataset.test):,} test images made from Fashion-MNIST"
    documents = {}
    for name in names:
        comparisons: list[Comparison] = []
        for each in BENCHMARKS[name](bench):
            comparisons.append(each)
            # What is measured is kept, even if the next measurement fails.
            documents[name] = report.document(name, comparisons, bench.seeds, data)
            report.write(documents[name], list(BENCHMARKS))
    Console().print(report.table(list(documents.values())))
    return 0


def _trainings(bench: Bench) -> Iterator[Comparison]:
    """Run the benchmarks that use the same trainings."""
    comparisons, ours = time_to_accuracy.measure(bench)
    yield from comparisons
    yield from gradient_traffic.measure(bench, ours)
    yield from timing_overhead.measure(bench, ours[0])


BENCHMARKS: dict[str, Callable[[Bench], Iterable[Comparison]]] = {
    "time_to_accuracy": _trainings,
    "data_loading": data_loading.measure,
    "scaling": scaling.measure,
    "startup": startup.measure,
    "checkpointing": checkpointing.measure,
    "checkpointer": checkpointer.measure,
    "ablations": ablations.measure,
    "helpers": helpers.measure,
    "preprocess": preprocess.measure,
    "gpu": gpu.measure,
}

if __name__ == "__main__":
    sys.exit(main())
