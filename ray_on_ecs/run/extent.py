"""Extent of a start of the scripts: how rank 0's steps and epochs begin, and how far they get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

# Epoch and step; -1 for one that is not known.
Position = tuple[float, float]
UNKNOWN = -1.0
POSITIONS = ("first", "second", "last")


@dataclass(frozen=True)
class Extent:
    """Positions of one start.

    Attributes:
        first: Its first position.
        second: The next other one; without it nothing can be said of the start.
        last: The last one.
        falls: True once a position was below the one before, as steps that begin again in each epoch: then starts
            can't be compared.
        is_reported: True if the script reports its steps; what it prints does not count then.
    """

    first: Position | None = None
    second: Position | None = None
    last: Position | None = None
    falls: bool = False
    is_reported: bool = False

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return an extent that was stored as a document; LookupError, TypeError or ValueError if it is not one."""
        epoch_and_step = {name: (float(at[0]), float(at[1])) for name in POSITIONS if (at := document[name])}
        return cls(**epoch_and_step, falls=bool(document["falls"]), is_reported=bool(document["is_reported"]))

    def at(self, step: float | None, epoch: float | None = None) -> Self:
        """Return the extent after another number of a step or an epoch in the output."""
        if self.is_reported or (step is None and epoch is None):
            return self
        before = self.last or (UNKNOWN, UNKNOWN)
        if epoch is None or epoch == before[0]:
            position = (before[0], before[1] if step is None else step)
        else:
            position = (epoch, UNKNOWN if step is None else step)
        return self._to(position)

    def reported(self, step: int) -> Self:
        """Return the extent after a step that the script has reported."""
        begun = self if self.is_reported else type(self)(is_reported=True)
        return begun._to((UNKNOWN, step))

    def _to(self, position: Position) -> Self:
        if self.first is None:
            return replace(self, first=position, last=position)
        if position == self.last:
            return self
        falls = self.falls or (self.last is not None and position < self.last)
        return replace(self, second=self.second or position, last=position, falls=falls)

    def is_beyond(self, best: Self) -> bool | None:
        """Return whether this start has got further than another one; None if they can't be compared."""
        if not self._is_comparable(best) or self.last is None or best.last is None:
            return None
        return self.last > best.last

    def begins_again(self, first: Self, best: Self) -> bool:
        """Return whether this start began where the first did, although one before it had got further."""
        if not (self._is_comparable(first) and self._is_comparable(best)):
            return False
        mine, others = (self.first, self.second), (first.first, first.second)
        is_at_begin = all(a is not None and b is not None and a <= b for a, b in zip(mine, others, strict=True))
        return is_at_begin and self.second is not None and best.last is not None and self.second < best.last

    def difference(self, best: Self) -> tuple[str, float, float] | None:
        """Return the unit in which this start's begin is before another one's end, and both numbers, if they are known.

        A progress bar has a step before the first line with an epoch, which is not in the first position then.
        """
        begins = [position for position in (self.first, self.second, self.last) if position]
        for number, unit in enumerate(("epoch", "step")):
            end = best.last[number] if best.last else UNKNOWN
            for position in begins:
                if UNKNOWN < position[number] < end:
                    return unit, position[number], end
        return None

    def _is_comparable(self, other: Self) -> bool:
        has_both = self.second is not None and other.second is not None
        return has_both and not self.falls and not other.falls and self.is_reported == other.is_reported
