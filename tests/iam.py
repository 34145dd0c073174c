"""IAM's decision on a request, for the statements of this project's policies.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infra.definitions.policies import (
    LOOK_AT_CLUSTER,
    LOOK_AT_GROUPS,
    LOOK_AT_INSTANCE,
    LOOK_AT_RESERVATIONS,
    SESSION_MANAGER,
    SPOT_PRICES,
)

Context = Mapping[str, str]
# Actions without resource-level permissions, and the reason why each is acceptable.
# https://docs.aws.amazon.com/service-authorization/latest/reference/
WILDCARD_ACTIONS = {
    "ecr:GetAuthorizationToken": "the token is for the whole registry; pull and push are restricted to a repository",
    "cloudwatch:PutMetricData": "metrics are not resources; a condition restricts the namespace",
    SPOT_PRICES: "spot prices are public and have no resource",
    LOOK_AT_RESERVATIONS: "a Describe action of EC2 is read-only, without resources",
    **dict.fromkeys(
        (*LOOK_AT_GROUPS, *LOOK_AT_INSTANCE), "Describe actions of Auto Scaling are read-only, without resources"
    ),
    **dict.fromkeys(SESSION_MANAGER, "Session Manager has no resources; an agent answers only for its instance"),
    **dict.fromkeys(LOOK_AT_CLUSTER, "read-only; a condition restricts the cluster"),
    "ecs:DiscoverPollEndpoint": "returns the address of ECS, reads and changes nothing",
}


def as_list(value: str | list[str]) -> list[str]:
    """An action, resource or value, of which IAM takes one or several."""
    return [value] if isinstance(value, str) else value


def _like(found: str, wanted: str) -> bool:
    pattern = "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in wanted)
    return re.fullmatch(pattern, found, re.DOTALL) is not None


def _equal(found: str, wanted: str) -> bool:
    return found == wanted


# ArnEquals takes wildcards, like ArnLike.
OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": _equal, "Bool": _equal, "StringLike": _like, "ArnLike": _like, "ArnEquals": _like,
}  # fmt: skip


def is_allowed(statements: Iterable[Mapping[str, Any]], action: str, resource: str, context: Context) -> bool:
    """True if a statement allows the request and none denies it."""
    effects = {statement["Effect"] for statement in statements if _applies(statement, action, resource, context)}
    return effects == {"Allow"}


def _applies(statement: Mapping[str, Any], action: str, resource: str, context: Context) -> bool:
    return (
        any(_like(action, each) for each in as_list(statement["Action"]))
        and any(_like(resource, _filled_in(each, context)) for each in as_list(statement["Resource"]))
        and all(
            _holds(operator, key, as_list(values), context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def _holds(operator: str, key: str, values: list[str], context: Context) -> bool:
    if operator == "Null":
        return values == [str(key not in context).lower()]
    if key not in context:
        return operator.endswith("IfExists")
    return any(OPERATORS[operator.removesuffix("IfExists")](context[key], value) for value in values)


def _filled_in(text: str, context: Context) -> str:
    return re.sub(r"\$\{([^}]+)\}", lambda found: context[found[1]], text)
