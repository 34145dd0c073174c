"""Hangs of one rank: the sentence of `ray-on-ecs debug` names it.

usage: python -m drills.hangs [--ranks N] [CASE …]

Each case starts N ranks in gloo, of which one hangs, in turn another one.

Exit status: 0 if every one was named, else 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.hangs import CASES, hanging, sentence

SECONDS = 40.0


def main() -> int:
    """Run the cases; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, metavar="N")
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    args = parser.parse_args()
    failed = [case for number, case in enumerate(args.cases or CASES) if not _is_named(case, args.ranks, number)]
    print(f"not named: {', '.join(failed)}" if failed else "all named")
    return 1 if failed else 0


def _is_named(case: str, ranks: int, number: int) -> bool:
    began, odd = time.monotonic(), number % ranks
    with tempfile.TemporaryDirectory() as folder, hanging(case, ranks, odd, Path(folder)) as hang:
        try:
            said = hang.wait_for(sentence(case, ranks, odd), SECONDS)
        except TimeoutError as cause:
            print(f"{case}: {cause}", flush=True)
            return False
    print(f"{case} ({time.monotonic() - began:.0f} s): {said}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
