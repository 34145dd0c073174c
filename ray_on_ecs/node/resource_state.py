"""State of the cluster's resources in Ray's GCS, as its autoscaler reads it: nodes, and what programs wait for.

All names of Ray that this package's part of a node uses and that are not public are here, but for those of the
processes: an upgrade of Ray that moves one fails in the tests of this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ray_on_ecs.node import api
from ray_on_ecs.pools import Condition, Request

TIMEOUT_SECONDS = 10  # the next minute asks again
# Ray counts in ten-thousandths; a smaller remainder is a rounding error of a sum.
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Node:
    """Ray node that is alive: its IP address, labels, and resources by their names in Ray.

    `idle_seconds` is 0 as long as it runs something, which may need neither GPUs nor CPUs.
    """

    address: str = ""
    labels: Mapping[str, str]
    total: Mapping[str, float]
    available: Mapping[str, float]
    idle_seconds: float = 0.0

    def used(self, name: str) -> float:
        """Return the amount of a resource that runs work, or that a placement group reserves."""
        return self.total.get(name, 0) - self.available.get(name, 0)

    @property
    def is_used(self) -> bool:
        """True if GPUs or CPUs are used."""
        return any(round(self.used(name), DIGITS) > 0 for name in ("CPU", "GPU"))


@dataclass(frozen=True, kw_only=True)
class ResourceState:
    """Nodes and requests, each request with its number.

    Pending tasks, actors and placement groups wait for resources. Requested are those of
    `ray.autoscaler.sdk.request_resources`, independent of pending work: Ray Data uses it to double the resources of a
    busy pipeline.
    """

    nodes: tuple[Node, ...] = ()
    pending: tuple[tuple[Request, int], ...] = ()
    requested: tuple[tuple[Request, int], ...] = ()


def read(gcs_address: str) -> ResourceState:
    """Read the state from the GCS at `host:port`; any of Ray's errors if it doesn't answer in some seconds."""
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL

    # Without an autoscaler, request_resources leaves its bundles under this key, without their label selectors, and
    # the message does not have them.
    client = gcs_client(gcs_address)
    stored = client.internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, timeout=TIMEOUT_SECONDS)
    return parse(_message(client), json.loads(stored or "[]"))


def read_nodes(gcs_address: str) -> tuple[Node, ...]:
    """Read the nodes alone."""
    return parse(_message(gcs_client(gcs_address))).nodes


def read_gangs(gcs_address: str) -> dict[str, list[Request]]:
    """Read what each placement group waits for, by its ID; any of Ray's errors as above."""
    gangs = _message(gcs_client(gcs_address)).pending_gang_resource_requests
    return {gang.details.partition(":")[0]: _gang(gang) for gang in gangs}


def _message(client: Any) -> Any:
    reply = _messages("autoscaler").GetClusterResourceStateReply()
    reply.ParseFromString(client.get_cluster_resource_state(timeout_s=TIMEOUT_SECONDS))
    return reply.cluster_resource_state


def gcs_client(gcs_address: str) -> Any:
    """Return Ray's client of the GCS at `host:port`; OSError if that does not answer."""
    api.check_gcs(gcs_address)  # the client would wait for an unresponsive GCS and fill the log meanwhile
    from ray.autoscaler.v2 import sdk  # not at the top: it takes seconds and would delay `ray start`

    return sdk.GcsClient(gcs_address)


def _messages(name: str) -> Any:
    """Return a module of Ray's messages, whose members protobuf makes when it is imported."""
    return import_module(f"ray.core.generated.{name}_pb2")


def parse(state: Any, stored: Iterable[Mapping[str, float]] = ()) -> ResourceState:
    """Return the state in Ray's message, and the bundles of request_resources that are stored elsewhere."""
    status = _messages("autoscaler").NodeStatus
    nodes = [
        Node(
            address=node.node_ip_address,
            labels=dict(node.labels),
            total=dict(node.total_resources),
            available=dict(node.available_resources),
            idle_seconds=node.idle_duration_ms / 1000 if node.status == status.Value("IDLE") else 0.0,
        )
        for node in state.node_states
        if node.status != status.Value("DEAD")
    ]
    pending = [(_request(each.request), each.count) for each in state.pending_resource_requests]
    for gang in state.pending_gang_resource_requests:
        pending += [(request, 1) for request in _gang(gang)]
    requested = [(Request(bundle), 1) for bundle in stored]
    for constraint in state.cluster_resource_constraints:
        requested += [(_request(each.request), each.count) for each in constraint.resource_requests]
    return ResourceState(nodes=tuple(nodes), pending=tuple(pending), requested=tuple(requested))


def _gang(gang: Any) -> list[Request]:
    """Return the requests of a placement group; one for all of its bundles if they have to be on one node."""
    selected = gang.bundle_selectors[0].resource_requests if gang.bundle_selectors else gang.requests
    requests = [_request(each) for each in selected]
    strategy = gang.details.rpartition("|")[0].rpartition(":")[2]  # of `ID:STRICT_PACK|PENDING`
    if strategy != "STRICT_PACK":
        return requests
    total: dict[str, float] = {}
    for request in requests:
        for name, amount in request.resources.items():
            total[name] = total.get(name, 0) + amount
    return [Request(total, tuple(dict.fromkeys(each for request in requests for each in request.conditions)))]


def _request(request: Any) -> Request:
    is_not = _messages("common").LabelSelectorOperator.Value("LABEL_OPERATOR_NOT_IN")
    selectors = [
        tuple(
            Condition(each.label_key, tuple(each.label_values), each.operator == is_not)
            for each in selector.label_constraints
        )
        for selector in request.label_selectors
    ]
    return Request(dict(request.resources_bundle), *selectors[:1], fallbacks=tuple(selectors[1:]))
