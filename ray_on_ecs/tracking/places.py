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


def pools_in(document: Mapping[str, Any]) -> list[str]:
    """Return the names of the pools in which a run has waited or trained."""
    return _names(_list(document.get("pools"))) or []


def places_in(document: Mapping[str, Any]) -> Places:
    """Return where a run has had instances, or where it waits for the first ones."""
    cost = document.get("cost") if "cost" in document else document
    rows = [each for each in _list(_get(cost, "instances")) if isinstance(each, dict) and "pool" in each]
    chosen = document.get("pool")
    if not rows and isinstance(chosen, dict):
        zone = chosen.get("zone")
        row = {"pool": chosen.get("name"), "zones": zone.split(",") if isinstance(zone, str) else []}
        rows = [{**row, "instance_type": each} for each in _list(chosen.get("instance_types")) or [None]]
    return Places(
        pools=_names(each["pool"] for each in rows),
        instance_types=_names(each.get("instance_type") for each in rows),
        zones=_names(zone for each in rows for zone in _list(each.get("zones"))),
    )


def of_pool(document: Mapping[str, Any], key: str) -> str | None:
    """Return a text of the pool in which a run waits or trains: its `gpu`, or the `reason` for the choice, or None."""
    value = _get(document.get("pool"), key)
    return one_line(value) or None if isinstance(value, str) else None


def _names(values: Iterable[Any]) -> list[str] | None:
    return list(dict.fromkeys(name for value in values if isinstance(value, str) and (name := one_line(value)))) or None


def _get(document: Any, key: str) -> Any:
    return document.get(key) if isinstance(document, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
