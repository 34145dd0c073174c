"""`python -m ray_on_ecs`: the command `ray-on-ecs`."""

import sys

from ray_on_ecs.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
