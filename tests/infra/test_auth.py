"""Ray's token: random, encrypted, and nowhere to be read."""

from __future__ import annotations

from infra.auth import AuthToken, AuthTokenArgs
from tests.infra.fake_aws import SECRET, Cloud


def auth(cloud: Cloud) -> AuthToken:
    """A token with valid defaults."""
    return cloud.run(lambda: AuthToken("auth", AuthTokenArgs()))


def test_the_token_cannot_be_guessed_and_needs_no_quoting(cloud: Cloud) -> None:
    auth(cloud)
    assert cloud.resources["auth-token"].inputs == {"length": 64.0, "special": False}, (
        "it goes through HTTP headers and shell variables"
    )


def test_the_token_is_stored_encrypted(cloud: Cloud) -> None:
    auth(cloud)
    parameter = cloud.resources["auth-parameter"].inputs
    assert parameter["type"] == "SecureString", "whoever may list parameters could read it otherwise"
    secret = parameter["value"]
    assert secret == SECRET or secret["value"] == SECRET, "it is the token that the workers present"


def test_the_outputs_say_where_the_token_is_and_not_what(cloud: Cloud) -> None:
    made = auth(cloud)
    assert cloud.value(made.parameter_name) == "auth-parameter", "token_command reads it by its name"
    assert cloud.value(made.parameter_arn).endswith(":auth-parameter"), "ECS reads it by its ARN"
    outputs = [value for value in vars(made).values() if hasattr(value, "apply")]
    assert all(cloud.value(output) != SECRET for output in outputs), "an output can end up in a log"


def test_another_word_makes_another_token(cloud: Cloud) -> None:
    cloud.run(lambda: AuthToken("auth", AuthTokenArgs(rotate="2026-11")))
    assert cloud.resources["auth-token"].inputs["keepers"] == {"rotate": "2026-11"}
    assert cloud.resources["auth-token"].ignore_changes == ()


def test_without_a_word_the_token_stays(cloud: Cloud) -> None:
    auth(cloud)
    assert cloud.resources["auth-token"].ignore_changes == ("keepers",), "nothing would restart the nodes that have it"
