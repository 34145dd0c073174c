"""CloudWatch's metric math, as far as the stack's alarms use it.

https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/using-metric-math.html
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def evaluate(expression: str, metrics: Mapping[str, float | None]) -> float | None:
    """The value of an expression in a period; None where a metric is missing that it can't do without."""
    return _value(_parse(expression), {"REPEAT": None, **metrics})


@cache
def _parse(expression: str) -> ast.AST:
    return ast.parse(expression.replace("&&", "and").replace("||", "or"), mode="eval").body


_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "IF": lambda condition, yes, no: None if condition is None else yes if condition else no,
    "FILL": lambda value, filling: filling if value is None else value,  # REPEAT: without an earlier value
    "MAX": lambda values: max((item for item in values if item is not None), default=None),
    "CEIL": lambda value: None if value is None else math.ceil(value),
}


def _value(node: ast.AST, known: dict[str, Any]) -> Any:
    def each(*nodes: ast.AST) -> list[Any]:
        return [_value(item, known) for item in nodes]

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return known[node.id]
        case ast.List():
            return each(*node.elts)
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*each(*node.args))
        case ast.BoolOp():
            values = each(*node.values)
            return None if None in values else (all if isinstance(node.op, ast.And) else any)(values)
        case ast.BinOp(left=left, op=sign, right=right) | ast.Compare(left=left, ops=[sign], comparators=[right]):
            operands = each(left, right)
            return None if None in operands else _OPERATORS[type(sign)](*operands)
    raise AssertionError(f"not translated: {ast.dump(node)}")
