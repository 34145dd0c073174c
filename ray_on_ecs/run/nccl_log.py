"""NCCL's log of NCCL_DEBUG=INFO: the network that NCCL uses between nodes, and why that is not EFA.

The last word is the line with which a communicator takes its network: a plugin may have found EFA devices, and NCCL
may still use sockets. The lines differ between the versions of NCCL and of its plugin for EFA, aws-ofi-nccl.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ray_on_ecs.errors import counted

EFA, SOCKETS = "EFA", "sockets"
TAKEN = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$")
PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,*]+).*?(?:\(found (\d+) nics\)|$)")
GROUPED = re.compile(r"NET/OFI NIC group \d+ device #\d+ \S+")
INTERFACES = re.compile(r"NET/(\w+) ?: Using (\[\d+\][^;]*)")
INTERFACE = re.compile(r"\[\d+\]([^\s:]+):")
# Lines that tell why it is not EFA, and the reason; the first that is found counts.
REASONS = (
    (re.compile(r"NCCL_NET(?:_PLUGIN)? set by environment to (\S+?)\.?$"), "its variables choose {0}"),
    (re.compile(r"eligible providers|optimal provider|provider efa output empty"), "its plugin found no EFA device"),
    (re.compile(r"aws-ofi-nccl initialization failed|OFI NCCL failure"), "its plugin for EFA could not start"),
    (
        re.compile(r"Could not find: ?\S*libnccl-net|No plugin found|libnccl-net\S*: cannot open shared object"),
        "it did not find its plugin, libnccl-net.so of aws-ofi-nccl",
    ),
)


@dataclass(frozen=True)
class Transport:
    """Network that a library uses between nodes.

    Attributes:
        library: NCCL or Gloo.
        name: EFA, sockets, InfiniBand, or as a plugin names it.
        count: The number of its interfaces on a node; 0 if it is not known.
        interfaces: Their names, if the library says them.
        reason: Why it is not EFA, if the log has it.
    """

    library: str
    name: str
    count: int = 0
    interfaces: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        known = ", ".join(self.interfaces) or (counted(self.count, "interface") if self.count else "")
        return f"{self.library} uses {self.name}{f' ({known})' if known else ''}"


def transport_in(lines: Iterable[str]) -> Transport | None:
    """Return the network that the log's last communicator takes; None if the log does not tell."""
    text = [line.rstrip() for line in lines]
    taken = _last(TAKEN, text)
    if taken is None:
        return None
    name = taken[1]
    reason = next((why.format(*found.groups()) for line, why in REASONS if (found := _last(line, text))), "")
    if "libfabric" in name.lower():
        provider = _last(PROVIDER, text)
        if provider is None:  # EFA, or another one
            return None
        # Some versions count groups of interfaces, of which they list the members.
        grouped = {found[0] for line in text if (found := GROUPED.search(line))}
        count = max(int(provider[2] or 0), len(grouped))
        if provider[1].startswith("efa"):
            return Transport("NCCL", EFA, count)
        return Transport("NCCL", f"libfabric's provider {provider[1]}", count, reason=reason)
    listed = [found[2] for line in text if (found := INTERFACES.search(line)) and name.startswith(found[1])]
    interfaces = tuple(INTERFACE.findall(listed[-1])) if listed else ()
    shown = SOCKETS if name == "Socket" else "InfiniBand" if name.startswith("IB") else name  # of a plugin
    return Transport("NCCL", shown, len(interfaces), interfaces, reason)


def _last(pattern: re.Pattern[str], lines: list[str]) -> re.Match[str] | None:
    return next((found for line in reversed(lines) if (found := pattern.search(line))), None)
