"""What Pulumi knows of a stack."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Outputs by which AWS lists a resource whose ID in the state is another one, such as a task definition's.
NAMES = ("arn", "name")


class StateError(Exception):
    """The state can't be read; the message says why, and what to give instead."""


def known_ids(state: dict[str, Any]) -> set[str]:
    """IDs, ARNs and names of all resources in a state, as `pulumi stack export` prints it."""
    resources = (state.get("deployment") or {}).get("resources") or []
    return {name for each in resources for name in _names(each)}


def _names(resource: dict[str, Any]) -> Iterator[str]:
    if "id" in resource:
        yield resource["id"]
    outputs = resource.get("outputs") or {}
    yield from (outputs[name] for name in NAMES if isinstance(outputs.get(name), str))


def read(file: str) -> dict[str, Any]:
    """Read a state from a file; StateError where that is none."""
    try:
        state = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        hint = "give what `pulumi stack export` prints"
        raise StateError(f"--state {file}: can't be read ({error}); {hint}") from error
    if not isinstance(state, dict) or "deployment" not in state:
        raise StateError(f"--state {file}: is no state; give what `pulumi stack export` prints")
    return state


def exported(*stack: str) -> dict[str, Any]:
    """Ask Pulumi for the state of a stack, or of the one that is selected; StateError where there is none."""
    return json.loads(pulumi("stack", "export", *stack))


def setting(key: str, *stack: str) -> str | None:
    """Ask Pulumi for a key of the configuration; None where it has none."""
    try:
        return pulumi("config", "get", key, *stack)
    except StateError:
        return None


def pulumi(*arguments: str) -> str:
    """Ask the `pulumi` command; StateError where it does not answer."""
    hint = "or give --stack, --region and --state"
    try:
        asked = subprocess.run(["pulumi", "--non-interactive", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise StateError(f"Pulumi is not installed here; install it, {hint}") from None
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines() or ["nothing"]
        raise StateError(f"`pulumi {' '.join(arguments)}` says: {said[-1]}; choose another stack, {hint}")
    return asked.stdout.strip()
