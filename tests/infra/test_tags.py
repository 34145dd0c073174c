"""Name prefixes in the characters and lengths that AWS accepts."""

from __future__ import annotations

import re

import pytest

from infra.tags import LONGEST_PREFIX, name_prefix


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
    made = name_prefix(f"{project}-{stack}")
    assert re.fullmatch(pattern, made), made
    assert "--" not in made
    assert len(made) <= LONGEST_PREFIX


@pytest.mark.parametrize(
    ("one", "other"), [("dev", "Dev"), ("a.b", "a-b"), (f"{'long-' * 12}a", f"{'long-' * 12}b"), ("dev-", "dev")]
)
def test_similar_names_have_distinct_prefixes(one: str, other: str) -> None:
    first, second = (name_prefix(f"ray-on-ecs-{stack}") for stack in (one, other))
    assert first != second


@pytest.mark.parametrize("name", ["amazon-reviews", "aws-jobs", "ecs", "amzn", "ssm-test"])
def test_reserved_name_prefixes_are_avoided(name: str) -> None:
    assert name_prefix(name).startswith("ray-")
