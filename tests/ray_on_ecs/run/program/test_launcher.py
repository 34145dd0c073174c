"""Variables that a Ray program has from its launcher."""

from __future__ import annotations

from typing import Any

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.program import launcher


def stack(**changed: Any) -> Any:
    group = {"pool": "default", "zones": ["us-west-2a"], "types": ["g5.12xlarge"], "gpu": "A10G", "units": 4, "max": 4}
    return {"groups": {"workers": {**group, "default_nodes": 2, **changed}}, "prices": None}


@pytest.mark.parametrize(
    ("info", "variables"),
    [
        (stack(), {"STACK_GPUS": "8"}),
        (stack(gpu=""), {"STACK_GPUS": "0"}),
        (stack(max=0), {"STACK_GPUS": "0"}),
        (None, {}),
    ],
    ids=["a stack", "one without GPUs", "one that may start none", "none"],
)
def test_program_knows_the_gpus_of_its_stack(
    info: Any, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "read_cluster_info", lambda: info)
    assert launcher.stack_gpus(RunConfig(command=("train.py",), driver=True)) == variables
    on_cpus = RunConfig(command=("train.py",), driver=True, device="cpu")
    assert launcher.stack_gpus(on_cpus) == {"STACK_GPUS": "0"}
