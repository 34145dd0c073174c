"""The settings of the recipe; without torch, so that a laptop can check them.

`python -m training.recipes.settings FLAGS` checks them and prints the run's name, storage path and workers.
"""

from __future__ import annotations

import json
import sys

from ray_on_ecs.command import exit_status
from ray_on_ecs.config import parse
from training.recipes.language.config import LanguageConfig


def main() -> int:
    """Check the flags of a command line; returns the exit status."""

    def check() -> int:
        flags = sys.argv[1:]
        config = parse(LanguageConfig, flags).resolve_defaults()
        typed = parse(LanguageConfig, flags, {})
        workers = config.workers[0] if config.workers else 0
        print(json.dumps({"run_name": config.run_name, "storage_path": typed.storage_path, "workers": workers}))
        return 0

    return exit_status(check, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
