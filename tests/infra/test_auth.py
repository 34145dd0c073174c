"""Ray token: random, encrypted and not exposed."""

from __future__ import annotations

from infra.auth import AuthToken, AuthTokenArgs
from tests.infra.fake_aws import SECRET, Cloud


def auth(cloud: Cloud) -> AuthToken:
    """A token with valid defaults."""
    return cloud.run(lambda: AuthToken("auth", AuthTokenArgs()))


def test_token_is_long_and_alphanumeric(cloud: Cloud) -> None:
    auth(cloud)
    assert cloud.resources["auth-token"].inputs == {"length": 64.0, "special": False}


def test_the_token_is_stored_encrypted(cloud: Cloud) -> None:
    auth(cloud)
    parameter = cloud.resources["auth-parameter"].inputs
    assert parameter["type"] == "SecureString"
    secret = parameter["value"]
    assert secret == SECRET or secret["value"] == SECRET


def test_another_word_makes_another_token(cloud: Cloud) -> None:
    cloud.run(lambda: AuthToken("auth", AuthTokenArgs(rotate="2026-11")))
    assert cloud.resources["auth-token"].inputs["keepers"] == {"rotate": "2026-11"}
    assert cloud.resources["auth-token"].ignore_changes == ()


def test_without_a_word_the_token_stays(cloud: Cloud) -> None:
    auth(cloud)
    assert cloud.resources["auth-token"].ignore_changes == ("keepers",)
