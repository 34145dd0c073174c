"""`python -m ray_on_ecs`: the command `ray-on-ecs`."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder: the user's modules must not hide Ray's and ours

from ray_on_ecs.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
