"""Paths in the arguments of a script."""

import pytest

from ray_on_ecs.arguments import check, expand
from ray_on_ecs.errors import UsageError

NAMES = {"INPUT_DATA": "/cache/my data", "INPUT_DATA_2": "/two", "RUN_DIR": "/run", "RUN_NAME": "first"}


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("$INPUT_DATA", "/cache/my data"),
        ("${INPUT_DATA}", "/cache/my data"),
        ("--data=$INPUT_DATA/train", "--data=/cache/my data/train"),
        ("data.path=${INPUT_DATA}", "data.path=/cache/my data"),
        ("$INPUT_DATA,$INPUT_DATA_2:${RUN_DIR}", "/cache/my data,/two:/run"),
        ("$RUN_NAME.pt", "first.pt"),
        ("$INPUT_DATA-v2", "/cache/my data-v2"),
        ("${INPUT_DATA}_2", "/cache/my data_2"),
        *((word, word) for word in ("$HOME", "${HOME}", "$RUN_DIRX", "${INPUT_DATA:-/x}", "${oc.env:INPUT_DATA}")),
        *((word, word) for word in ("\\$INPUT_DATA", "$$INPUT_DATA", "$$", "$", "INPUT_DATA", "$input_data", "$(pwd)")),
        *((word, word) for word in ("${RUN_DIR", "{RUN_DIR}", "$1", "%INPUT_DATA%", "")),
    ],
)
def test_names_of_the_runner_are_expanded(word: str, expanded: str) -> None:
    assert expand(["train.py", word], NAMES) == ("train.py", expanded)


def test_value_is_not_expanded_again() -> None:
    assert expand(["$INPUT_DATA"], {"INPUT_DATA": "$RUN_DIR", "RUN_DIR": "/run"}) == ("$RUN_DIR",)


@pytest.mark.parametrize(
    ("command", "expanded"),
    [
        (["bash", "-c", 'ls "$INPUT_DATA"', "$RUN_DIR"], ("bash", "-c", 'ls "$INPUT_DATA"', "/run")),
        (["env", "/bin/sh", "-ec", "cd $RUN_DIR"], ("env", "/bin/sh", "-ec", "cd $RUN_DIR")),
        (["prog", "-c", "$RUN_DIR"], ("prog", "-c", "/run")),
        (["$INPUT_DATA_2/prog"], ("/two/prog",)),
    ],
)
def test_program_of_a_shell_is_left_to_it(command: list[str], expanded: tuple[str, ...]) -> None:
    assert expand(command, NAMES) == expanded
    check(["bash", "-c", "for INPUT_X in 1 2; do echo $INPUT_X; done"], ())


@pytest.mark.parametrize("word", ["$INPUT_OTHER", "--data=${INPUT_OTHER}/x", "$INPUT_DATA/$INPUT_OTHER"])
def test_input_that_is_not_given_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"names \$INPUT_OTHER, and the run has .*; add --input OTHER=URI"):
        check(["train.py", word], ("INPUT_DATA",))
    check(["train.py", "$INPUT_DATA", "\\$INPUT_X", "$INPUT_", "$HOME", "${INPUT_DATA:-x}"], ("INPUT_DATA",))
