"""Name prefixes in the characters and lengths that AWS accepts."""

from __future__ import annotations

import re

import pytest

from infra.ray_cluster import _singular as singular
from infra.tags import LONGEST_PREFIX, kind_in_names, name_prefix
from infra.types import kind_of


@pytest.mark.parametrize(
    ("project", "stack", "pattern"),
    [
        ("ray-on-ecs", "dev", "ray-on-ecs-dev"),
        ("ray-on-ecs", "Team_A.Exp", "ray-on-ecs-team-a-exp-[0-9a-f]{8}"),
        ("ray-on-ecs", "an-experiment-with-a-long-name", "ray-on-ecs-an-experiment-[0-9a-f]{8}"),
        ("ecs-training", "dev", "ray-ecs-training-dev-[0-9a-f]{8}"),
        ("AWS", "dev", "ray-aws-dev-[0-9a-f]{8}"),
    ],
)
def test_a_prefix_is_read_as_project_and_stack(project: str, stack: str, pattern: str) -> None:
    prefix = name_prefix(f"{project}-{stack}")
    assert re.fullmatch(pattern, prefix), prefix
    assert "--" not in prefix
    assert len(prefix) <= LONGEST_PREFIX


@pytest.mark.parametrize(
    ("one", "other"), [("dev", "Dev"), ("a.b", "a-b"), (f"{'long-' * 12}a", f"{'long-' * 12}b"), ("dev-", "dev")]
)
def test_similar_names_have_distinct_prefixes(one: str, other: str) -> None:
    first, second = (name_prefix(f"ray-on-ecs-{stack}") for stack in (one, other))
    assert first != second


@pytest.mark.parametrize("name", ["amazon-reviews", "aws-jobs", "ecs", "amzn", "ssm-test"])
def test_reserved_name_prefixes_are_avoided(name: str) -> None:
    assert name_prefix(name).startswith("ray-")


@pytest.mark.parametrize("prefix", ["ray-on-ecs", 30 * "p", LONGEST_PREFIX * "p"])
def test_names_of_all_kinds_fit_their_roles(prefix: str) -> None:
    """With Pulumi's random end, IAM's limit is 64 characters."""
    pools = ["x", "h100", "h100-large", 32 * "p", 31 * "p" + "q"]
    kinds = [*("head", "workers", "workers-b", "workers-c", "cpu-workers"), *(kind_of(pool) for pool in pools)]
    kinds += [kind_of(pool, "us-west-2c") for pool in pools]
    names = [kind_in_names(prefix, kind) for kind in kinds]
    assert len(set(names)) == len(kinds)
    assert names[:2] == kinds[:2]
    for name in names:
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name)
        roles = (f"{name}-instance-role", f"{singular(name)}-task-execution")
        assert all(len(f"{prefix}-{role}-1a2b3c4") <= 64 for role in roles)


def test_names_that_fit_stay_as_they_are() -> None:
    for kind in ("workers", "workers-b", "cpu-workers", "h100-workers-c"):
        assert kind_in_names("ray-on-ecs", kind) == kind
