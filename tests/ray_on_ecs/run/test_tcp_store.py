"""The store of a start's process groups: on one address, started by the first connection, ended with its start."""

import multiprocessing
import os
import re
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_on_ecs.node.ports import listens
from ray_on_ecs.run.tcp_store import HOST, serving
from tests.lazy import Lazy
from tests.waiting import until

distributed = Lazy("torch.distributed")


def client(address: tuple[str, int]) -> Any:
    return distributed.TCPStore(*address, None, False, timedelta(minutes=2), wait_for_workers=False)


def member(address: tuple[str, int]) -> Any:
    """A client that joins a group of two ranks."""
    return distributed.TCPStore(*address, 2, False, timedelta(minutes=2))


def servers(parent: int) -> list[psutil.Process]:
    children = psutil.Process(parent).children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "tcp_store_server.py" in " ".join(child.cmdline())]


@pytest.mark.parametrize("host", [HOST, "127.0.0.2", "::1"], ids=["one node", "several nodes", "IPv6"])
def test_ranks_share_a_store_at_one_address(host: str) -> None:
    with serving(sys.executable, 2, host) as address:
        one, other = client(address), client(address)
        one.set("key", "value")
        assert other.get("key") == b"value"
        [server] = servers(os.getpid())
        listeners = [
            connection.laddr for connection in server.net_connections("all") if connection.status == psutil.CONN_LISTEN
        ]
        assert {host for host, _ in listeners} <= {address[0], HOST}
        assert address in listeners
    assert not server.is_running()


def test_each_start_has_an_empty_store() -> None:
    for _ in range(2):
        with serving(sys.executable, 2) as address:
            assert client(address).add("starts", 1) == 1


def test_each_group_has_an_empty_store() -> None:
    """A model may hold the group that has been destroyed, and so its store."""
    with serving(sys.executable, 2) as address:
        groups = [[member(address), member(address)] for _ in range(3)]
        for number, (one, other) in enumerate(groups):
            one.set("address", str(number))
            assert other.get("address") == str(number).encode()
        late = client(address)
        assert late.get("address") == b"2"
        [server] = servers(os.getpid())

        def stores() -> int:
            return sum(connection.status == psutil.CONN_LISTEN for connection in server.net_connections("all")) - 1

        assert stores() == 3
        del one, other, groups[:2]
        until(lambda: stores() == 1)
        assert groups[0][1].get("address") == b"2"


def test_script_without_a_process_group_starts_no_server() -> None:
    with serving("not-an-interpreter", 2) as (_, port):
        assert servers(os.getpid()) == []
    own = psutil.Process().net_connections("all")  # another program may have the port by now
    assert port not in {each.laddr.port for each in own if each.status == psutil.CONN_LISTEN}


def test_interpreter_without_pytorch_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with serving(str(python), 2) as (_, port):
        assert listens(port)
        output = until(lambda: capfd.readouterr().out)
    assert re.fullmatch(rf"{python} can't serve the process group's store; that needs PyTorch 2.1\n", output)


def hold(pipe: Connection) -> None:
    with serving(sys.executable, 2) as address:
        pipe.send(address)
        signal.pause()


def test_killed_worker_leaves_no_server() -> None:
    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=hold, args=(there,))
    worker.start()
    store = client(here.recv())
    store.set("key", "value")
    [server] = servers(worker.pid or 0)
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join()
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
