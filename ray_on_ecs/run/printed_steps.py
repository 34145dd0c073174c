"""Steps of a training in one output, from its lines and progress bars, whose numbers may be those of an epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ray_on_ecs.run.printed import Printed
from ray_on_ecs.tracking.end import Steps
from ray_on_ecs.tracking.shown_log import COLOURS


@dataclass(frozen=True)
class _Count:
    """The position of a bar, or of a count in lines; the name identifies it."""

    name: str
    step: int
    total: int
    epoch: int | None = None  # as printed before it

    @property
    def has_ended(self) -> bool:
        return self.step >= self.total


class PrintedSteps:
    """Reader of one output.

    The training is the first count that is not at its end. Another one that begins before the first step of it is
    within each of its steps, as batches in a bar of epochs; one that begins later is a validation. A count that begins
    again is of one epoch: all steps are known then if the epochs were printed before it, as in `Epoch 1/5`; another one
    that follows in this epoch is a validation. If lines count steps without their total, a bar that begins later, or
    ends before, is not the training.

    Attributes:
        begins_again: True once the count has begun again, also in an earlier start of the same script.
    """

    def __init__(self, *, begins_again: bool = False) -> None:
        self._outer: _Count | None = None
        self._inner: _Count | None = None
        self._first_step = 0  # of the outer count
        self.begins_again = begins_again
        self._epoch: tuple[int, int] | None = None  # the epoch and all of them, as printed before the count
        self._first_epoch = 1
        self._is_other = False

    @property
    def steps(self) -> Steps | None:
        """The steps so far; None before the first count."""
        outer, inner = self._outer, self._inner
        if outer is None or self._is_other:
            return None
        if self._epoch:
            (epoch, epochs), total = self._epoch, outer.total
            step = outer.step if outer.epoch == epoch else 0  # of the count of this epoch, which may be yet to begin
            return Steps((epoch - self._first_epoch) * total + step, epochs * total)
        if self.begins_again:
            return Steps(outer.step)
        if inner:
            return Steps(outer.step * inner.total + min(inner.step, inner.total), outer.total * inner.total)
        return Steps(outer.step, outer.total)

    def read(self, line: str, printed: Printed) -> None:
        """Take the numbers of a line."""
        if printed.epoch is not None and (self._outer is None or self._epoch or printed.total):
            self._take_epoch(int(printed.epoch), printed.epochs, is_of_count=printed.total is not None)
        if printed.step is not None and not (printed.total or printed.is_bar):
            ended = self._outer is not None and not self._epoch and printed.step > self._outer.total
            self._is_other = self._is_other or self._outer is None or ended
        elif printed.step is not None and printed.total:
            epoch = self._epoch[0] if self._epoch else None
            self._take(_Count(_name(line, printed), printed.step, printed.total, epoch))

    def _take_epoch(self, epoch: int, epochs: int | None, *, is_of_count: bool) -> None:
        if epoch == 0:
            self._first_epoch = 0
        if epochs:
            self._epoch = epoch, max(epochs, epoch + 1 - self._first_epoch)
        elif is_of_count and not self._epoch:  # all epochs are not known
            self.begins_again = True

    def _take(self, count: _Count) -> None:
        outer = self._outer
        if outer and outer.has_ended and self._epoch and outer.epoch == count.epoch:
            return
        if outer is None or (outer.has_ended and count.name != outer.name):
            self.begins_again = self.begins_again or outer is not None  # one of them may be a preparation
            self._outer, self._inner, self._first_step = count, None, count.step
        elif count.name == outer.name:
            # It was set back, and is not that of a rank which is a bit slower than another one.
            has_begun_again = (count.step <= 1 and outer.step >= 10) or outer.step - count.step > outer.total / 2
            self.begins_again = self.begins_again or has_begun_again
            if self._inner and count.step > outer.step:  # it has begun again within this one step, or is another count
                is_within = count.step == outer.step + 1 and self._inner.step > 0
                self._inner = replace(self._inner, step=0) if is_within else None
            if has_begun_again or self._epoch or count.step > outer.step:
                self._outer = count
        elif count.name == self._inner.name if self._inner else outer.step == self._first_step:
            self._inner = count


def _name(line: str, printed: Printed) -> str:
    """Return what the states of one count have in common: the text before its numbers, and all steps."""
    text = re.split(r"\d+%", COLOURS.sub("", line))[0].strip() if printed.is_bar else ""
    return f"{re.sub(r'[0-9]+', '#', text)[:40]} {printed.is_bar} {printed.total}"
