"""Random resources: drawn once from their state's name, and kept while their inputs stay."""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Iterable
from typing import Any

# By type and name: inputs, the number of draws, and outputs.
Kept = dict[str, tuple[dict[str, Any], int, dict[str, Any]]]


def keep(
    kept: Kept, state: str, token: str, name: str, inputs: dict[str, Any], ignored: Iterable[str]
) -> dict[str, Any]:
    """The outputs of a random resource: those of before unless an input has changed that is not ignored."""
    key = f"{token} {name}"
    before, draws, outputs = kept.get(key, ({}, 0, {}))
    if draws:
        inputs = {each: value for each, value in inputs.items() if each not in ignored}
        inputs |= {each: before[each] for each in ignored if each in before}
    if not draws or inputs != before:
        draws += 1
        outputs = {**inputs, **draw(token.rpartition(":")[2], inputs, f"{state} {key} {draws}")}
        kept[key] = inputs, draws, outputs
    return outputs


def draw(kind: str, inputs: dict[str, Any], seed: str) -> dict[str, Any]:
    """New outputs of a random resource."""
    dice = random.Random(seed)
    match kind:
        case "RandomId":
            drawn = dice.randbytes(int(inputs["byteLength"]))
            prefix = inputs.get("prefix") or ""
            url = base64.urlsafe_b64encode(drawn).decode().rstrip("=")
            number = int.from_bytes(drawn)
            return {"id": url, "b64Url": prefix + url, "hex": prefix + drawn.hex(), "dec": f"{prefix}{number}"}
        case "RandomPassword" | "RandomString":
            result = "".join(dice.choices(string.ascii_letters + string.digits, k=int(inputs["length"])))
            return {"id": "none", "result": result}
    raise ValueError(f"random {kind} is not emulated")
