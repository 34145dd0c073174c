"""Arguments of a cluster, pre-flight checks against AWS, and the plan that follows from both.

Only this package reads the stack's configuration, and components do not import it. args.py declares the arguments.
"""

from __future__ import annotations

from infra.config.args import RayClusterArgs
from infra.config.identity import check_identity, check_new, identity_of
from infra.config.location import check_zone
from infra.config.plan import Plan, make_plan
from infra.config.runs import announce_runs
from infra.config.services import end_services, start_head

__all__ = [
    "Plan",
    "RayClusterArgs",
    "announce_runs",
    "check_identity",
    "check_new",
    "check_zone",
    "end_services",
    "identity_of",
    "make_plan",
    "start_head",
]
