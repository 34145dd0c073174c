"""The command line `ray-on-ecs`: one module for each command."""

import os
import sys

if os.name != "posix":  # before imports that fail there
    print("ray-on-ecs: Windows is not supported; use macOS, Linux, or WSL on Windows", file=sys.stderr)
    sys.exit(2)
