"""Slow ranks: train on Gloo with one slow rank, which must be named, and without one, when nothing may be said.

usage: python -m drills.slow_ranks [--ranks N] [--seconds S] [CASE …]

Exit status: 0 if all is as it should be, else 1. A case takes two minutes, and wants two cores for itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.slow_rank_run import run

SLOW = (
    *("loader", "hog", "batch", "garbage", "throttled", "forward", "backward", "logging", "disk", "checkpoint"),
    *("sharded loader", "tensor parallel loader"),
)
HEALTHY = (
    *("plain", "jitter", "one at random", "validation", "one pause", "forks", "barriers", "groups", "pipeline"),
    *("tensor parallel", "sharded", "loader processes", "alone"),
)


def main() -> int:
    """Run the cases; return the exit status."""
    parser = argparse.ArgumentParser(description="Slow ranks, which must be named, and healthy ones.")
    parser.add_argument("cases", nargs="*", default=[*SLOW, *HEALTHY], metavar="CASE", help=", ".join(SLOW + HEALTHY))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    are_right = [_is_right(case, options.ranks, options.seconds) for case in options.cases]
    print(f"{sum(are_right)} of {len(are_right)} as they should be")
    return 0 if all(are_right) else 1


def _is_right(case: str, ranks: int, seconds: float) -> bool:
    """Run a case, and print its outcome; return whether the right rank was named, or none in a healthy run."""
    slow = ranks // 2
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(case, Path(folder), count=ranks, slow=slow, seconds=seconds)
    said = [each["what"] for each in outcome.times]
    is_right = not any(outcome.statuses)
    if case in SLOW:
        is_right &= bool(said) and all(what.startswith(f"rank {slow} ") for what in said)
    else:
        is_right &= not said
    waits = " ".join(f"{each['share']:.2f}" for each in outcome.waits)
    ends = "right" if is_right else "WRONG"
    print(f"{ends}: {case}: {'; '.join(said) or 'nothing'} (waits {waits}, load {os.getloadavg()[0]:.0f})", flush=True)
    return is_right


if __name__ == "__main__":
    sys.exit(main())
