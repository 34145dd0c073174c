"""Tables of docs/design/sleep.md: `python -m tests.sleep_numbers`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tests.sleep_aws import DAY, HOUR, MINUTE, Design, Events
from tests.sleep_simulator import History


def races(histories: int = 10_000) -> str:
    """Return the longest times in minutes, by the reading of the documents."""
    lines = ["| missing data | faults | histories | race | wake | sleep |", "|---|---|---|---|---|---|"]
    played = [History(seed).play() for seed in range(histories)]
    assert not any(each.broken for each in played)
    for at_once in (False, True):
        for has_faults in (False, True):
            chosen = [
                each
                for each in played
                if each.aws.sleep_alarm.at_once == at_once and bool(each.faults.until) == has_faults
            ]
            names = ("longest race, busy", "longest race, starting"), ("longest request", "longest wake")
            race, wake = (max(each.seen[name] for each in chosen for name in pair) for pair in names)
            longest = [race, wake, max(each.way_to_sleep for each in chosen)]
            cells = " | ".join(f"{seconds / MINUTE:.1f}" for seconds in longest)
            reading = "counts at once" if at_once else "is replaced by older data"
            lines.append(f"| {reading} | {'yes' if has_faults else 'no'} | {len(chosen)} | {cells} |")
    return "\n".join(lines)


def hours() -> str:
    """Return a head's hours a week, for three runs on each of five days, without faults."""
    lines = ["| `sleepAfterMinutes` | hours used | hours paid | wakes |", "|---|---|---|---|"]
    for minutes in (15, 30, 60, 120):
        weeks = [_week(seed, minutes) for seed in range(200)]
        lines.append(f"| {minutes} | {' | '.join(f'{median(each):.1f}' for each in zip(*weeks, strict=True))} |")
    return "\n".join(lines)


def _week(seed: int, minutes: int) -> tuple[float, float, float]:
    random = Events(seed).random
    times = sorted(day * DAY + random.uniform(9, 18) * HOUR for day in range(5) for _ in range(3))
    history = History(seed, Design(minutes=minutes), [(time, "run") for time in times], ambushes=0).play()
    assert not history.broken
    return _union(history.used) / HOUR, history.aws.paid / HOUR, history.woken


def _union(times: Sequence[tuple[float, float]]) -> float:
    """Return the length of times that may overlap."""
    total = until = 0.0
    for begin, end in sorted(times):
        total, until = total + max(0.0, end - max(begin, until)), max(until, end)
    return total


if __name__ == "__main__":
    print(races(), hours(), sep="\n\n")
