"""Server of the process groups' stores; it needs PyTorch and the standard library only.

usage: python -I tcp_store_server.py FD RANKS PID, with a socket that listens as FD; it serves all ranks until PID ends.

PyTorch gives each default group of a process the same keys. In one store, such as that of torchrun's agent, a rank that
makes its second group may read the addresses of the first, and wait for them for ever. Here each group has a new store:
this server passes on what clients and stores write, and counts the clients that join, since all ranks join a group
before any of them joins the next.

https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/TCPStore.cpp
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from contextlib import suppress
from functools import partial

from torch.distributed import TCPStore

HOST = "127.0.0.1"
BACKLOG = 1024
POLL_SECONDS = 0.2
CHUNK_BYTES = 2**16
# A client that joins increments this key, after a greeting of some bytes. Keys of users begin with a slash.
JOIN = (5).to_bytes(8, "little") + b"init/"
GREETING_BYTES = 64


class Stores:
    """The store of each group, which ends with its last client; `newest` is that of the newest group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._joined = 0
        self.newest = _new_store()

    def join(self) -> TCPStore:
        """Return the store of a client that joins a group."""
        if self._joined and self._joined % self._ranks == 0:
            self.newest = _new_store()
        self._joined += 1
        return self.newest


def _new_store() -> TCPStore:
    listener = socket.create_server((HOST, 0), backlog=BACKLOG)
    port: int = listener.getsockname()[1]
    return TCPStore(HOST, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


async def pass_on(stores: Stores, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
    """Pass on what a client writes to its store, and the answers."""
    greeting, is_greeting, answered = b"", True, 0

    async def answer(reader: asyncio.StreamReader) -> None:
        nonlocal answered
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                answered += len(data)
                answers.write(data)
                await answers.drain()
        answers.close()

    async def connect(store: TCPStore, said: bytes = b"") -> tuple[asyncio.StreamWriter, asyncio.Task[None]]:
        """Connect to a store, and say what was said to another one."""
        reader, writer = await asyncio.open_connection(HOST, store.port)
        writer.write(said)
        await reader.readexactly(answered)
        return writer, asyncio.create_task(answer(reader))

    store = stores.newest
    writer, answering = await connect(store)
    with suppress(OSError):
        while data := await client.read(CHUNK_BYTES):
            if is_greeting:
                said, greeting = greeting, greeting + data
                if JOIN in greeting and (joined := stores.join()) is not store:
                    answering.cancel()
                    writer.close()
                    store = joined
                    writer, answering = await connect(store, said)
                is_greeting = JOIN not in greeting and len(greeting) < GREETING_BYTES
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(descriptor: int, ranks: int, pid: int) -> None:
    """Serve until the process that has started this one ends."""
    listener = socket.socket(fileno=descriptor)
    server = await asyncio.start_server(partial(pass_on, Stores(ranks)), sock=listener, backlog=BACKLOG)
    while os.getppid() == pid:
        await asyncio.sleep(POLL_SECONDS)
    server.close()


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(serve(*map(int, sys.argv[1:])))
