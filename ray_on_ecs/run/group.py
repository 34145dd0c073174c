"""Messages of a worker group: the status that each worker reports, and the directive that the driver sends to all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ray_on_ecs.run.last_words import LastWords


@dataclass(frozen=True)
class FilesStatus:
    """The files of a node, as its first worker reports them.

    Attributes:
        part: The number of the stored part that its folder is at, or None while files change.
        stored: The number of the last part that it has stored.
        basis: The parts of the other nodes of which it knew, by their ranks, before it stored that one.
        confirmed: The last proposal that it has confirmed.
        is_last: True once its script has ended, so that the part is its last one.
        proposal: Of node 0: counts the proposals.
        parts: Of node 0: the numbers of the proposed parts by node.
    """

    part: int | None = None
    stored: int = 0
    basis: Mapping[int, int] = field(default_factory=dict)
    confirmed: int = 0
    is_last: bool = False
    proposal: int = 0
    parts: Mapping[int, int] = field(default_factory=dict)

    def confirms(self, proposal: int) -> bool:
        """Return whether the node's folder was at its part when that was proposed; after its script nothing changes."""
        return self.confirmed == proposal or self.is_last


@dataclass(frozen=True)
class WorkerStatus:
    """The status of one worker, which it reports to the driver.

    Attributes:
        host: Its node's address.
        port: A free port there, or 0 if none has been chosen yet.
        node_rank: The rank of its node.
        world_size: The number of workers of its group.
        node_id: Ray's ID of its node.
        pid: The ID of its process, whose descendant its script is.
        network: The network of that address, such as 10.0.0.0/20, or None if other nodes can't reach it by one.
        generation: Number of the start of the scripts, from 0.
        started_at: When its script was started (Unix time), or None before.
        silent_seconds: How long its script has given no sign of life.
        has_steps: True once its script has reported a step.
        status: Its script's exit status, or None while it runs.
        ended_at: When its script ended (Unix time), or None while it runs.
        words: Why its script ended.
        log: The end of its script's output, once that has ended.
        has_ended: True once its script has ended, and with --mpi all of its processes.
        is_stored: True once its last files have been stored, or could not be.
        not_stored: The reason why they could not be stored, or None.
        files: The files of its node, from the first worker of that; None from others.
        stacks: The stacks of its script, if the driver wants them.
        daemons: With --mpi, the commands of the daemons that rank 0's mpirun wants on the other nodes, by their ranks.
        daemon_status: With --mpi, the exit status of its node's daemon, or None while there is none that has ended.
        store: From rank 0 with --local: the port of the process group's store on this machine, otherwise 0.
    """

    host: str
    port: int
    node_rank: int
    world_size: int = 1
    node_id: str = ""
    pid: int = 0
    network: str | None = None
    generation: int = 0
    started_at: float | None = None
    silent_seconds: float = 0.0
    has_steps: bool = False
    status: int | None = None
    ended_at: float | None = None
    words: LastWords = field(default_factory=LastWords)
    log: tuple[str, ...] = ()
    has_ended: bool = False
    is_stored: bool = False
    not_stored: str | None = None
    files: FilesStatus | None = None
    stacks: str | None = None
    daemons: Mapping[int, str] = field(default_factory=dict)
    daemon_status: int | None = None
    store: int = 0


WorkerStatuses = Mapping[int, WorkerStatus]


@dataclass(frozen=True)
class Directive:
    """The driver's word to the workers of a group.

    Attributes:
        group: The workers that it is for.
        generation: Number of the start of the scripts; a greater number than theirs starts the scripts again.
        action: Run the scripts; end them by SIGTERM, or by SIGABRT because they hang, which leaves their stacks; or
            leave: the run is over for these workers.
        end_at: When what is left gets SIGKILL (Unix time).
        ranks: The ranks on nodes that are being reclaimed at that time.
        wants_stacks: True to read the scripts' stacks while they run on.
        past: Earlier groups, whose messages are ignored.
    """

    group: str
    generation: int
    action: Literal["run", "end", "abort", "leave"] = "run"
    end_at: float = 0.0
    ranks: tuple[int, ...] = ()
    wants_stacks: bool = False
    past: tuple[str, ...] = ()
