"""What the workers of a script tell one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Member:
    """One worker.

    Attributes:
        host: Its node's address.
        port: A free port there, or 0 if none has been chosen yet.
        node_rank: The rank of its node.
        network: The network of that address, such as 10.0.0.0/20, or None if other nodes can't reach it by one.
        silent_seconds: How long its script has given no sign of life.
        status: Its script's exit status, or None while it runs.
        daemons: With --mpi, the commands of the daemons that rank 0's mpirun wants on the other nodes, by their ranks.
        daemon_status: With --mpi, the exit status of its node's daemon, or None while there is none that has ended.
    """

    host: str
    port: int
    node_rank: int
    network: str | None = None
    silent_seconds: float = 0.0
    status: int | None = None
    daemons: Mapping[int, str] = field(default_factory=dict)
    daemon_status: int | None = None
