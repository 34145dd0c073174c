"""IAM's decision on a request, for the statements of this project's policies.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Context = Mapping[str, str]


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
    effects = {each["Effect"] for each in statements if _applies(each, action, resource, context)}
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
