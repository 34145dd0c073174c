"""Fields of arguments: type by default, rules by annotation, Outputs only where the annotation has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, get_args

import pulumi

from infra.errors import Refusal, SettingError

Text = pulumi.Input[str]
# Accepted types of a value by the type of the field's default, with problem and hint for other values.
TYPES: dict[type, tuple[tuple[type, ...], str, str]] = {
    bool: ((bool,), "is not a boolean", "use true or false"),
    # Pulumi passes the integers of other languages as floats.
    int: ((int, float), "is not an integer", "use one, e.g. {}"),
    float: ((int, float), "is not a number", "use one, e.g. {}"),
    str: ((str,), "is not a string", "use text"),
    tuple: ((list, tuple), "is not a list", "use a list, also for a single value"),
    dict: ((Mapping,), "is not a dictionary", "use a dictionary of texts"),
}
# Of an integer with rules: a count, minutes or the GiB of a disk, the GiB of a file system.
EXAMPLES = (5, 60, 1200)


def from_text(name: str, text: str, default: Any) -> Any:
    """Value of a configuration's text in the type of its default; the text itself if it is of another type."""
    text = text.strip()
    parts = [part.strip() for part in text.split(",") if part.strip()]
    match default:
        case bool():
            return {"true": True, "false": False}.get(text, text)
        case int() if re.fullmatch("-?[0-9]{1,9}", text):
            return int(text)
        case float():
            with suppress(ValueError):
                return float(text)
        case tuple() | dict() if text.startswith(("[", "{")):
            kind = "braces" if text.startswith("{") else "brackets"
            hint = "use text without them, separated by commas, as in "
            raise SettingError(name, text, f"is in {kind}", hint + ("a,b" if isinstance(default, tuple) else "a=1,b=2"))
        case tuple():
            return tuple(parts)
        case dict():
            return _pairs(name, parts)
    return text


def _pairs(name: str, parts: Iterable[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in parts:
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals:
            raise SettingError(name, part, "is not key=value", "use key=value pairs, separated by commas")
        if key in pairs:
            raise SettingError(name, key, "is set twice", "set each name once")
        pairs[key] = value
    return pairs


def checked(name: str, value: Any, default: Any, annotation: Any) -> Any:
    """Value in the type of its default, if it and its elements have the annotated types and follow the rules."""
    if default in ("auto", "false") and isinstance(value, int | float):  # as `pulumi config set --path` stores it
        value = str(value).lower()
    value = _typed(name, value, default, annotation)
    for rule in getattr(annotation, "__metadata__", ()):
        rule(name, _plain(value))
        value = _checked_later(name, value, rule)
    return value


def _typed(name: str, value: Any, default: Any, annotation: Any) -> Any:
    base = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    if isinstance(value, pulumi.Output):
        if base == Text:
            return value
        raise later(name)
    kind = type(default)
    accepted, problem, hint = TYPES[kind]
    # In Python a bool is also an int.
    is_other = isinstance(value, bool) != (kind is bool) or (kind is int and isinstance(value, float) and value % 1)
    if not isinstance(value, accepted) or is_other:
        example = default or _example(name, annotation) if kind in (int, float) else ""
        raise SettingError(name, value, problem, hint.format(example))
    match default:
        case tuple():
            _check_elements(name, value, takes_outputs=Text in get_args(base))
            value = tuple(value)
            if len({*_plain(value)}) < len(_plain(value)):
                raise SettingError(name, ",".join(_plain(value)), "contains a value twice", "list each value once")
        case dict():
            _check_elements(name, (*value, *value.values()), takes_outputs=Text in get_args(base))
    return kind(value)


def _example(name: str, annotation: Any) -> int:
    """Number that follows the rules, for a default of 0, which turns something off and is not an example."""

    def is_fit(number: int) -> bool:
        try:
            for rule in getattr(annotation, "__metadata__", ()):
                rule(name, number)
        except SettingError:
            return False
        return True

    return next(filter(is_fit, EXAMPLES))


def later(name: str) -> Refusal:
    """Error for an Output in place of a plain value."""
    return Refusal(name, "must be known while Pulumi plans, and is an Output; use a plain value")


def _check_elements(name: str, parts: Iterable[Any], *, takes_outputs: bool) -> None:
    for part in parts:
        if isinstance(part, pulumi.Output):
            if not takes_outputs:
                raise Refusal(name, "must be known while Pulumi plans, and contains an Output; use plain values")
        elif not isinstance(part, str):
            raise SettingError(name, part, "is not a string", "use text")


def _checked_later(name: str, value: Any, rule: Callable[[str, Any], None]) -> Any:
    """Value whose Outputs follow the rule, too, as soon as they are known."""

    def held(part: Any, whole: Callable[[str], Any]) -> Any:
        def check(text: Any) -> Any:
            if isinstance(text, str):
                rule(name, whole(text))
            return text

        return part.apply(check) if isinstance(part, pulumi.Output) else part

    match value:
        case tuple():
            return tuple(held(part, lambda text: (text,)) for part in value)
        case dict():
            return {key: held(part, lambda text, key=key: {key: text}) for key, part in value.items()}
    return held(value, str)


def _plain(value: Any) -> Any:
    """Part of a value that is known while Pulumi plans."""
    match value:
        case pulumi.Output():
            return ""
        case tuple():
            return tuple(part for part in value if isinstance(part, str))
        case dict():
            return {key: part if isinstance(part, str) else "" for key, part in value.items()}
    return value
