import pytest

from ray_on_ecs.run.restart_policy import RestartPolicy


class Run:
    """A run whose newest checkpoint the test moves on."""

    def __init__(self, max_restarts: int) -> None:
        self.checkpoint: str | None = None
        self.lost = False
        self.policy = RestartPolicy(max_restarts, self._newest)

    def advance(self, step: int) -> None:
        self.checkpoint = f"checkpoint_{step:08d}"

    def _newest(self) -> str | None:
        if self.lost:
            raise OSError("no answer")
        return self.checkpoint


def test_a_run_that_makes_progress_survives_any_number_of_failures() -> None:
    run = Run(max_restarts=1)
    for step in range(100):
        run.advance(step)
        assert run.policy.survives_failure(), "weeks on machines that fail every few days"


def test_a_run_that_makes_none_ends_after_as_many_as_are_allowed() -> None:
    run = Run(max_restarts=3)
    run.advance(5)
    assert [run.policy.survives_failure() for _ in range(4)] == [True, True, True, False]
    assert run.policy.failures == 4


def test_progress_in_between_starts_the_count_again() -> None:
    run = Run(max_restarts=2)
    outcomes = [run.policy.survives_failure(), run.policy.survives_failure()]
    run.advance(7)
    outcomes += [run.policy.survives_failure() for _ in range(3)]
    assert outcomes == [True, True, True, True, False]


def test_without_any_patience_the_first_failure_ends_the_run() -> None:
    run = Run(max_restarts=0)
    run.advance(5)
    assert not run.policy.survives_failure(), "whatever progress there was before"


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_preemption_with_progress_is_no_failure(max_restarts: int) -> None:
    run = Run(max_restarts)
    for step in range(20):
        run.advance(step)
        assert run.policy.survives_preemption(), "the checkpoint was stored before the node went"


def test_nodes_that_are_reclaimed_again_and_again_before_a_step_end_the_run() -> None:
    run = Run(max_restarts=2)
    assert [run.policy.survives_preemption() for _ in range(3)] == [True, True, False]


def test_a_storage_that_cannot_be_read_counts_as_no_progress() -> None:
    run = Run(max_restarts=1)
    run.advance(5)
    run.lost = True
    assert [run.policy.survives_failure() for _ in range(2)] == [True, False]
