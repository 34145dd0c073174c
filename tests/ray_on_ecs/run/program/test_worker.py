"""The variables of a Ray program's workers."""

import pytest

from ray_on_ecs.run.program.worker import as_given


def test_dollar_in_a_variable_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"A": "costs $HOME\n${HOME}", "B": "plain", "OF_SCRIPT": "$HOME"}
    for name, value in {"HOME": "/h", "A": "costs /h\n/h", "B": "plain", "OF_SCRIPT": "its own"}.items():
        monkeypatch.setenv(name, value)
    assert as_given(given) == {"A": "costs $HOME\n${HOME}", "B": "plain"}
