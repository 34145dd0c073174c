"""The private names of Ray by which the head reads resources, in this release, and the parts of its message."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
from ray.autoscaler.v2 import sdk

from ray_on_ecs.node import resource_state
from ray_on_ecs.pools import Condition, Request

messages: Any = import_module("ray.core.generated.autoscaler_pb2")
common: Any = import_module("ray.core.generated.common_pb2")
raylet: Any = import_module("ray._raylet")
GROUP = "ray.io/node-group"


def request(resources: dict[str, float], *selectors: dict[str, Any]) -> Any:
    """Ray's message of a request; a selector has a list of values by label, negated by a leading `!`."""
    message = messages.ResourceRequest(resources_bundle=resources)
    for selector in selectors:
        constraints = message.label_selectors.add().label_constraints
        for label, values in selector.items():
            name = "LABEL_OPERATOR_NOT_IN" if values[0] == "!" else "LABEL_OPERATOR_IN"
            constraints.add(
                label_key=label,
                operator=common.LabelSelectorOperator.Value(name),
                label_values=values.lstrip("!").split(","),
            )
    return message


def gang(strategy: str, *requests: Any, selected: bool = True) -> Any:
    """Ray's message of a placement group that waits."""
    plain = [messages.ResourceRequest(resources_bundle=request.resources_bundle) for request in requests]
    gang = messages.GangResourceRequest(requests=plain, details=f"19e4e3:{strategy}|PENDING")
    if selected:
        gang.bundle_selectors.add(resource_requests=requests)
    return gang


def pending_of(*gangs: Any, single: Any = ()) -> list[tuple[Request, int]]:
    state = messages.ClusterResourceState(pending_gang_resource_requests=gangs, pending_resource_requests=single)
    return list(resource_state.parse(state).pending)


def test_ray_has_the_clients_calls() -> None:
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.autoscaler._private import commands

    calls = ("get_cluster_resource_state", "internal_kv_get", "internal_kv_put")
    assert all(hasattr(raylet.InnerGcsClient, name) for name in calls)
    assert "get_cluster_resource_state" in inspect.getsource(sdk.get_cluster_resource_state)
    assert isinstance(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, bytes)
    source = inspect.getsource(commands.request_resources)
    assert "AUTOSCALER_RESOURCE_REQUEST_CHANNEL" in source
    assert 'to_request_v1 = [req["resources"] for req in to_request]' in source, "selectors are not stored"


def test_alive_nodes_with_their_use() -> None:
    nodes = [
        messages.NodeState(
            node_ip_address=f"10.0.0.{number}",
            status=messages.NodeStatus.Value(status),
            labels={GROUP: "h100"},
            total_resources={"GPU": 8, "CPU": 96},
            available_resources={"GPU": 8 - used, "CPU": 96},
            idle_duration_ms=1500,
        )
        for number, (status, used) in enumerate([("RUNNING", 2), ("IDLE", 0), ("DEAD", 0), ("DRAINING", 0)])
    ]
    ray_nodes = resource_state.parse(messages.ClusterResourceState(node_states=nodes)).nodes
    assert [node.address for node in ray_nodes] == ["10.0.0.0", "10.0.0.1", "10.0.0.3"]
    assert [node.used("GPU") for node in ray_nodes] == [2, 0, 0]
    assert [node.is_used for node in ray_nodes] == [True, False, False]
    assert [node.idle_seconds for node in ray_nodes] == [0, 1.5, 0]
    assert ray_nodes[0].labels == {GROUP: "h100"}


def test_requests_with_their_selectors_and_fallbacks() -> None:
    wanted = {"GPU": 1.0}
    one = messages.ResourceRequestByCount(request=request(wanted, {GROUP: "x"}, {GROUP: "y,z"}, {GROUP: "!x"}), count=3)
    plain = messages.ResourceRequestByCount(request=request(wanted), count=1)
    empty = messages.ResourceRequestByCount(request=request(wanted, {}), count=2)
    x, yz = (Condition(GROUP, tuple(groups)) for groups in ("x", "yz"))
    not_x = Condition(GROUP, tuple("x"), is_not=True)
    assert pending_of(single=[one, plain, empty]) == [
        (Request(wanted, (x,), ((yz,), (not_x,))), 3),
        (Request(wanted), 1),
        (Request(wanted), 2),
    ]


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_SPREAD"])
def test_bundles_of_a_group_have_their_own_selectors(strategy: str) -> None:
    bundles = [request({"GPU": 1}, {GROUP: "h100"}), request({"CPU": 2})]
    of_h100 = Request({"GPU": 1}, (Condition(GROUP, ("h100",)),))
    assert pending_of(gang(strategy, *bundles)) == [(of_h100, 1), (Request({"CPU": 2}), 1)]
    assert pending_of(gang(strategy, *bundles, selected=False)) == [(Request({"GPU": 1}), 1), (Request({"CPU": 2}), 1)]


def test_bundles_for_one_node_are_one_request() -> None:
    bundles = [
        request({"GPU": 1, "CPU": 1}, {GROUP: "h100"}),
        request({"GPU": 3}, {GROUP: "h100"}),
        request({"GPU": 1}),
    ]
    [(need, count)] = pending_of(gang("STRICT_PACK", *bundles))
    assert (need.resources, count) == ({"GPU": 5, "CPU": 1}, 1)
    assert need.conditions == (Condition(GROUP, ("h100",)),)


def test_requests_of_programs_from_both_places() -> None:
    constraint = messages.ClusterResourceConstraint()
    constraint.resource_requests.add(request=request({"GPU": 2}, {GROUP: "h100"}), count=2)
    state = messages.ClusterResourceState(cluster_resource_constraints=[constraint])
    requests = resource_state.parse(state, [{"GPU": 1}, {"GPU": 1}]).requested
    of_h100 = Request({"GPU": 2}, (Condition(GROUP, ("h100",)),))
    assert requests == ((Request({"GPU": 1}), 1), (Request({"GPU": 1}), 1), (of_h100, 2))
