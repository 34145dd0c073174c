"""Messages between a run's driver and its workers: the driver polls each worker with its directive.

Each message has the whole state, not changes, so the next one makes good for one that is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ray_on_ecs.run.collectives import Reading
from ray_on_ecs.run.extent import Extent
from ray_on_ecs.run.last_words import LastWords
from ray_on_ecs.run.nccl_log import Transport
from ray_on_ecs.run.stacks import Stacks
from ray_on_ecs.tracking.end import Steps


@dataclass(frozen=True)
class WorkerRank:
    """Ranks of a worker and sizes of its group, as torchrun has them; the defaults are of a group of one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0


@dataclass(frozen=True)
class Place:
    """The node of a worker.

    Attributes:
        host: Its address.
        node_id: Ray's ID of it, or nothing on the only machine of a run without Ray.
        shares_machine: True if another node is on the same machine, as in tests.
    """

    host: str = "127.0.0.1"
    node_id: str = ""
    shares_machine: bool = False


@dataclass(frozen=True)
class Peer:
    """A worker as the others know it.

    Attributes:
        host: Its node's address.
        port: A port there that was free.
        node_rank: The rank of its node.
        network: The network of that address, such as 10.0.0.0/20, or None if other nodes can't reach it by one.
        store: From rank 0: the address of the process groups' store, or None if the script serves it.
    """

    host: str
    port: int
    node_rank: int = 0
    network: str | None = None
    store: tuple[str, int] | None = None


@dataclass(frozen=True)
class FilesStatus:
    """The files of a node, as its first worker reports them.

    Attributes:
        state: Names the state of the folder at the last look: it changes with the files.
        part: The name of the last stored part of the folder.
        part_state: The state that this part has stored.
        checked: The last poll that had arrived before a look found the folder in that state.
        is_last: True once the scripts of the node have ended and its last part is stored.
        committed: Of node 0: the parts by node in the last snapshot that it has written.
    """

    state: int = 0
    part: str = ""
    part_state: int = 0
    checked: int = 0
    is_last: bool = False
    committed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkStatus:
    """A worker's part in the measurement of the network.

    Attributes:
        transport: The network that its library has chosen, once that is known; None without a part.
        seconds: The time of an all-reduce, once it is measured; 0 before, and without a part.
        failure: Why its part has failed; empty if it has not.
        has_ended: True once its part is done, or has failed.
    """

    transport: Transport | None = None
    seconds: float = 0.0
    failure: str = ""
    has_ended: bool = False


@dataclass(frozen=True)
class WorkerStatus:
    """The status of one worker, its answer to a poll.

    Attributes:
        peer: What the others need to know of it; None until it has chosen a port for this start.
        generation: Number of the start of the scripts, from 0; -1 before the first.
        started_at: When its script was started (Unix time), or None before.
        pid: The process whose descendant its script is, once that is started.
        silent_seconds: How long its script has given no sign of life.
        status: Its script's exit status, or None while it runs.
        ended_at: When its script ended (Unix time), or None while it runs.
        rested_at: The last time (Unix time) at which its script, which gets or has got SIGTERM, had no file open for
            writing; 0 before.
        words: Why its script ended.
        log: The end of its script's output, once that has ended.
        is_cut: True if its script has got SIGTERM, or has asked `seconds_left` in a notice, and so may not be done.
        has_ended: True once its script has ended, and with --mpi all of its processes.
        is_stored: True once its last files have been stored, or could not be.
        not_stored: The reason why they could not be stored, or None.
        dropped: A file that was not stored, as its script was killed when it may have been half-written.
        files: The files of its node, from the first worker of that; None from others.
        stacks: The stacks of its script that the driver wanted last.
        step: From rank 0: the steps that its script has reported, or None before the first.
        metrics: From rank 0: number and content of the last record of the metrics.
        guess: From rank 0: loss and step in the output of a script that reports none.
        steps: From rank 0: the steps of the training, reported or printed; None before the first.
        url: From rank 0: the page of the run at an experiment tracker.
        extent: From rank 0: where this start began, and how far it is.
        readings: Of each rank of its script, the last reading of the collectives that it has joined.
        clock: When it answered (Unix time), by its clock; in the driver, how far that is behind the driver's, at most.
        is_prepared: True once the packages of --requirements can be installed, as far as it depends on this worker: the
            first one of a node has brought the code, and rank 0 has resolved them.
        daemons: With --mpi, the commands of the daemons that rank 0's mpirun wants on the other nodes, by their ranks.
        daemon_status: With --mpi, the exit status of its node's daemon, or None while there is none that has ended.
        error: The error that has ended the worker itself, with its traceback in `where`.
        where: See `error`.
        has_left: True once the worker does nothing more.
        network: Its part in the measurement of the network, or None before.
        hardware: From rank 0: number and kind of the workers; None if a Ray program starts them: see Home.
    """

    peer: Peer | None = None
    generation: int = -1
    started_at: float | None = None
    pid: int = 0
    silent_seconds: float = 0.0
    status: int | None = None
    ended_at: float | None = None
    rested_at: float = 0.0
    words: LastWords = field(default_factory=LastWords)
    log: tuple[str, ...] = ()
    is_cut: bool = False
    has_ended: bool = False
    is_stored: bool = False
    not_stored: str | None = None
    dropped: str = ""
    files: FilesStatus | None = None
    stacks: Stacks | None = None
    step: int | None = None
    metrics: tuple[int, dict[str, Any]] | None = None
    guess: dict[str, Any] = field(default_factory=dict)
    steps: Steps | None = None
    url: str | None = None
    extent: Extent = field(default_factory=Extent)
    readings: Sequence[Reading] = ()
    clock: float = 0.0
    is_prepared: bool = False
    daemons: Mapping[int, str] = field(default_factory=dict)
    daemon_status: int | None = None
    error: Exception | None = None
    where: str = ""
    has_left: bool = False
    network: NetworkStatus | None = None
    hardware: dict[str, Any] | None = None


# The statuses of the workers by rank.
WorkerStatuses = Mapping[int, WorkerStatus]


@dataclass(frozen=True)
class Directive:
    """The driver's word to the workers of a group.

    Attributes:
        generation: Number of the start of the scripts; a greater number than theirs starts the scripts again.
        action: Run the scripts; end them by SIGTERM, or by SIGABRT because they hang, which leaves their stacks; or
            leave: the run is over for these workers.
        others_follow: On leaving, True if the run goes on in another group, which uses the files that the nodes have.
        end_at: When what is left gets SIGKILL (Unix time).
        reclaimed: The ranks on nodes that are being reclaimed at that time.
        waits: True if scripts without a Checkpointer, too, get SIGTERM only in the last seconds.
        resumes: True if the script starts with kept files of the run.
        stacks: The ID of a request for the scripts' stacks, which run on.
        are_read: True once all workers have read the stacks of scripts that hang: an end of one changes the others.
        is_prepared: True once this is so for all workers.
        peers: The workers by rank, once all are ready to start their scripts.
        measures: True while the workers measure the network, before they start their scripts.
        pids: The processes whose descendants are the scripts that have not ended well, by node.
        ended: The nodes on which all scripts have ended.
        killed: The nodes on which a script was killed, perhaps in the middle of a write, and the earliest `rested_at`
            of these; None if a worker was lost, whose script may still run.
        scan: True if the driver waits for the nodes' next look at their folders.
        commit: The parts by node that node 0 should write as a snapshot.
        daemons: With --mpi: see WorkerStatus.
        daemon_statuses: With --mpi: the exit statuses of the daemons that have ended, by node.
        mpirun_has_ended: With --mpi: True once rank 0's mpirun has ended.
    """

    generation: int = 0
    action: Literal["run", "end", "abort", "leave"] = "run"
    others_follow: bool = False
    end_at: float = 0.0
    reclaimed: tuple[int, ...] = ()
    waits: bool = False
    resumes: bool = False
    stacks: str = ""
    are_read: bool = False
    is_prepared: bool = False
    peers: tuple[Peer, ...] = ()
    measures: bool = False
    pids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    killed: Mapping[int, float | None] = field(default_factory=dict)
    scan: bool = False
    commit: Mapping[int, str] = field(default_factory=dict)
    daemons: Mapping[int, str] = field(default_factory=dict)
    daemon_statuses: Mapping[int, int] = field(default_factory=dict)
    mpirun_has_ended: bool = False


class Group(Protocol):
    """The workers of a run, from when they get their places until they are given up.

    Attributes:
        lost: The reasons why workers are lost, by rank.
        next_poll: The number of the poll that is sent next.
    """

    lost: dict[int, str]
    next_poll: int

    @property
    def ranks(self) -> Sequence[WorkerRank]:
        """The rank of each worker, once all have their places."""

    @property
    def places(self) -> Sequence[Place]:
        """The place of each worker, by rank."""

    def poll(self, directive: Directive) -> WorkerStatuses:
        """Tell the workers the directive; return the last statuses of those that have begun. Takes a part of a second.

        Raises:
            NoPlacesError: The workers did not get their places.
            GroupError: They could not begin.
        """

    def replace_lost(self) -> bool:
        """Start lost workers again in their places; return False if these are lost, too."""

    def can_grow(self) -> bool:
        """Return whether an elastic run could have more workers now."""

    def close(self) -> None:
        """Give up the workers and their places."""


class GroupError(Exception):
    """The workers could not begin, or are out of reach."""


class NoPlacesError(GroupError):
    """The workers did not get places within the time that a run waits for them."""
