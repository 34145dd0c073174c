"""Pools, instance types and zones of a run, from its status or result, which others may have written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_on_ecs.errors import one_line


@dataclass(frozen=True, kw_only=True)
class Places:
    """Names of where a run trains or has trained; None if they are not known."""

    pools: list[str] | None = None
    instance_types: list[str] | None = None
    zones: list[str] | None = None


def in_words(places: Places) -> str:
    """Return the places as `h100: p5.48xlarge in us-west-2c`; empty if they are not known."""
    pools, types, zones = (", ".join(each or ()) for each in (places.pools, places.instance_types, places.zones))
    return ": ".join(filter(None, (pools, " in ".join(filter(None, (types, zones))))))


def places_in(document: Mapping[str, Any]) -> Places:
    """Return where a run has had instances, or where it waits for the first ones."""
    cost = document.get("cost") if "cost" in document else document
    instances = [each for each in _list(_get(cost, "instances")) if isinstance(each, dict) and "pool" in each]
    if instances:
        zones = (zone for each in instances for zone in _list(each.get("zones")))
        types = (each.get("instance_type") for each in instances)
        return _places((each["pool"] for each in instances), types, zones)
    chosen = document.get("pool")
    zone = _get(chosen, "zone")
    zones = zone.split(",") if isinstance(zone, str) else ()
    return _places([_get(chosen, "name")], _list(_get(chosen, "instance_types")), zones)


def reason_in(document: Mapping[str, Any]) -> str | None:
    """Return why a run trains in its pool; None if its document does not say it."""
    reason = _get(document.get("pool"), "reason")
    return one_line(reason) or None if isinstance(reason, str) else None


def _places(pools: Iterable[Any], types: Iterable[Any], zones: Iterable[Any]) -> Places:
    return Places(pools=_names(pools), instance_types=_names(types), zones=_names(zones))


def _names(values: Iterable[Any]) -> list[str] | None:
    return list(dict.fromkeys(name for value in values if isinstance(value, str) and (name := one_line(value)))) or None


def _get(document: Any, key: str) -> Any:
    return document.get(key) if isinstance(document, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
