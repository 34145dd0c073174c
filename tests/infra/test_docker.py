"""Pre-flight check of what builds the image: kinds of daemons, builders and disks behind a `docker` program."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.config import docker

# Operating system and components of the server.
SERVER = "linux\nEngine\ncontainerd\nrunc\ndocker-init\n"
AMD64 = (
    "Name:   default\nDriver: docker\n\nNodes:\nName:      default\nPlatforms: linux/amd64, linux/amd64/v2, linux/386\n"
)
ARM64 = AMD64.replace("linux/amd64, linux/amd64/v2, linux/386", "linux/arm64, linux/arm/v7")
DESKTOP = AMD64.replace("linux/amd64,", "linux/arm64, linux/amd64,")  # emulated by Rosetta
UNREACHABLE = "Name:   remote\nDriver: remote\n\nNodes:\nName:     remote0\nError:    dial tcp 10.0.0.9:1234: timeout\n"
Install = Callable[..., Path]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH without Docker, and a machine without its socket and configuration."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_BUILDKIT", raising=False)
    monkeypatch.setattr(docker, "SOCKET", tmp_path / "docker.sock")
    return tmp_path


@pytest.fixture
def install(machine: Path) -> Install:
    """Put a program called docker into PATH."""

    def put(version: str = "", *, server: str = SERVER, builder: str = AMD64, host: str = "elsewhere") -> Path:
        for name, text in (("server", server), ("builder", builder), ("host", f"{host} {machine}")):
            (machine / name).write_text(text)
        cat = shutil.which("cat", path="/bin:/usr/bin")
        of_builder = f"{cat} {machine}/builder" if builder else "exit 1"
        script = f"""case "$1" in
          version) {version or f"{cat} {machine}/server"};;
          buildx) {of_builder};;
          info) {cat} {machine}/host;;
        esac"""
        program = machine / "docker"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        return machine

    return put


def refusal() -> str:
    """Reason why this machine can't build."""
    return str(docker.check())


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"builder": DESKTOP},
        {"builder": ""},  # without the command buildx, which the provider contains
        {"builder": "Name: mine\nDriver: docker-container\n\nNodes:\nName: mine0\nStatus: inactive\n"},
        {"builder": UNREACHABLE + AMD64},  # another node answers
        {"server": "linux\nEngine\ncontainerd\nrunc\nrootlesskit\nslirp4netns\n"},
    ],
    ids=["Linux", "Docker Desktop on Apple silicon", "no buildx", "inactive builder", "one node of two", "rootless"],
)
def test_a_docker_that_builds_passes(install: Install, kind: dict[str, Any], warnings: list[str]) -> None:
    install(**kind)
    assert docker.check() is None
    assert not warnings


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ({"version": "echo; echo 'Cannot connect to the Docker daemon at unix:///run/d.sock.' >&2; exit 1"}, "Cannot"),
        ({"version": "echo 'permission denied while trying to connect to the Docker API' >&2; exit 1"}, "permission"),
        ({"version": "echo 'Docker Desktop is manually paused. Unpause it.' >&2; exit 1"}, "manually paused"),
        ({"version": "echo 'Error: Sign-in enforcement is enabled.' >&2; exit 1"}, "Sign-in"),
        ({"version": "echo 'client version 1.52 is too new. Maximum is 1.41' >&2; exit 1"}, "too new"),
        ({"version": "exit 1"}, "without a reason"),
        ({"server": "linux\nPodman Engine\n"}, r"leads to Podman Engine \(e\.g\. Podman\), not to Docker's engine"),
        ({"server": ""}, "leads to another program"),
        # podman-docker without a service
        ({"version": "echo 'Error: nil pointer evaluating *define.Version.Os' >&2; exit 125"}, "nil pointer"),
        ({"version": "echo Emulate Docker CLI using podman. >&2; echo Client: Podman Engine"}, "another program"),
        ({"server": "linux\ncontainerd\nrunc\n"}, "leads to containerd"),  # nerdctl
        ({"server": "windows\nEngine\n"}, "Windows containers"),
        ({"builder": UNREACHABLE}, r"builder does not answer \(dial tcp 10\.0\.0\.9:1234: timeout\)"),
    ],
)  # fmt: skip
def test_a_docker_that_cannot_build_is_refused(
    install: Install, kind: dict[str, Any], problem: str, warnings: list[str]
) -> None:
    install(**kind)
    text = refusal()
    assert text.startswith("image_build: 'local' needs Docker on this machine, but ")
    assert "set image_build to codebuild, or image_uri to an existing image" in text
    assert re.search(problem, text)
    assert "\n" not in text
    assert not warnings


def test_a_slow_or_uncertain_build_is_warned_of(
    install: Install, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    install(builder=ARM64, host=platform.node())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8 * 2**30))
    assert docker.check() is None
    emulated, full = warnings
    assert "the builder has no linux/amd64 (linux/arm64, linux/arm/v7): emulated, it is slow and may fail" in emulated
    assert full.endswith(" has 8 GiB left, of some 25 that image and cache take")


@pytest.mark.parametrize("host", ["elsewhere", "docker-desktop", ""])
def test_the_disk_of_another_machine_is_not_measured(
    install: Install, host: str, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    install(host=host)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert docker.check() is None
    assert not warnings


def test_hanging_docker_times_out(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version="exec /bin/sleep 60")
    monkeypatch.setattr(docker, "SECONDS", 0.1)
    assert "Docker does not answer within 0.1 s" in refusal()


def test_hanging_builder_times_out(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    ask = docker._docker
    monkeypatch.setattr(docker, "_docker", lambda *asked: None if asked[0] == "buildx" else ask(*asked))
    assert "the selected builder does not answer (no answer within 20 s)" in refusal()


@pytest.mark.parametrize(("value", "builds"), [("0", False), ("false", False), ("off", False), ("1", True), ("", True)])
def test_buildkit_turned_off_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch, value: str, builds: bool
) -> None:
    install()
    monkeypatch.setenv("DOCKER_BUILDKIT", value)
    if builds:
        assert docker.check() is None
    else:
        assert "DOCKER_BUILDKIT in the environment turns BuildKit off (unset it)" in refusal()


def test_docker_daemon_without_command_is_accepted(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Docker is not installed" in refusal()
    monkeypatch.setenv("DOCKER_HOST", "tcp://build.example:2376")
    assert docker.check() is None
    monkeypatch.delenv("DOCKER_HOST")
    (machine / "docker.sock").touch()
    assert docker.check() is None


def test_missing_credential_store_is_named(install: Install) -> None:
    folder = install()
    (folder / "config.json").write_text('{"credsStore": "desktop"}')
    assert "config.json names docker-credential-desktop, which is not in PATH; " in refusal()
    helper = folder / "docker-credential-desktop"
    helper.write_text("#!/bin/sh\n")
    helper.chmod(0o700)
    assert docker.check() is None


@pytest.mark.parametrize("config", ["{}", "not JSON", "[]", "\xff", '{"credHelpers": {"gcr.io": "gcloud"}}'])
def test_a_configuration_without_a_credential_store_passes(install: Install, config: str) -> None:
    (install() / "config.json").write_text(config, encoding="latin-1")
    assert docker.check() is None
