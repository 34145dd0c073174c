"""Pools: candidates of a run, kinds of nodes and of requests, and label selectors, as tables of cases."""

from __future__ import annotations

from typing import Any

import pytest

from ray_on_ecs import pools
from ray_on_ecs.contract import GPUS
from ray_on_ecs.errors import UsageError
from ray_on_ecs.pools import GPU_LABEL, GPU_RESOURCE, MARKET_LABEL, TYPE_LABEL, ZONE_LABEL, Condition, Request
from tests.worker_pools import cpu_group, node_group, workers

GROUP = "ray.io/node-group"
RTX = "RTX PRO Server 6000"
ALL = workers(
    workers=node_group(),
    workers_b=node_group(zone="us-west-2b"),
    cpu_workers=cpu_group(),
    h100_workers=node_group("h100", "p5.48xlarge", zone="us-west-2c", units=8, max=2),
    mixed_workers=node_group("mixed", "g5.xlarge", "g6.xlarge"),
    rtx_workers=node_group("rtx", "g7e.2xlarge", gpu=RTX, spot=True),
    off_workers=node_group("off", "g6e.xlarge", max=0),
)
SINGLE = workers(workers=node_group())


def of(*words: str, is_not: bool = False, label: str = GROUP) -> Condition:
    return Condition(label, tuple(words), is_not)


# Runs


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({}, ["workers", "workers-b", "h100-workers", "mixed-workers", "rtx-workers"]),
        ({"gpus": ["A10G"]}, ["workers", "workers-b"]),
        ({"gpus": ["a10g"]}, ["workers", "workers-b"]),
        ({"gpus": ["H100", "A10G"]}, ["h100-workers", "workers", "workers-b"]),
        ({"gpus": ["H100", "h100"]}, ["h100-workers"]),
        ({"gpus": ["L40S", "H100"]}, ["h100-workers"]),
        ({"gpus": ["A10G or L4"]}, ["mixed-workers"]),
        ({"gpus": [RTX]}, ["rtx-workers"]),
        ({"gpus": ["rtx pro 6000"]}, ["rtx-workers"]),
        ({"gpus": ["RTX-PRO-6000"]}, ["rtx-workers"]),
        ({"gpus": ["rtx-pro-server-6000"]}, ["rtx-workers"]),
        ({"pools": ["default"]}, ["workers", "workers-b"]),
        ({"pools": ["cpu"]}, ["cpu-workers"]),
        ({"pools": ["mixed", "default"]}, ["mixed-workers", "workers", "workers-b"]),
        ({"pools": ["off", "h100"]}, ["h100-workers"]),
    ],
)
def test_candidates_of_a_run_in_its_order(given: dict[str, Any], kinds: list[str]) -> None:
    assert pools.candidates(ALL, **given) == kinds


@pytest.mark.parametrize("is_block", [True, False])
def test_reserved_pool_comes_before_cheaper_ones(is_block: bool) -> None:
    info = workers(
        workers=node_group(),
        l4_workers=node_group("l4", "g6.xlarge"),
        h100_workers=node_group("h100", "p5.48xlarge", units=8),
    )
    for prices in (None, {"p5.48xlarge": 55.04, "g6.xlarge": 0.8, "g5.xlarge": 1.0}):
        info["prices"] = prices
        info["groups"]["h100-workers"]["reservation"] = {"id": "cr-0123456789abcdef0", "is_block": is_block}
        assert [*pools.kinds_by_pool(info)] == ["default", "h100", "l4"]


@pytest.mark.parametrize(
    ("prices", "order"),
    [
        (None, ["default", "h100", "l4", "mixed", "old"]),
        ({"p5.48xlarge": 55.04, "g6.xlarge": 0.8, "g5.xlarge": 1.0}, ["default", "l4", "mixed", "h100", "old"]),
        ({"g5.xlarge": 99.0, "p5.48xlarge": 1.0, "g4dn.xlarge": 1.0}, ["default", "h100", "old", "l4", "mixed"]),
    ],
)
def test_runs_without_a_choice_try_the_cheapest_pool_after_default(prices: Any, order: list[str]) -> None:
    info = workers(
        old_workers=node_group("old", "g4dn.xlarge"),
        mixed_workers=node_group("mixed", "g6.xlarge", "g5.xlarge"),
        l4_workers=node_group("l4", "g6.xlarge", spot=True),
        h100_workers=node_group("h100", "p5.48xlarge", units=8),
        workers=node_group(),
    )
    info["prices"] = prices
    assert [info["groups"][kind]["pool"] for kind in pools.candidates(info)] == order
    assert [info["groups"][kind]["pool"] for kind in pools.kinds_of_request(Request({"GPU": 1}), info)] == order


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpus": ["B200"]}, "--gpu: 'B200' is not a GPU of this stack; it has default (4 x g5.xlarge: A10G), "),
        ({"gpus": ["A10"]}, "--gpu: 'A10' is not a GPU of this stack; did you mean A10G? it has "),
        ({"gpus": ["h1000"]}, "did you mean H100?"),
        ({"gpus": [""]}, "--gpu: '' is not a GPU of this stack; it has "),
        ({"gpus": ["cpu"]}, "--gpu: 'cpu' is not a GPU of this stack; it has "),
        ({"gpus": ["A10G", "B200"]}, "--gpu: 'B200'"),
        ({"pools": ["H100"]}, "--pool: 'H100' is not a pool of this stack; did you mean h100? it has "),
        ({"pools": ["defualt"]}, "did you mean default?"),
        ({"pools": ["h100-workers"]}, "--pool: 'h100-workers' is not a pool of this stack; it has "),
        ({"pools": ["head"]}, "--pool: 'head' is not a pool of this stack; it has "),
        ({"pools": ["off"]}, "--pool: 'off' can't have a node; raise workerPools.off.max, which is 0, and pulumi up"),
        ({"gpus": ["L40S"]}, "--gpu: 'L40S' can't have a node; raise workerPools.off.max, which is 0"),
        ({"gpus": ["L4"]}, "--gpu: 'L4' can't be chosen alone, as the instances of pool mixed have A10G or L4; give "),
        ({"gpus": ["H100", "l4"]}, "give --pool mixed for either"),
    ],
)
def test_a_name_that_the_stack_does_not_have_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        pools.candidates(ALL, **given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_pools_in_words() -> None:
    few = workers(workers=node_group(), cpu_workers=cpu_group(), h100_workers=ALL["groups"]["h100-workers"])
    words = "default (4 x g5.xlarge: A10G), cpu (4 x m7i.2xlarge: 8 CPUs) and h100 (2 x p5.48xlarge: 8 x H100)"
    assert pools.describe(few) == words
    assert pools.describe(workers()) == "no pools"


# Nodes


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ({}, "workers"),
        ({ZONE_LABEL: "us-west-2a"}, "workers"),
        ({ZONE_LABEL: "us-west-2b"}, "workers-b"),
        ({ZONE_LABEL: "us-west-2d"}, None),
        ({GROUP: "", ZONE_LABEL: "us-west-2b"}, "workers-b"),
        ({GROUP: "cpu-workers", ZONE_LABEL: "us-west-2a"}, "cpu-workers"),
        ({GROUP: "cpu-workers", ZONE_LABEL: "us-west-2b"}, None),
        ({GROUP: "h100"}, "h100-workers"),
        ({GROUP: "h100", ZONE_LABEL: "us-west-2b"}, None),
        ({GROUP: "off"}, "off-workers"),
        ({GROUP: "gone", ZONE_LABEL: "us-west-2a"}, None),
        ({GROUP: "default"}, None),
        ({GROUP: "cpu"}, None),
        ({"instance-type": "p5.48xlarge"}, "workers"),
    ],
)
def test_kind_of_a_node_by_its_labels(labels: dict[str, str], kind: str | None) -> None:
    assert pools.kind_of_node(labels, ALL) == kind


def test_a_group_over_several_zones_has_the_nodes_of_all() -> None:
    spread = workers(workers=node_group(zones=["us-west-2a", "us-west-2b"]))
    assert {pools.kind_of_node({ZONE_LABEL: f"us-west-2{each}"}, spread) for each in "ab"} == {"workers"}
    assert pools.selector("workers", spread) == {}


def test_selectors_choose_each_kind_of_node_and_no_other() -> None:
    """A selector, read by Ray's rules, against the labels of a node of each kind."""
    for kind in ALL["groups"]:
        for other, its in ALL["groups"].items():
            label = pools.label_of_pool(its["pool"])
            labels = {ZONE_LABEL: its["zones"][0], **({GROUP: label} if label else {})}
            is_chosen = all(_matches(labels.get(key, ""), value) for key, value in pools.selector(kind, ALL).items())
            assert is_chosen == (kind == other)


def _matches(value: str, condition: str) -> bool:
    if condition.startswith("!in("):
        return value not in condition[4:-1].split(",")
    return value == condition


def test_a_stack_of_one_group_selects_nothing() -> None:
    assert pools.selector("workers", SINGLE) == {}
    with_cpus = workers(workers=node_group(), cpu_workers=cpu_group())
    assert pools.selector("workers", with_cpus) == {GROUP: "!in(cpu-workers)"}


# Requests


@pytest.mark.parametrize(
    ("resources", "conditions", "kind"),
    [
        ({"GPU": 1}, [], "workers"),
        ({"GPU": 0.5, "CPU": 1}, [], "workers"),
        ({"GPU": 2}, [], "h100-workers"),
        ({"GPU": 8}, [of("h100")], "h100-workers"),
        ({"GPU": 9}, [], None),
        ({"GPU": 2}, [of("mixed")], None),
        ({"CPU": 1}, [], "cpu-workers"),
        ({"CPU": 99}, [], "cpu-workers"),
        ({"CPU": 1}, [of("h100")], "h100-workers"),
        ({"CPU": 1}, [of("cpu-workers", is_not=True)], "workers"),
        ({"memory": 1e9}, [], "cpu-workers"),
        ({"GPU": 1}, [of("h100")], "h100-workers"),
        ({"GPU": 1}, [of("mixed", "h100")], "h100-workers"),
        ({"GPU": 1}, [of("cpu-workers")], None),
        ({"GPU": 1}, [of("gone")], None),
        ({"GPU": 1}, [of("gone", is_not=True)], "workers"),
        ({"GPU": 1}, [of("h100", "mixed", "cpu-workers", is_not=True)], "workers"),
        ({"GPU": 1}, [of("default")], None),
        ({"GPU": 1}, [of("default", is_not=True)], "workers"),
        ({"GPU": 1}, [of("")], "workers"),
        ({"GPU": 1}, [of("", is_not=True)], "h100-workers"),
        ({"GPU": 1}, [of("us-west-2b", label=ZONE_LABEL)], "workers-b"),
        ({"GPU": 1}, [of("us-west-2a", label=ZONE_LABEL, is_not=True)], "workers-b"),
        ({"GPU": 1}, [of("us-west-2c", label=ZONE_LABEL), of("h100", is_not=True)], None),
        ({"GPU": 1}, [of("g6.xlarge", label=TYPE_LABEL)], "mixed-workers"),
        ({"GPU": 1}, [of("g5.xlarge", label=TYPE_LABEL, is_not=True)], "h100-workers"),
        ({"CPU": 1}, [of("m7i.2xlarge", label=TYPE_LABEL)], "cpu-workers"),
        ({"GPU": 1}, [of("spot", label=MARKET_LABEL)], "rtx-workers"),
        ({"GPU": 1}, [of("on-demand", label=MARKET_LABEL)], "workers"),
        ({"GPU": 1}, [of("spot", label=MARKET_LABEL), of("h100")], None),
        ({"GPU": 1}, [of("H100", label=GPU_LABEL)], "h100-workers"),
        ({"GPU": 1}, [of("h100", label=GPU_LABEL)], None),
        ({"GPU": 1}, [of("A10G", label=GPU_LABEL, is_not=True)], "h100-workers"),
        ({"CPU": 1}, [of("A10G", label=GPU_LABEL, is_not=True)], "cpu-workers"),
        ({"GPU": 1}, [of("L4", label=GPU_LABEL)], "mixed-workers"),
        ({"GPU": 1}, [of("1", label="of-another-program")], "workers"),
        ({"GPU": 1}, [of("1", label="of-another-program", is_not=True)], "workers"),
        ({"GPU": 1}, [of("off")], "off-workers"),
    ],
)
def test_kind_that_is_started_for_a_request(
    resources: dict[str, float], conditions: list[Condition], kind: str | None
) -> None:
    assert pools.kind_of_request(Request(resources, tuple(conditions)), ALL) == kind


@pytest.mark.parametrize(
    ("conditions", "fallbacks", "kind"),
    [
        ([of("gone")], [[of("h100")]], "h100-workers"),
        ([of("gone")], [[of("also-gone")], []], "workers"),
        ([of("mixed")], [[of("h100")]], "mixed-workers"),
        ([of("off")], [[of("h100")]], "h100-workers"),
        ([of("off")], [[of("gone")]], "off-workers"),
        ([of("gone")], [[of("also-gone")]], None),
        ([], [[of("h100")]], "workers"),
    ],
)
def test_the_first_selector_that_a_kind_fits_decides(conditions: Any, fallbacks: Any, kind: str | None) -> None:
    request = Request({"GPU": 1}, tuple(conditions), tuple(map(tuple, fallbacks)))
    assert pools.kind_of_request(request, ALL) == kind


def test_larger_nodes_are_started_for_more_cpus() -> None:
    info = workers(workers=node_group(), cpu_workers=cpu_group(), big_workers=cpu_group("big", units=64))
    kinds = [pools.kind_of_request(Request({"CPU": number}), info) for number in (8, 9, 64, 65)]
    assert kinds == ["cpu-workers", "big-workers", "big-workers", "cpu-workers"]


def test_work_for_cpus_without_cpu_workers_goes_to_the_first_pool() -> None:
    assert pools.kinds_of_request(Request({"CPU": 8}), SINGLE) == ["workers"]
    off = workers(workers=node_group(), cpu_workers=cpu_group(max=0))
    assert pools.kind_of_request(Request({"CPU": 8}), off) == "workers"


# EC2's names of GPUs, the driver's names of them, and those that Ray makes of the latter.
NAMES = [
    ("T4", "Tesla T4"),
    ("T4g", "NVIDIA T4G"),
    ("A10G", "NVIDIA A10G"),
    ("L4", "NVIDIA L4"),
    ("L4", "NVIDIA L4-6Q"),
    ("L40S", "NVIDIA L40S"),
    ("V100", "Tesla V100-SXM2-16GB"),
    ("M60", "Tesla M60"),
    ("K80", "Tesla K80"),
    ("A100", "NVIDIA A100-SXM4-40GB"),
    ("A100", "NVIDIA A100-SXM4-80GB"),
    ("H100", "NVIDIA H100 80GB HBM3"),
    ("H200", "NVIDIA H200"),
    ("B200", "NVIDIA B200"),
    ("B300", "NVIDIA B300 SXM6 AC"),
    (RTX, "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ("RTX PRO Server 4500", "NVIDIA RTX PRO 4500 Blackwell Server Edition"),
]


@pytest.mark.parametrize(("gpu", "name"), NAMES)
def test_a_gpu_has_the_name_that_ray_gives_its_nodes(gpu: str, name: str) -> None:
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    of_ray = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(name)
    assert pools.ray_names(gpu) == [of_ray]
    info = workers(workers=node_group("other", "g6f.large", gpu="other"), x_workers=node_group("x", gpu=gpu))
    request = Request({"GPU": 1, f"{GPU_RESOURCE}{of_ray}": 0.001})
    assert pools.kind_of_request(request, info) == "x-workers"
    assert pools.candidates(info, gpus=[str(of_ray)]) == ["x-workers"]


def test_the_contracts_gpus_are_constants_of_ray() -> None:
    from ray.util.accelerators import accelerators

    of_ray = {value for name, value in vars(accelerators).items() if name.startswith("NVIDIA_")}
    unknown = {name for gpu in GPUS.values() for name in pools.ray_names(gpu)} - of_ray
    assert unknown <= {"RTX-PRO-4500"}, "Ray 2.60 does not know it yet"


@pytest.mark.parametrize("name", ["A100-40G", "a100", "H100", "NVIDIA_A100"])
def test_a_gpu_that_no_node_has_in_ray_starts_none(name: str) -> None:
    info = workers(workers=node_group("a100", "p4d.24xlarge", units=8))
    assert pools.kind_of_request(Request({"GPU": 1, f"{GPU_RESOURCE}{name}": 0.001}), info) is None


def test_a_request_in_words() -> None:
    request = Request({"GPU": 1, "CPU": 2, f"{GPU_RESOURCE}H100": 0.001}, (of("h100", "a"), of("b", is_not=True)))
    text = "1 GPU, 2 CPU and H100 and ray.io/node-group in (a, h100) and ray.io/node-group not in (b)"
    assert str(request) == text


def test_siblings_are_in_other_zones() -> None:
    assert list(pools.siblings("workers", ALL)) == ["workers-b"]
    assert list(pools.siblings("workers-b", ALL)) == ["workers"]
    assert list(pools.siblings("h100-workers", ALL)) == []
