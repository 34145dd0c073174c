"""A laptop with a stack, whose commands wait as long as a busy machine needs."""

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path

import pytest

from ray_on_ecs.cli import doctor
from ray_on_ecs.cluster import aws, head, session
from tests.front import Front
from tests.ray_on_ecs.cli.account import SECONDS, Account, Laptop, create_account
from tests.ray_on_ecs.cli.folders import Folders
from tests.ray_on_ecs.ray_head import RayHead
from tests.serving import serving

LIMITS = {
    doctor: ("ANSWER_SECONDS",),
    aws: ("CONNECT_SECONDS", "READ_SECONDS"),
    session: ("OPEN_SECONDS", "PLUGIN_SECONDS"),
    head: ("REQUEST_SECONDS",),
}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without jobs: those of this machine are not the tests'."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """The storage path of `--local`, in the commands' folder, on a machine without a browser."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    return Folders(str(tmp_path / "results"))


@pytest.fixture(scope="session")
def account(aws_server: str) -> Account:
    return create_account(aws_server)


@pytest.fixture(scope="session")
def servers(aws_server: str) -> Iterator[tuple[Front, RayHead]]:
    with serving(Front(aws_server)) as front, serving(RayHead()) as head:
        yield front, head


@pytest.fixture
def stack(
    account: Account, servers: tuple[Front, RayHead], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Laptop]:
    for module, names in LIMITS.items():
        for name in names:
            monkeypatch.setattr(module, name, SECONDS)
    monkeypatch.setattr(doctor, "_shorten_timeouts", lambda: None)
    with ExitStack() as undo:
        yield Laptop(account.url, deepcopy(account.outputs), *servers, tmp_path, undo=undo)
