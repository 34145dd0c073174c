"""Pre-flight check of the Docker daemon."""

from __future__ import annotations

from pathlib import Path

import pulumi
import pytest

from infra.config import docker


@pytest.fixture(autouse=True)
def no_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH without Docker, and a machine without its socket."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(docker, "SOCKET", tmp_path / "docker.sock")
    return tmp_path


def install(folder: Path, script: str) -> None:
    """Put a program called docker there."""
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)


def test_a_docker_that_answers_passes(no_docker: Path) -> None:
    install(no_docker, "echo 29.1.0")
    docker.check(is_up=lambda: False)


def test_stopped_docker_is_reported_with_its_message(no_docker: Path) -> None:
    install(no_docker, "echo; echo 'Cannot connect to the Docker daemon at unix:///run/d.sock.' >&2; exit 1")
    with pytest.raises(pulumi.RunError, match=r"^imageUri: is empty, .* \(Cannot connect") as refused:
        docker.check(is_up=lambda: False)
    assert "DOCKER_HOST" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_stack_that_is_up_is_only_warned(no_docker: Path, warnings: list[str]) -> None:
    docker.check(is_up=lambda: True)
    assert warnings == ["Docker is not installed; this machine could not build a changed image"]


def test_hanging_docker_times_out(no_docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(no_docker, "exec /bin/sleep 60")
    monkeypatch.setattr(docker, "SECONDS", 0.1)
    with pytest.raises(pulumi.RunError, match=r"does not answer within 0\.1 s"):
        docker.check(is_up=lambda: False)


def test_docker_daemon_without_command_is_accepted(no_docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pulumi.RunError, match="Docker is not installed"):
        docker.check(is_up=lambda: False)
    monkeypatch.setenv("DOCKER_HOST", "tcp://build.example:2376")
    docker.check(is_up=lambda: False)
    monkeypatch.delenv("DOCKER_HOST")
    (no_docker / "docker.sock").touch()
    docker.check(is_up=lambda: False)


def test_missing_credential_store_is_named(no_docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(no_docker, "echo 29.1.0")
    monkeypatch.setenv("DOCKER_CONFIG", str(no_docker))
    (no_docker / "config.json").write_text('{"credsStore": "desktop"}')
    with pytest.raises(pulumi.RunError, match=r"config.json names docker-credential-desktop, which is not in PATH; "):
        docker.check(is_up=lambda: False)
    helper = no_docker / "docker-credential-desktop"
    helper.write_text("#!/bin/sh\n")
    helper.chmod(0o700)
    docker.check(is_up=lambda: False)


@pytest.mark.parametrize("config", ["{}", "not JSON", "[]", '{"credHelpers": {"gcr.io": "gcloud"}}'])
def test_a_configuration_without_a_credential_store_passes(
    no_docker: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    install(no_docker, "echo 29.1.0")
    monkeypatch.setenv("DOCKER_CONFIG", str(no_docker))
    (no_docker / "config.json").write_text(config)
    docker.check(is_up=lambda: False)
