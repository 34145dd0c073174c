"""Reason why an ECS task has stopped, from its stop code, its reason, and its containers' reasons and exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ray_on_ecs.errors import one_line
from ray_on_ecs.starting import states
from ray_on_ecs.starting.launches import at
from ray_on_ecs.starting.states import Meaning

Task = Mapping[str, Any]

# Begin of the reason after a scale-in or a deployment.
SCALING = "Scaling activity initiated"


def last_stop(stopped: Iterable[Task]) -> str:
    """Return the line of the last task that stopped by a fault, which ECS forgets after an hour; empty without one."""
    newest_first = sorted(stopped, key=lambda task: at(task, "stoppedAt"), reverse=True)
    return next((line for task in newest_first if task.get("stoppedAt") and (line := stop_line(task))), "")


def stop_line(task: Task) -> str:
    """Return why a task has stopped, and the way out; empty if the stop was wanted."""
    reason, code = task.get("stoppedReason") or "", task.get("stopCode") or ""
    means = states.STOP_CODES.get(code, "")
    if reason.startswith(SCALING) or (means is None and not states.HEALTH.search(reason)):
        return ""
    said = [reason] if reason else [] if code in states.STOP_CODES or not code else [code]
    exit_codes = []
    for container in task.get("containers") or ():
        if container.get("exitCode"):
            exit_codes.append(container["exitCode"])
            said.append(f"exit status {container['exitCode']}")
        if container.get("reason"):
            said.append(container["reason"])
    words = ", ".join(said)
    meaning = _meaning(words, exit_codes)
    if meaning is None and means:
        meaning = Meaning(means)
    words = one_line(words)
    if meaning is None:
        return f"the last task stopped: {words or 'ECS gives no reason'}"
    parts = [meaning.means, *([meaning.way_out] if meaning.way_out else [])]
    return f"the last task stopped: {'; '.join(parts)}{f' ({words})' if words else ''}"


def _meaning(words: str, exit_codes: Iterable[int]) -> Meaning | None:
    for pattern, meaning in states.REASONS.items():
        if re.search(pattern, words, re.I | re.S):
            return meaning
    for name, meaning in states.ERRORS.items():
        if re.search(rf"\b{name}\b", words):
            return meaning
    return next((states.EXIT_CODES[code] for code in exit_codes if code in states.EXIT_CODES), None)
