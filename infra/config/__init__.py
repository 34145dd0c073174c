"""Arguments of a cluster, pre-flight checks against AWS, and the plan that follows from both.

Only this package reads the stack's configuration, and components do not import it. args.py declares the arguments.
"""

from infra.config.args import RayClusterArgs

__all__ = ["RayClusterArgs"]
