"""Questions to a storage that answers late, fails or never answers, while the workers are polled."""

import threading
from concurrent.futures import Future

import pytest

from ray_on_ecs.run import patience
from ray_on_ecs.run.patience import ask


def fail() -> None:
    raise TimeoutError("of the storage")


def test_answer_and_error_are_the_calls() -> None:
    assert ask(lambda: 4, fail) == 4
    with pytest.raises(TimeoutError, match="of the storage"):
        ask(fail, lambda: None)


def test_something_else_goes_on_until_the_answer() -> None:
    is_over, polls = threading.Event(), []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            is_over.set()

    assert ask(is_over.wait, poll)
    assert len(polls) >= 3


def test_answer_that_comes_between_two_looks_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().result()
            super().result()  # it is there now, and this look has not seen it
            raise TimeoutError

    monkeypatch.setattr(patience, "Future", Late)
    assert ask(lambda: 4, fail) == 4


def test_no_answer_ends_the_patience() -> None:
    is_over = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        ask(is_over.wait, lambda: None, seconds=0.0)
    is_over.set()
